"""What all tests share: hypothesis profiles and a watch over threads that outlive their test."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("tierkv.testing")  # the shared suites' assertions explain themselves

_SLOW_MACHINE = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("default", deadline=None, max_examples=60, suppress_health_check=_SLOW_MACHINE)
settings.register_profile("ci", parent=settings.get_profile("default"), derandomize=True, print_blob=True)
settings.register_profile("long", parent=settings.get_profile("default"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

THREAD_END_TIMEOUT_S = 5.0


@pytest.fixture(autouse=True)
def no_thread_outlives_its_test() -> Iterator[None]:
    """Fails a test that leaves a thread behind: whoever starts threads ends them in close()."""
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        thread.join(THREAD_END_TIMEOUT_S)
    alive = [thread.name for thread in left if thread.is_alive()]
    assert not alive, f"threads outlived the test: {alive}"
