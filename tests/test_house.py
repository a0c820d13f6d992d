"""The rules of the house, checked: who may import whom, how long a file is, what a file says about itself.

A rule that is wrong for a file is changed here, with its reason, and nowhere else.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tierkv"

FLOORS: tuple[tuple[str, frozenset[str]], ...] = (
    ("words", frozenset({"types", "errors"})),
    ("0", frozenset({"keys", "config", "clock", "jobs", "fragments"})),
    ("1", frozenset({"_native", "memory", "io", "codec", "lmdbfile"})),
    ("catalog", frozenset({"catalog"})),  # the tiers keep their books in it
    ("2", frozenset({"tiers", "transport", "cluster", "placement"})),
    ("3", frozenset({"store", "planner"})),
    ("4", frozenset({"agent"})),
    ("5", frozenset({"adapters", "observe", "workload", "benchmarks", "doctor"})),
    ("6", frozenset({"cli", "commands", "__main__"})),
)
"""Lowest first: a module imports from lower floors and from its own package, never from its neighbours."""

NEIGHBOURS: dict[str, frozenset[str]] = {
    # A benchmark runs a workload and draws its report, and one measures what an adapter costs its engine.
    "benchmarks": frozenset({"workload", "observe", "adapters"}),
    "cli": frozenset({"commands"}),  # the commands are its body, one module each
    "__main__": frozenset({"cli"}),
}
"""Packages that may use others of their own floor."""

SEAM_PACKAGES: dict[str, frozenset[str]] = {
    "io": frozenset({"base", "queue"}),
    "tiers": frozenset({"base", "reports"}),
    "transport": frozenset({"base"}),
    "cluster": frozenset({"base"}),
}
"""Back ends behind one seam: each may import these modules of its package and its helpers (nvme: nvme_*, nvme/*)."""

MAX_LINES = 700
LONG_FILES: dict[str, str] = {}
"""Path -> why it may be longer."""

MAY_PRINT = ("cli", "commands", "observe", "benchmarks", "testing", "__main__")
MAY_READ_ENVIRONMENT = ("config", "doctor", "adapters", "testing", "cli", "commands", "benchmarks")
MAY_SLEEP = ("testing",)


@cache
def modules() -> dict[str, Path]:
    """Dotted name below tierkv -> file; a package's __init__ goes by the package's name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        found[".".join(parts)] = path
    return found


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def unit_of(module: str) -> str:
    return module.partition(".")[0]


def imports_of(module: str, path: Path) -> Iterator[tuple[str, int]]:
    """(imported module below tierkv, line), also of lazy and type-checking imports; '' is tierkv itself."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "tierkv" or alias.name.startswith("tierkv."):
                    yield alias.name.removeprefix("tierkv").removeprefix("."), node.lineno
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                above = ("tierkv." + package).rstrip(".").split(".")
                base = ".".join(
                    [*above[: len(above) - node.level + 1], *([node.module] if node.module else [])]
                )
            else:
                base = node.module or ""
            if base != "tierkv" and not base.startswith("tierkv."):
                continue
            base = base.removeprefix("tierkv").removeprefix(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".lstrip(".")
                is_module = inner in modules() or inner == "_native"
                yield (inner if is_module else base), node.lineno


def floor_of(unit: str) -> int:
    for number, (_, units) in enumerate(FLOORS):
        if unit in units:
            return number
    raise AssertionError(f"tierkv/{unit} stands on no floor: add it to FLOORS in {Path(__file__).name}")


def may_import(importer: str, imported: str) -> bool:
    own, other = unit_of(importer), unit_of(imported)
    if own == "testing":
        return True
    if other == "testing":
        return False
    if importer == "":
        return floor_of(other) <= floor_of("agent")
    if imported == "":
        return floor_of(own) > floor_of("agent")
    if own == other:
        return within_package(importer, imported)
    return floor_of(other) < floor_of(own) or other in NEIGHBOURS.get(own, ())


def within_package(importer: str, imported: str) -> bool:
    package = unit_of(importer)
    if package not in SEAM_PACKAGES or importer == package:
        return True
    own, other = importer.partition(".")[2], imported.partition(".")[2]
    if not other or own in SEAM_PACKAGES[package]:
        return other in SEAM_PACKAGES[package]
    stem = re.split(r"[._]", own)[0]
    return re.split(r"[._]", other)[0] in {stem, *SEAM_PACKAGES[package]}


def test_every_module_stands_on_a_floor() -> None:
    for module in modules():
        if module and unit_of(module) != "testing":
            floor_of(unit_of(module))


def test_modules_import_only_from_lower_floors() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports tierkv.{imported}"
        for module, path in modules().items()
        for imported, line in imports_of(module, path)
        if not may_import(module, imported)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_package_has_an_import_cycle() -> None:
    graph = {
        module: {imported for imported, _ in imports_of(module, path) if imported != module}
        for module, path in modules().items()
        if module
    }
    done: set[str] = set()

    def walk(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, "import cycle: " + " -> ".join([*above[above.index(module) :], module])
        if module in done:
            return
        for imported in sorted(graph.get(module, ())):
            # A package's __init__ gathers its modules; that they name the package is no cycle of theirs.
            if not module.startswith(imported + "."):
                walk(imported, (*above, module))
        done.add(module)

    for module in graph:
        walk(module, ())


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("keys", "errors", True),
        ("keys", "jobs", False),
        ("types", "errors", False),
        ("memory.arena", "_native", False),
        ("io.uring", "io.base", True),
        ("io.uring", "io.posix", False),
        ("tiers.nvme", "catalog", True),
        ("tiers.nvme", "tiers.base", True),
        ("tiers.nvme", "tiers.nvme_files", True),
        ("tiers.nvme_files", "tiers.nvme", True),
        ("tiers.nvme.files", "tiers.nvme.tier", True),
        ("tiers.nvme.files", "tiers.dfs_pool", False),
        ("tiers.nvme", "tiers.dfs", False),
        ("tiers.nvme", "store", False),
        ("tiers.base", "tiers.nvme", False),
        ("store.core", "store.statistics", True),
        ("store.core", "tiers.nvme", True),
        ("store.core", "observe.report", False),
        ("agent.server", "store", True),
        ("observe.report", "adapters.vllm", False),
        ("store.core", "testing.faults", False),
        ("testing.faults", "store.core", True),
        ("", "store.core", True),
        ("", "cli", False),
        ("store.core", "", False),
        ("cli", "", True),
    ],
)
def test_the_floor_rule_itself(importer: str, imported: str, allowed: bool) -> None:
    assert may_import(importer, imported) is allowed


def source_files() -> list[Path]:
    """Python and native sources of the package, tests and benchmarks."""
    places = [PACKAGE, ROOT / "native", ROOT / "tests", ROOT / "bench"]
    suffixes = {".py", ".pyi", ".cpp", ".hpp", ".h", ".cc"}
    return [path for place in places for path in sorted(place.rglob("*")) if path.suffix in suffixes]


def test_files_are_short_enough_to_read() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in source_files()
    }
    wrong = [
        f"{name}: {lines} lines"
        for name, lines in lengths.items()
        if lines > MAX_LINES and name not in LONG_FILES
    ]
    assert not wrong, f"over {MAX_LINES} lines; split them: {wrong}"
    stale = [name for name in LONG_FILES if lengths.get(name, 0) <= MAX_LINES]
    assert not stale, f"no longer need their exception: {stale}"


def test_every_module_says_what_it_is() -> None:
    missing = [
        str(path.relative_to(ROOT)) for path in modules().values() if not ast.get_docstring(tree(path))
    ]
    tests = [path for path in sorted((ROOT / "tests").rglob("*.py")) if path.name != "__init__.py"]
    missing += [str(path.relative_to(ROOT)) for path in tests if not ast.get_docstring(tree(path))]
    assert not missing, f"no module docstring: {missing}"


def test_every_public_class_says_what_it_is() -> None:
    missing = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in modules().values()
        for node in tree(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not ast.get_docstring(node)
    ]
    assert not missing, f"no class docstring: {missing}"


def calls(path: Path) -> Iterator[tuple[ast.Call, str]]:
    """(call, the last name of what is called)."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                yield node, node.func.id
            elif isinstance(node.func, ast.Attribute):
                yield node, node.func.attr


def production(exempt: tuple[str, ...]) -> Iterator[Path]:
    for module, path in modules().items():
        if unit_of(module) not in exempt:
            yield path


def test_only_the_command_line_prints() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in production(MAY_PRINT)
        for call, name in calls(path)
        if name == "print" and isinstance(call.func, ast.Name)
    ]
    assert not wrong, f"print() in a library; use logging: {wrong}"


def test_nothing_is_swallowed_by_a_bare_except() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in [*modules().values(), *sorted((ROOT / "tests").rglob("*.py"))]
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert not wrong, f"bare except: {wrong}"


def test_every_wait_has_a_timeout() -> None:
    """join, wait, get, result without any argument wait forever (str.join and dict.get always have one).

    Where the end is certain for another reason, the line says so: `# bounded: ...`.
    """
    wrong = []
    for path in production(()):
        lines = path.read_text(encoding="utf-8").splitlines()
        for call, name in calls(path):
            if name not in {"join", "wait", "get", "result"} or not isinstance(call.func, ast.Attribute):
                continue
            if not call.args and not call.keywords and "# bounded" not in lines[call.lineno - 1]:
                wrong.append(f"{path.relative_to(ROOT)}:{call.lineno} .{name}()")
    assert not wrong, f"waits without a timeout: {wrong}"


def test_production_code_does_not_sleep() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in production(MAY_SLEEP)
        for call, name in calls(path)
        if name == "sleep"
    ]
    assert not wrong, f"sleep in production code; wait for an event: {wrong}"


def test_nothing_is_unpickled() -> None:
    wrong = []
    for path in modules().values():
        for node in ast.walk(tree(path)):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            wrong += [
                f"{path.relative_to(ROOT)}: {name}"
                for name in names
                if name in {"pickle", "marshal", "shelve"}
            ]
    assert not wrong, f"formats that run code when read: {wrong}"


def test_the_environment_is_read_in_one_place() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in production(MAY_READ_ENVIRONMENT)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}
    ]
    assert not wrong, f"reads the environment; take a setting in config.py: {wrong}"


@cache
def tracked_text() -> dict[str, str]:
    """Path -> text of what is published: the tracked files, or, outside a checkout, all that is here."""
    try:
        done = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, timeout=60, check=True
        )
        names = [name for name in done.stdout.decode().split("\0") if name]
    except (OSError, subprocess.SubprocessError):
        names = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file()]
    texts = {}
    for name in names:
        path = ROOT / name
        if not path.is_file() or path.stat().st_size > 1 << 20:
            continue
        try:
            texts[name] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
    return texts


def test_no_file_names_a_place_on_one_machine() -> None:
    homes = re.compile(r"(?<![\w.~])/(?:" + "|".join(["root", "work", r"home/[a-z]+"]) + r")/[\w.]")
    wrong = [
        f"{name}:{number}: {line.strip()[:80]}"
        for name, text in tracked_text().items()
        for number, line in enumerate(text.splitlines(), 1)
        if homes.search(line)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "Makefile", "pyproject.toml"]
)
def test_the_documents_a_user_expects_are_there(name: str) -> None:
    assert (ROOT / name).is_file()
    assert (ROOT / name).stat().st_size > 0


def test_links_between_documents_lead_somewhere() -> None:
    wrong = []
    for name, text in tracked_text().items():
        if not name.endswith(".md"):
            continue
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:|#", target):
                continue
            if not (ROOT / name).parent.joinpath(target.partition("#")[0]).exists():
                wrong.append(f"{name}: {target}")
    assert not wrong, f"links to nothing: {wrong}"


def shell_lines(text: str) -> Iterator[str]:
    """The lines of ```sh, ```bash, ```console and plain blocks."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if language in {"", "sh", "bash", "shell", "console"}:
            for line in block.replace("\\\n", " ").splitlines():
                yield line.removeprefix("$ ").strip()


def test_the_commands_in_the_documents_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*)\s*:(?!=)", makefile, re.MULTILINE))
    from tierkv import cli

    wrong = []
    for name, text in tracked_text().items():
        if not name.endswith(".md") or name.startswith("docs/design"):
            continue
        for line in shell_lines(text):
            if found := re.match(r"make((?: [a-z][\w-]*)+)", line):
                wrong += [f"{name}: make {target}" for target in found[1].split() if target not in targets]
            if found := re.match(r"(?:\.venv/bin/)?tierkv ([a-z][\w-]*)", line):
                try:
                    cli.main([found[1], "--help"])
                except SystemExit as end:
                    if end.code not in (0, None):
                        wrong.append(f"{name}: tierkv {found[1]}")
    assert not wrong, f"commands that do not exist: {wrong}"


def stub_names() -> dict[str, set[str]]:
    """Class -> its public methods, and '' -> the module's public names, as the stub has them."""
    stub = ast.parse((PACKAGE / "_native.pyi").read_text(encoding="utf-8"))
    names: dict[str, set[str]] = {"": set()}
    for node in stub.body:
        if isinstance(node, ast.ClassDef):
            names[""].add(node.name)
            names[node.name] = {item.name for item in node.body if isinstance(item, ast.FunctionDef)} - {
                "__init__"
            }
        elif isinstance(node, ast.FunctionDef):
            names[""].add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names[""].add(node.target.id)
    return names


def test_the_stub_lists_exactly_what_the_native_module_has() -> None:
    from tierkv import _native

    stub = stub_names()
    assert {name for name in dir(_native) if not name.startswith("_")} == {
        n for n in stub[""] if not n.startswith("_")
    }
    for name in sorted(stub.keys() - {""}):
        actual = {member for member in dir(getattr(_native, name)) if not member.startswith("_")}
        assert actual == {n for n in stub[name] if not n.startswith("_")}, name


def test_the_stub_names_the_native_arguments_as_the_module_does() -> None:
    from tierkv import _native

    stub = ast.parse((PACKAGE / "_native.pyi").read_text(encoding="utf-8"))
    functions = [("", node) for node in stub.body if isinstance(node, ast.FunctionDef)]
    for owner in (node for node in stub.body if isinstance(node, ast.ClassDef)):
        functions += [(owner.name, node) for node in owner.body if isinstance(node, ast.FunctionDef)]
    wrong = []
    for owner_name, node in functions:
        holder = getattr(_native, owner_name) if owner_name else _native
        signature = getattr(holder, node.name).__nb_signature__[0][0]
        found = [argument.arg for argument in ast.parse(f"{signature}: ...").body[0].args.args]  # type: ignore[attr-defined]
        expected = [argument.arg for argument in node.args.args]
        if found != expected:
            wrong.append(f"{owner_name}.{node.name}: stub {expected}, module {found}")
    assert not wrong, "\n".join(wrong)
