"""The typed settings: one frozen tree, read from TOML, JSON, a mapping or the environment. Unknown keys are refused.

Sizes (`*_bytes`) may be written as integers or as text such as "64MiB" or "1.5 GB".
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from tierkv.errors import ConfigError
from tierkv.types import SLOT_GRANULE_BYTES

_UNITS = {
    "": 1, "b": 1,
    "k": 1 << 10, "kib": 1 << 10, "m": 1 << 20, "mib": 1 << 20,
    "g": 1 << 30, "gib": 1 << 30, "t": 1 << 40, "tib": 1 << 40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*\Z")
MAX_SOCKET_PATH_BYTES = 107
MAX_TIER_BYTES = (1 << 32) * SLOT_GRANULE_BYTES - SLOT_GRANULE_BYTES

PositiveBytes = Annotated[int, msgspec.Meta(gt=0, le=MAX_TIER_BYTES)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Admission = Literal["on-evict", "write-through", "second-touch"]
"""When a block is written to a lower tier: as it is evicted from the tier above, as soon as it is saved, or as it is
evicted and only if it was used again, or saved a second time after it was lost."""
Codec = Literal["none", "zstd", "zstd-planes"]


class DramConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The DRAM tier: one arena."""

    capacity_bytes: PositiveBytes
    """Bytes of the arena. Blocks are rounded up to 4 KiB."""
    slab_bytes: PositiveBytes = 64 << 20
    """The unit in which the arena is given to block sizes. The largest block must fit."""
    shared: bool = False
    """Use a memfd that other processes can map, instead of private memory."""
    huge_pages: Literal["auto", "on", "off"] = "auto"
    """auto: use them where the kernel grants them. on: refuse to start without."""
    lock_memory: Literal["auto", "on", "off"] = "auto"
    """mlock the arena. auto: try, and go on unlocked with a note where the limit forbids it."""
    first_touch: Literal["background", "now", "never"] = "background"
    """When the kernel maps the arena's pages."""
    free_ahead: Annotated[float, msgspec.Meta(ge=0, le=0.5)] = 0.01
    """The share of the slots that is kept free by demoting in the background, so that loads find room at once. Only
    where a lower tier takes what is evicted."""


class NvmeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The NVMe tier: a slot file and its catalog in a directory of its own."""

    directory: str
    """A directory on a local file system, made if it is missing."""
    capacity_bytes: PositiveBytes
    """Bytes of the slot file, preallocated."""
    slab_bytes: PositiveBytes = 64 << 20
    """As in dram, for the slot file."""
    engine: Literal["auto", "io_uring", "threads"] = "auto"
    """auto: io_uring where the kernel allows it, else a thread pool."""
    queue_depth: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 32
    """Operations in flight at most."""
    direct: Literal["auto", "on", "off"] = "auto"
    """O_DIRECT. auto: where the file system allows it."""
    sync: Literal["power", "process"] = "power"
    """What a committed block survives: a power cut (fdatasync before each catalog commit), or a killed process."""
    admission: Admission = "on-evict"
    """When a block is written here: see Admission."""


class DfsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The shared tier: content-addressed files on any directory that several hosts mount."""

    directory: str
    """An existing directory on the shared file system, the same on all hosts. Files go under v1/."""
    capacity_bytes: Annotated[int, msgspec.Meta(gt=0)] | None = None
    """Bytes of files at most, as this node counts them. None: no limit of ours."""
    codec: Codec = "none"
    """Compression of new files; files of every codec can be read. zstd-planes splits values into byte planes first,
    which suits 16-bit floats."""
    codec_level: Annotated[int, msgspec.Meta(ge=-7, le=19)] = 1
    """zstd's level."""
    threads: Annotated[int, msgspec.Meta(ge=1, le=256)] = 8
    """File operations under way at most."""
    deadline_s: Seconds = 30.0
    """A file operation that takes longer counts as lost; its thread is written off until it returns."""
    direct: Literal["auto", "on", "off"] = "auto"
    """O_DIRECT. auto: where the file system allows it."""
    sync: bool = True
    """fsync each file before it is published. Off is faster and trusts the file system with torn files (they are
    found by the checksum and dropped)."""
    admission: Admission = "write-through"
    """When a block is written here: see Admission."""
    probe_timeout_s: Annotated[float, msgspec.Meta(ge=0)] = 0.05
    """How long match() may wait to learn what other hosts wrote. 0: learn it in the background only."""
    rescan_s: Seconds = 600.0
    """How often the directory is listed for what other hosts wrote and removed."""


class StoreConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A store: DRAM, and below it any of NVMe and a shared file system."""

    dram: DramConfig
    """The first tier; every block goes through it."""
    nvme: NvmeConfig | None = None
    """None: no such tier."""
    dfs: DfsConfig | None = None
    """None: no such tier."""
    eviction: Literal["lru", "lru-in-order", "fifo"] = "lru"
    """lru: least recently used, the tail of a chain before its head."""
    promote: Literal["on-hit", "never"] = "on-hit"
    """Whether a block that was loaded from a lower tier is kept in DRAM."""
    copy_threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    """Threads that copy blocks between DRAM and the caller's memory, the calling one included."""
    load_threads: Annotated[int, msgspec.Meta(ge=1, le=16)] = 2
    """Loads from lower tiers that are served at a time."""
    staging_bytes: PositiveBytes = 64 << 20
    """Memory for blocks on their way to the caller when all of DRAM is in use."""
    save_queue_blocks: Annotated[int, msgspec.Meta(ge=1)] = 16384
    """Blocks that wait to be saved at most; more are dropped."""
    save_queue_bytes: Annotated[int, msgspec.Meta(ge=1)] = 16 << 30
    """Their bytes at most."""
    load_queue_blocks: Annotated[int, msgspec.Meta(ge=1)] = 65536
    """Blocks of loads that wait or are under way at most; more end as TIMEOUT at once."""
    write_queue_blocks: Annotated[int, msgspec.Meta(ge=1)] = 16384
    """Blocks that wait for write-through to a lower tier at most; more are left to eviction."""
    save_timeout_s: Seconds = 60.0
    """A block whose parts are not all in by then is dropped."""
    load_timeout_s: Seconds = 30.0
    """How long a load may take where the call does not say."""


class AgentConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The node agent: one store, and the socket at which engines attach to it."""

    store: StoreConfig
    """The tiers. dram.shared is taken as true: clients map the arena."""
    socket: str
    """The path of the Unix socket. Its mode is 0600; only this user (and allowed_uids) may connect."""
    allowed_uids: tuple[int, ...] = ()
    """Other users that may attach. They must be able to reach the socket, and can read and write the whole arena."""
    max_clients: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 64
    """Clients that may be attached at a time."""
    max_requests: Annotated[int, msgspec.Meta(ge=1, le=65536)] = 256
    """Requests of one client that may be under way; more are refused."""
    max_reserved_bytes: Annotated[int, msgspec.Meta(gt=0)] | None = None
    """DRAM that one client may hold reserved for saves. None: a quarter of the arena."""
    max_leased_bytes: Annotated[int, msgspec.Meta(gt=0)] | None = None
    """Blocks that one client may hold by leases. None: half of the arena."""
    max_lease_s: Seconds = 300.0
    """The longest time to live of a lease; a client extends it while it needs it."""
    send_timeout_s: Seconds = 10.0
    """A client that does not read its answers for this long is disconnected."""
    keep_dram: bool = False
    """A supervisor process holds the arena, so that a restarted agent finds the blocks in it."""
    metrics_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] | None = None
    """Port of /metrics and /healthz. None: neither. 0: any free one (it is logged)."""
    metrics_host: str = "127.0.0.1"
    """The address to listen at. There is no authentication."""
    drain_timeout_s: Seconds = 30.0
    """How long SIGTERM waits for blocks to be written below before the agent ends."""
    end_when_idle_s: Seconds | None = None
    """End, as after SIGTERM, when no client was attached for this long. None: never. Not with keep_dram."""


def parse_bytes(value: int | str, where: str = "size") -> int:
    """Bytes from an integer or from text such as '64MiB'; ConfigError names `where`."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ConfigError(f"{where}: {value!r} is not a size: write an integer or text such as '64MiB'")
    if isinstance(value, int):
        return value
    found = _SIZE.match(value)
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise ConfigError(
            f"{where}: {value!r} is not a size: write an integer or text such as '64MiB' or '1.5 GB'"
        )
    return int(float(found[1]) * unit) if "." in found[1] else int(found[1]) * unit


