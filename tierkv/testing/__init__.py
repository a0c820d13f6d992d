"""What the package ships for the tests of its own parts and of back ends written elsewhere.

- `tiers.TierConformance`: the suite that a tier must pass; a back end's test is a small subclass.
- `memory_tier.MemoryTier`: the smallest complete tier, to copy the shape of.
- `wrappers`, `faults`: tiers and I/O engines that count, delay and fail on demand.
- `model.ModelStore`, `model.LruModel`: plain-dict models of what a store may answer.
- `strategies`: hypothesis strategies for keyspaces, hashes, caches and operations.
- `buffers`: aligned memory, paged caches and payloads that derive from a block's name.

Nothing in the package imports from here. Needs the `testing` extra (pytest, hypothesis).
"""
