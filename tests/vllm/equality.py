"""What it means that a cache changed nothing: the same tokens, and the same certainty about each."""

from __future__ import annotations

import random
from collections.abc import Sequence

from engine_host import Answer
from engine_models import VOCABULARY

EXACT = 1e-4
"""How far log-probabilities may differ where the same bytes went into the same kernels. A wrong block moves them
further, also where the tokens happen to stay the same."""


def prompt_of(seed: object, length: int) -> list[int]:
    """Random tokens; the same seed gives the same, a longer one goes on from a shorter one."""
    source = random.Random(repr(seed))
    return [source.randrange(3, VOCABULARY - 2) for _ in range(length)]


def apart(found: Sequence[Answer], expected: Sequence[Answer]) -> float:
    """How far the log-probabilities of the same tokens differ at most."""
    return max(
        abs(one - other)
        for left, right in zip(found, expected, strict=True)
        for one, other in zip(left["logprobs"], right["logprobs"], strict=True)
    )


def check_same(
    found: Sequence[Answer], expected: Sequence[Answer], what: str, tolerance: float = EXACT
) -> None:
    """AssertionError unless both are the same answers."""
    tokens = [[answer["tokens"] for answer in answers] for answers in (found, expected)]
    assert tokens[0] == tokens[1], f"{what}: other tokens than without a cache"
    assert apart(found, expected) <= tolerance, (
        f"{what}: log-probabilities differ by {apart(found, expected)}"
    )


def cached(answers: Sequence[Answer]) -> list[int]:
    """Prompt tokens that were not computed, of each answer."""
    return [answer["cached"] for answer in answers]
