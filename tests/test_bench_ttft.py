"""What bench_ttft.py makes of its samples, and that its second turns can be measured again; the engines are not run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

BENCH = Path(__file__).resolve().parent.parent / "bench"
sys.path.append(str(BENCH))

from peers import results, workload  # noqa: E402
from peers.results import Answer, Sample  # noqa: E402
from peers.workload import ANSWER_TOKENS, BLOCK_TOKENS, CHECKED_TOKENS, Session  # noqa: E402

TOKENS = 1024


def sample(row: str, ttft_ms: float, **changed: Any) -> Sample:
    blocks = TOKENS // BLOCK_TOKENS
    plain: dict[str, Any] = {
        "cached_tokens": 0 if row == "none" else TOKENS,
        "tokens_equal": True,
        "logprob_error": 1e-6,
        "sources": {"dram": blocks, "nvme": blocks if row == "tierkv_nvme" else 0}
        if row.startswith("tierkv")
        else {},
    }
    return Sample(row=row, tokens=TOKENS, ttft_ms=ttft_ms, **{**plain, **changed})


def report(*samples: Sample, absent: tuple[dict[str, str], ...] = ()) -> dict[str, Any]:
    floor = [sample("none", 1000.0), sample("local", 50.0)]
    return {"rows": results.rows_of([*floor, *samples]), "absent": list(absent), "notes": []}


def row(of: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in of["rows"] if one["name"] == name)


@given(st.integers(1, 300), st.integers(0, 9))
def test_a_second_turn_completes_no_block(blocks: int, number: int) -> None:
    session = Session(blocks * BLOCK_TOKENS, number)
    prompt = session.second(list(range(ANSWER_TOKENS)))
    assert prompt[: session.tokens] == session.first
    assert len(prompt) // BLOCK_TOKENS == blocks
    assert (len(prompt) + CHECKED_TOKENS) // BLOCK_TOKENS == blocks
    assert workload.expected_hit(session.tokens) == session.tokens


def test_sessions_differ_and_are_the_same_in_every_process() -> None:
    first = {tuple(Session(TOKENS, number).first) for number in range(8)}
    assert len(first) == 8
    program = f"from peers.workload import Session; print(sum(Session({TOKENS}, 3).first))"
    told = subprocess.run(
        [sys.executable, "-c", program], cwd=BENCH, capture_output=True, text=True, check=True, timeout=60
    )
    assert int(told.stdout) == sum(Session(TOKENS, 3).first)


def test_one_wrong_block_is_another_prompt_of_the_same_length() -> None:
    session, answer = Session(TOKENS, 0), list(range(ANSWER_TOKENS))
    right, wrong = session.second(answer), session.second_of_another(answer)
    differing = [at for at, (one, other) in enumerate(zip(right, wrong, strict=True)) if one != other]
    assert differing
    assert max(differing) - min(differing) < BLOCK_TOKENS


def test_lengths_that_are_no_whole_blocks_are_refused() -> None:
    workload.check_lengths([BLOCK_TOKENS, 4096])
    with pytest.raises(ValueError, match="100 tokens"):
        workload.check_lengths([4096, 100])


def test_rows_have_medians_and_stand_against_no_cache_and_the_local_one() -> None:
    made = report(*(sample("tierkv_dram", ms) for ms in (300.0, 100.0, 120.0)))
    found = row(made, "tierkv_dram")
    assert (found["ttft_ms"], found["ttft_ms_min"], found["ttft_ms_max"]) == (120.0, 100.0, 300.0)
    assert found["times_no_cache"] == pytest.approx(1000 / 120)
    assert found["over_local_ms"] == 70.0
    assert found["problems"] == []
    assert results.failures(made) == []
    assert "tierkv, DRAM " in results.table(made)


@pytest.mark.parametrize(
    ("name", "changed", "says"),
    [
        ("tierkv_dram", {"cached_tokens": TOKENS - BLOCK_TOKENS}, "cached 896 to 1024 tokens, not 1024"),
        ("tierkv_dram", {"tokens_equal": False}, "TOKENS DIFFER"),
        ("tierkv_nvme", {"logprob_error": 0.5}, "LOGPROBS DIFFER"),
        ("tierkv_nvme", {"sources": {"dram": 8, "nvme": 0}}, "not the tier that is meant"),
        ("tierkv_second_engine", {"sources": {"dram": 8, "nvme": 8}}, "not the tier that is meant"),
        ("offloading", {"tokens_equal": False}, "TOKENS DIFFER"),
    ],
)
def test_what_is_wrong_is_said_and_fails(name: str, changed: dict[str, Any], says: str) -> None:
    made = report(sample(name, 100.0), sample(name, 100.0, **changed))
    assert says in "; ".join(row(made, name)["problems"])
    assert says in results.table(made)
    assert len(results.failures(made)) == 1


def test_a_peer_without_its_hits_is_told_but_is_no_failure() -> None:
    made = report(sample("offloading", 900.0, cached_tokens=0))
    assert "cached 0 to 0 tokens" in results.table(made)
    assert results.failures(made) == []


def test_an_absent_peer_is_told_and_an_absent_tierkv_fails() -> None:
    peer = {"name": "mooncake_pool", "what": "Mooncake, pool process", "why": "its wheel is not installed"}
    made = report(absent=(peer,))
    assert "Mooncake, pool process: absent, its wheel is not installed" in results.table(made)
    assert results.failures(made) == []
    ours = {"name": "tierkv", "what": "tierkv", "why": "it failed"}
    assert results.failures(report(absent=(peer, ours))) == ["tierkv: it failed"]


def test_the_error_is_the_largest_of_all_tokens() -> None:
    answer = Answer([1], [2, 3], [-0.5, -0.25])
    assert answer.error([-0.5, -0.75]) == 0.5


def test_without_vllm_it_says_what_to_do() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH / "bench_ttft.py"), "--quick", "--python", "/nowhere/python"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "make vllm-cpu" in done.stderr
    assert "Traceback" not in done.stderr
