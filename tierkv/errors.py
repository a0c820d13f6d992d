"""Everything tierkv raises. Expected outcomes (a miss, a full tier) are values, never exceptions.

Every message says what is wrong, where, and what to do about it.
"""

from __future__ import annotations


class TierKVError(Exception):
    """The root of all errors of tierkv."""


class ConfigError(TierKVError, ValueError):
    """A setting is unknown, missing or out of range."""


class ArgumentError(TierKVError, ValueError):
    """A call's argument has the wrong shape, dtype, length or value."""


class KeyspaceError(TierKVError, ValueError):
    """A keyspace spec is incomplete or unresolved, or does not belong to this store."""


class FormatError(TierKVError):
    """Stored data is of an unknown version or cannot be understood."""


class LockedError(TierKVError):
    """Another process has this directory open."""


class StorageError(TierKVError):
    """A medium cannot be used at all (missing directory, no permission, no space for the files)."""


class ClosedError(TierKVError):
    """The store, tier or job's owner was closed."""
