"""The node agent: one process owns a host's tiers, engines attach over a Unix socket and may come and go."""
