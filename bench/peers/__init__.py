"""Helpers of bench_ttft.py: real vLLM engines, and the caches beside tierkv that they are measured with."""
