"""docs/configuration.md is what the typed settings say, and its example is one."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tierkv.config import load_agent_config

ROOT = Path(__file__).resolve().parent.parent.parent
TOOL = ROOT / "tools" / "config_reference.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("config_reference", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_document_is_up_to_date(tool: ModuleType) -> None:
    assert tool.TARGET.read_text() == tool.reference(), "run python tools/config_reference.py"


def test_a_stale_document_is_noticed(tool: ModuleType, tmp_path: Path) -> None:
    stale = tmp_path / "configuration.md"
    stale.write_text(tool.reference() + "more\n")
    script = (
        "import runpy, sys; sys.argv[1:] = ['--check']; "
        f"module = runpy.run_path({str(TOOL)!r}); from pathlib import Path; "
        f"module['main'].__globals__['TARGET'] = Path({str(stale)!r}); sys.exit(module['main']())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    assert b"out of date" in done.stderr


def test_every_setting_has_a_meaning(tool: ModuleType) -> None:
    text = tool.reference()
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", text, re.MULTILINE)
    assert len(rows) > 40
    assert not [name for name, meaning in rows if not meaning.strip()]


def test_inherited_settings_are_listed_too_with_their_last_text(tool: ModuleType) -> None:
    for title, waiting, starting in [
        ("vLLM connector", "the engine does not start", "the next engine finds the cache"),
        ("vLLM offloading tier", "the engine goes on without it", "also when it went away"),
    ]:
        _, _, section = tool.reference().partition(f"## {title}\n")
        rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", section.partition("\n## ")[0], re.MULTILINE))
        struct = next(kind for name, _, kind in tool.SECTIONS if name == title)
        assert list(rows) == list(struct.__struct_fields__)
        assert waiting in rows["agent_wait_s"]
        assert starting in rows["start_agent"]
        assert rows["nvme_bytes"] == "Its size."


def test_the_example_is_a_configuration(tool: ModuleType, tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", tool.reference(), re.DOTALL)
    file = tmp_path / "agent.toml"
    file.write_text(example)
    assert load_agent_config(file).store.dram.capacity_bytes == 64 << 30