def _with_sizes(node: Any, where: str) -> Any:
    """The settings with sizes in text made integers; `where` is what stands before a key in messages."""
    if not isinstance(node, Mapping):
        return node
    converted = {}
    for key, value in node.items():
        if str(key).endswith("_bytes") and isinstance(value, str):
            converted[key] = parse_bytes(value, f"{where}{key}")
        else:
            converted[key] = _with_sizes(value, f"{where}{key}.")
    return converted


def config_from_mapping(fields: Mapping[str, Any], source: str = "config") -> StoreConfig:
    """Builds and checks a StoreConfig; ConfigError says which key of `source` is wrong."""
    try:
        config = msgspec.convert(_with_sizes(fields, f"{source}: "), type=StoreConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}") from error
    validate(config, source)
    return config


def validate(config: StoreConfig, source: str = "config") -> None:
    """Checks what types cannot say; raises ConfigError."""
    for name, tier in (("dram", config.dram), ("nvme", config.nvme)):
        if tier is None:
            continue
        for field in ("capacity_bytes", "slab_bytes"):
            value = getattr(tier, field)
            if value % SLOT_GRANULE_BYTES or not 0 < value <= MAX_TIER_BYTES:
                raise ConfigError(
                    f"{source}: {name}.{field} is {value}: it must be a multiple of {SLOT_GRANULE_BYTES} and at most "
                    f"{MAX_TIER_BYTES}"
                )
    if config.nvme is not None and not config.nvme.directory:
        raise ConfigError(f"{source}: nvme.directory is empty: name a directory on a local file system")
    if config.dfs is not None and not config.dfs.directory:
        raise ConfigError(f"{source}: dfs.directory is empty: name a directory that all hosts mount")


def load_config(path: str | os.PathLike[str]) -> StoreConfig:
    """Reads a StoreConfig from a .toml or .json file."""
    return config_from_mapping(_read_settings(path), str(path))


def _read_settings(path: str | os.PathLike[str]) -> dict[str, Any]:
    place = Path(path)
    try:
        data = place.read_bytes()
    except OSError as error:
        raise ConfigError(f"{place}: cannot be read: {error.strerror}") from error
    try:
        text = data.decode("utf-8")
        fields = json.loads(text) if place.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"{place}: not valid {'JSON' if place.suffix == '.json' else 'TOML'}: {error}"
        ) from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{place}: a table of settings is needed at the top")
    return fields


def agent_config_from_mapping(fields: Mapping[str, Any], source: str = "config") -> AgentConfig:
    """Builds and checks an AgentConfig; ConfigError says which key of `source` is wrong."""
    try:
        config = msgspec.convert(_with_sizes(fields, f"{source}: "), type=AgentConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}") from error
    validate(config.store, f"{source}: store")
    if not config.socket:
        raise ConfigError(f"{source}: socket is empty: name a path for the Unix socket")
    if len(os.fsencode(config.socket)) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"{source}: socket is longer than {MAX_SOCKET_PATH_BYTES} bytes: choose a shorter path"
        )
    if config.keep_dram and config.end_when_idle_s is not None:
        raise ConfigError(f"{source}: keep_dram and end_when_idle_s contradict each other: set one of them")
    return config


def load_agent_config(
    path: str | os.PathLike[str] | None, overrides: Mapping[str, Any] | None = None
) -> AgentConfig:
    """Reads an AgentConfig from a .toml or .json file; `overrides` (nested like it) win over what stands there.

    Without a file the overrides must say all that is needed.
    """
    fields = _read_settings(path) if path is not None else {}
    return agent_config_from_mapping(
        _merged(fields, overrides or {}), str(path) if path is not None else "settings"
    )


def _merged(fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(fields)
    for key, value in overrides.items():
        below = merged.get(key)
        if isinstance(value, Mapping):
            merged[key] = _merged(below if isinstance(below, Mapping) else {}, value)
        else:
            merged[key] = value
    return merged


def config_from_environment(environment: Mapping[str, str] = os.environ) -> StoreConfig:
    """Reads TIERKV_CONFIG, which holds a path or, when it starts with '{', the settings as JSON."""
    value = environment.get("TIERKV_CONFIG", "")
    if not value:
        raise ConfigError(
            "TIERKV_CONFIG is not set: set it to a .toml or .json file, or to the settings as JSON"
        )
    if value.lstrip().startswith("{"):
        try:
            return config_from_mapping(json.loads(value), "TIERKV_CONFIG")
        except json.JSONDecodeError as error:
            raise ConfigError(f"TIERKV_CONFIG is not valid JSON: {error}") from error
    return load_config(value)
