"""Settings: typed, checked, read from anywhere, and wrong ones are named."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.config import (
    MAX_TIER_BYTES,
    DfsConfig,
    DramConfig,
    NvmeConfig,
    StoreConfig,
    config_from_environment,
    config_from_mapping,
    load_config,
    parse_bytes,
    validate,
)
from tierkv.errors import ConfigError, TierKVError

MINIMAL = {"dram": {"capacity_bytes": 1 << 20}}
FULL = {
    "dram": {"capacity_bytes": "1GiB", "slab_bytes": "2 MiB", "shared": True},
    "nvme": {"directory": "/cache", "capacity_bytes": "100 GiB", "engine": "threads", "queue_depth": 64},
    "dfs": {"directory": "/mnt/shared", "codec": "zstd-planes", "capacity_bytes": "1.5TB"},
    "eviction": "lru",
    "promote": "never",
    "save_queue_blocks": 100,
}


@given(st.integers(0, 1 << 50))
def test_an_integer_is_a_size(value: int) -> None:
    assert parse_bytes(value) == value
    assert parse_bytes(str(value)) == value


@given(st.integers(0, 100_000), st.sampled_from(["k", "m", "g", "t"]), st.sampled_from(["", " ", "  "]))
def test_units_count_in_1024_and_in_1000(number: int, letter: str, space: str) -> None:
    power = "kmgt".index(letter) + 1
    for unit in (letter, letter.upper(), letter + "iB", letter.upper() + "IB"):
        assert parse_bytes(f"{number}{space}{unit}") == number << (10 * power)
    assert parse_bytes(f"{number}{space}{letter}B") == number * 1000**power


def test_fractions_are_sizes_too() -> None:
    assert parse_bytes("1.5 GB") == 1_500_000_000
    assert parse_bytes("0.5MiB") == 1 << 19


@pytest.mark.parametrize(
    "bad", ["", "MiB", "1 XiB", "-1", "1e9", "1,000", "1 2", "0x10", True, None, 1.5, [1], "1.5.2 MB"]
)
def test_what_is_no_size_is_refused_by_its_place(bad: object) -> None:
    with pytest.raises(ConfigError, match=r"dram\.capacity_bytes"):
        parse_bytes(bad, "dram.capacity_bytes")  # type: ignore[arg-type]


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_config_error(text: str) -> None:
    try:
        assert parse_bytes(text) >= 0
    except ConfigError:
        pass


def test_a_full_mapping_becomes_the_tree() -> None:
    config = config_from_mapping(FULL)
    assert config.dram == DramConfig(capacity_bytes=1 << 30, slab_bytes=2 << 20, shared=True)
    assert config.nvme == NvmeConfig(
        directory="/cache", capacity_bytes=100 << 30, engine="threads", queue_depth=64
    )
    assert config.dfs == DfsConfig(directory="/mnt/shared", codec="zstd-planes", capacity_bytes=1_500 * 10**9)
    assert config.promote == "never"
    assert config.save_queue_blocks == 100


def test_the_minimum_has_defaults_and_no_lower_tiers() -> None:
    config = config_from_mapping(MINIMAL)
    assert (config.nvme, config.dfs, config.eviction) == (None, None, "lru")


def test_a_config_survives_json() -> None:
    config = config_from_mapping(FULL)
    assert config_from_mapping(json.loads(msgspec.json.encode(config))) == config


def _changed(path: str, value: object) -> dict:
    fields = json.loads(json.dumps(FULL))
    *tables, last = path.split(".")
    node = fields
    for table in tables:
        node = node[table]
    node[last] = value
    return fields


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("colour", "red"),
        ("dram.capacity", 1 << 20),
        ("nvme.dir", "/x"),
        ("dfs.path", "/x"),
        ("dram.capacity_bytes", 0),
        ("dram.capacity_bytes", -4096),
        ("dram.capacity_bytes", 4097),
        ("dram.capacity_bytes", MAX_TIER_BYTES + 4096),
        ("dram.capacity_bytes", "lots"),
        ("dram.capacity_bytes", 1.5),
        ("dram.slab_bytes", 1000),
        ("dram.huge_pages", "maybe"),
        ("dram.shared", "yes"),
        ("nvme.directory", ""),
        ("nvme.directory", 7),
        ("nvme.capacity_bytes", "5000"),
        ("nvme.engine", "aio"),
        ("nvme.queue_depth", 0),
        ("nvme.queue_depth", 5000),
        ("nvme.admission", "always"),
        ("dfs.directory", ""),
        ("dfs.codec", "gzip"),
        ("dfs.codec_level", 30),
        ("dfs.threads", 0),
        ("dfs.deadline_s", 0),
        ("dfs.probe_timeout_s", -1),
        ("dfs.capacity_bytes", 0),
        ("eviction", "random"),
        ("promote", True),
        ("copy_threads", 0),
        ("load_threads", 17),
        ("save_queue_blocks", 0),
        ("save_timeout_s", 0),
        ("load_timeout_s", -1),
        ("dram", None),
        ("dram", []),
    ],
)
def test_a_wrong_setting_is_named_with_its_source(path: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_mapping(_changed(path, value), "engine.toml")
    message = str(caught.value)
    assert path.rsplit(".", 1)[-1] in message
    if not isinstance(value, str) or value != "lots":
        assert "engine.toml" in message


def test_a_missing_dram_table_is_refused() -> None:
    with pytest.raises(ConfigError, match="dram"):
        config_from_mapping({})


def test_validate_checks_trees_built_in_code() -> None:
    validate(StoreConfig(dram=DramConfig(capacity_bytes=1 << 20)))
    with pytest.raises(ConfigError, match="slab_bytes"):
        validate(StoreConfig(dram=DramConfig(capacity_bytes=1 << 20, slab_bytes=5000)))
    nvme = NvmeConfig(directory="", capacity_bytes=1 << 20)
    with pytest.raises(ConfigError, match=r"nvme\.directory"):
        validate(StoreConfig(dram=DramConfig(capacity_bytes=1 << 20), nvme=nvme))


def test_files_of_both_kinds_are_read(tmp_path: Path) -> None:
    as_json = tmp_path / "store.json"
    as_json.write_text(json.dumps(FULL))
    as_toml = tmp_path / "store.toml"
    as_toml.write_text(
        'promote = "never"\n[dram]\ncapacity_bytes = "64 MiB"\n'
        '[nvme]\ndirectory = "/c"\ncapacity_bytes = "1GiB"\n'
    )
    assert load_config(as_json) == config_from_mapping(FULL)
    config = load_config(str(as_toml))
    assert config.promote == "never"
    assert config.nvme == NvmeConfig(directory="/c", capacity_bytes=1 << 30)


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.json", "{"), ("a.toml", "x = "), ("a.json", "[]"), ("a.toml", "colour = 1"), ("a.json", "7")],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, text: str) -> None:
    place = tmp_path / name
    place.write_text(text)
    with pytest.raises(ConfigError, match=name):
        load_config(place)


def test_a_file_that_is_missing_or_binary_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent"):
        load_config(tmp_path / "absent.toml")
    with pytest.raises(ConfigError):
        load_config(tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.toml"):
        load_config(binary)


def test_the_environment_holds_a_path_or_json(tmp_path: Path) -> None:
    place = tmp_path / "s.json"
    place.write_text(json.dumps(MINIMAL))
    expected = config_from_mapping(MINIMAL)
    assert config_from_environment({"TIERKV_CONFIG": str(place)}) == expected
    assert config_from_environment({"TIERKV_CONFIG": json.dumps(MINIMAL)}) == expected


@pytest.mark.parametrize("value", ["", "{", '{"dram": 1}', '{"colour": 1}'])
def test_a_wrong_environment_is_a_config_error(value: str) -> None:
    with pytest.raises(ConfigError, match="TIERKV_CONFIG"):
        config_from_environment({"TIERKV_CONFIG": value})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(["dram", "nvme", "dfs", "capacity_bytes", "slab_bytes", "directory", "eviction", "x"])


@given(st.dictionaries(KEYS, json_values | st.dictionaries(KEYS, json_values, max_size=4), max_size=4))
def test_any_mapping_gives_a_config_or_an_error_of_ours(fields: dict) -> None:
    try:
        config_from_mapping(fields)
    except TierKVError:
        pass


def test_a_bad_size_names_its_file_and_key(tmp_path: Path) -> None:
    place = tmp_path / "store.toml"
    place.write_text('[dram]\ncapacity_bytes = "lots"\n')
    with pytest.raises(ConfigError, match=r"store\.toml: dram\.capacity_bytes: 'lots' is not a size"):
        load_config(place)
