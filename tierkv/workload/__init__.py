"""Workloads: request traces, a generator of agent sessions, and their replay through a store with real
bytes."""
