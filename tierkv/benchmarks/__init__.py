"""Benchmarks: one module a tier, each with the machine's own limit measured beside it in the same run.

A figure alone says little on a shared machine; value and limit are measured in turn, round by round, and
their medians compared.
"""
