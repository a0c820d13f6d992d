"""Insight for people: reports."""
