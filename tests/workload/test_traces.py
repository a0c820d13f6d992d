"""Reading traces: what is written comes back, and a bad line is an error that names its place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import ArgumentError, FormatError
from tierkv.workload.traces import Request, read_trace, write_trace

REAL_TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
GOOD = '{"timestamp": 1, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}'

counts = st.integers(0, 1 << 40)
requests_strategy = st.lists(
    st.tuples(counts, counts, counts, st.lists(counts, max_size=20, unique=True)), max_size=20
).map(
    lambda rows: [
        Request(float(ms), i, o, np.array(ids, np.int64))
        for ms, i, o, ids in sorted(rows, key=lambda r: r[0])
    ]
)


@given(requests_strategy)
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, requests: list[Request]
) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    assert write_trace(path, requests) == len(requests)
    found = list(read_trace(path))
    assert len(found) == len(requests)
    for one, other in zip(found, requests, strict=True):
        assert (one.timestamp_ms, one.input_length, one.output_length) == (
            other.timestamp_ms,
            other.input_length,
            other.output_length,
        )
        assert one.hash_ids.dtype == np.int64
        np.testing.assert_array_equal(one.hash_ids, other.hash_ids)


def test_other_fields_are_ignored_and_the_limit_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text((GOOD[:-1] + ', "chat_id": 3}\n') * 3)
    assert len(list(read_trace(path, limit=2))) == 2


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "JSON"),
        ("[1, 2]", "array"),
        ("{", "JSON"),
        (GOOD + GOOD, "JSON"),
        ('{"timestamp": 1, "input_length": 600, "output_length": 5}', "hash_ids"),
        (GOOD.replace("600", "-1"), "input_length"),
        (GOOD.replace("600", '"600"'), "input_length"),
        (GOOD.replace("[7, 8]", "[7, 8.5]"), "hash_ids"),
        (GOOD.replace("[7, 8]", "[7, -8]"), "hash_ids"),
        (GOOD.replace("[7, 8]", "[7, 9223372036854775808]"), "hash_ids"),
        (GOOD.replace("[7, 8]", "[7, 8, 7]"), "twice"),
        (GOOD.replace('"timestamp": 1', '"timestamp": 0'), "before"),
        ("\udcff", "JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(f"{GOOD}\n{line}\n{GOOD}\n".encode(errors="surrogateescape"))
    requests = read_trace(path)
    next(requests)
    with pytest.raises(FormatError) as error:
        next(requests)
    assert f"{path}:2:" in str(error.value)
    assert says in str(error.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"nowhere\.jsonl"):
        list(read_trace(tmp_path / "nowhere.jsonl"))
    with pytest.raises(ArgumentError, match="cannot be read"):
        list(read_trace(tmp_path))


@pytest.mark.skipif(not REAL_TRACES.is_dir(), reason=f"no real traces in {REAL_TRACES}")
@pytest.mark.parametrize(
    ("name", "requests", "blocks"),
    [("mooncake_conversation.jsonl", 12_031, 288_500), ("mooncake_synthetic.jsonl", 3_993, 121_877)],
)
def test_the_real_traces_are_read_whole(name: str, requests: int, blocks: int) -> None:
    found = list(read_trace(REAL_TRACES / name))
    assert len(found) == requests
    assert sum(len(request.hash_ids) for request in found) == blocks
    assert all(len(request.hash_ids) == -(-request.input_length // 512) for request in found)
