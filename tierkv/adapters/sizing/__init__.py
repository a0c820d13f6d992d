"""How much a model's KV cache takes in the store, from its configuration file alone: no engine, no weights, no GPU."""
