"""Adapters: what makes tierkv the back end of an inference engine, one package an engine."""
