"""tierkv: a tiered storage engine that keeps the KV cache of LLM serving alive beyond one GPU."""

__version__ = "0.1.0"
