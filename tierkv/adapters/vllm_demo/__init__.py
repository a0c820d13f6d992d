"""The demo of `tierkv demo vllm`: two real vLLM engines share one cache while a session hops between them."""
