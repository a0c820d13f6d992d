"""The tiers: one medium each, all behind the seam in base.py."""
