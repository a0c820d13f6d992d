"""Tests with the real vLLM. Without it each file of this directory is one skipped test, and all say the same line."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from agent_process import AgentProcess
from engine_host import EngineHost

_WITHOUT_ENGINE = (
    "vLLM is not installed here: `make vllm-cpu` makes its environment, `make test-vllm` runs these tests"
)


def has_engine() -> bool:
    """Whether vLLM is installed. find_spec() would not do: this very directory is called vllm."""
    return bool(metadata.packages_distributions().get("vllm"))


class _Skipped(pytest.Item):
    """Stands for a file whose imports would fail."""

    def runtest(self) -> None:
        pytest.skip(_WITHOUT_ENGINE)


class _SkippedFile(pytest.File):
    def collect(self) -> Iterator[pytest.Item]:
        yield _Skipped.from_parent(self, name="needs vLLM")


if not has_engine():

    def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector:
        """Leaves the file unread."""
        return _SkippedFile.from_parent(parent, path=module_path)
else:

    def pytest_configure(config: pytest.Config) -> None:
        """The engine and what it imports may warn; tierkv may not, and a test may leave nothing open."""
        for line in (
            "ignore::DeprecationWarning",
            "ignore::FutureWarning",
            "ignore::UserWarning",
            r"error:::tierkv(\..*)?",
            "error::pytest.PytestUnraisableExceptionWarning",
            "error::pytest.PytestUnhandledThreadExceptionWarning",
        ):
            config.addinivalue_line("filterwarnings", line)


@pytest.fixture(scope="module")
def _hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineHost]]:
    """The process that this file's tests have in common, if there is one now."""
    hosts: list[EngineHost] = []
    yield hosts
    for host in hosts:
        host.__exit__(None, None, None)


@pytest.fixture
def engine(_hosts: list[EngineHost], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHost]:
    """A process for engines; the engine that a test leaves open is closed."""
    if not _hosts:
        _hosts.append(EngineHost(tmp_path_factory.mktemp("engine")))
    host = _hosts[0]
    try:
        yield host
        host.close_engine()
    except BaseException:
        _hosts.clear()
        host.kill()
        host.release()
        raise


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    """An agent with DRAM only."""
    with AgentProcess(tmp_path) as process:
        yield process
