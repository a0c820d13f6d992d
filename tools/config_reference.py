"""Writes docs/configuration.md from the typed settings: `python tools/config_reference.py`.

--check only compares, with exit status 1 when the file is out of date.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
import textwrap
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect as types

from tierkv import config
from tierkv.adapters.vllm.settings import ConnectorSettings
from tierkv.adapters.vllm_offloading.options import TierOptions

TARGET = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
SECTIONS: tuple[tuple[str, str, type[msgspec.Struct]], ...] = (
    ("The agent", "At the top of the file.", config.AgentConfig),
    ("The store", "`[store]`.", config.StoreConfig),
    ("DRAM", "`[store.dram]`.", config.DramConfig),
    ("NVMe", "`[store.nvme]`.", config.NvmeConfig),
    ("Shared file system", "`[store.dfs]`.", config.DfsConfig),
    (
        "vLLM connector",
        "`kv_connector_extra_config` of vLLM's `--kv-transfer-config`, see [vllm.md](vllm.md).",
        ConnectorSettings,
    ),
    (
        "vLLM offloading tier",
        "The entry in `secondary_tiers` of vLLM's OffloadingConnector, see [vllm-offloading.md](vllm-offloading.md).",
        TierOptions,
    ),
)
"""(title, where its settings are written, the settings)."""
HEAD = """\
# Configuration

Written from the typed settings by `python tools/config_reference.py`; do not edit.

`tierkv agent --config FILE` reads a `.toml` or `.json` file with the settings below. `StoreConfig`, `load_config()` and
`TIERKV_CONFIG` (a path, or JSON) take what stands under `store` here, without that name. Unknown keys are refused.
Sizes (`*_bytes`) are integers or text such as `"64MiB"` or `"1.5 GB"`; times (`*_s`) are seconds. What the command line
says wins over the file. How the agent behaves is told in [agent.md](agent.md).

```toml
socket = "/run/tierkv/agent.sock"
metrics_port = 9400

[store.dram]
capacity_bytes = "64GiB"

[store.nvme]
directory = "/var/lib/tierkv/nvme"
capacity_bytes = "1TiB"

[store.dfs]
directory = "/mnt/shared/tierkv"
```
"""


def field_docs(struct: type[msgspec.Struct]) -> dict[str, str]:
    """The text below each field, by the field's name; of one that is declared again, the text of its last class."""
    found: dict[str, str] = {}
    for kind in reversed(struct.__mro__):
        if kind is msgspec.Struct or not issubclass(kind, msgspec.Struct):
            continue
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        assert isinstance(body, ast.ClassDef)
        name = None
        for node in body.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                name = node.target.id
                found[name] = ""  # said anew, or not at all
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
                found[name] = " ".join(str(node.value.value).split())
                name = None
    return found


def described(kind: types.Type) -> str:
    """A type for people, with its bounds."""
    match kind:
        case types.UnionType(types=parts):
            return " or ".join(described(part) for part in parts if not isinstance(part, types.NoneType))
        case types.LiteralType(values=values):
            return ", ".join(f"`{value}`" for value in values)
        case types.BoolType():
            return "true or false"
        case types.StrType():
            return "text"
        case types.IntType() | types.FloatType():
            return _number(kind)
        case types.VarTupleType(item_type=item):
            return f"list of {described(item)}s"
        case types.DictType(key_type=types.StrType(), value_type=value):
            return f"table of {described(value)}s"
        case types.StructType(cls=struct):
            return f"table, see [{_title(struct)}](#{_title(struct).lower().replace(' ', '-')})"
    raise TypeError(f"no words for {kind}")


def _number(kind: types.IntType | types.FloatType) -> str:
    words = "integer" if isinstance(kind, types.IntType) else "number"
    bounds = []
    if kind.gt is not None:
        bounds.append(f"more than {kind.gt:g}")
    if kind.ge is not None:
        bounds.append(f"{kind.ge:g} or more")
    if kind.le is not None:
        bounds.append(f"at most {kind.le:,}" if isinstance(kind, types.IntType) else f"at most {kind.le:g}")
    return ", ".join([words, *bounds])


def _title(struct: type) -> str:
    return next(title for title, _, candidate in SECTIONS if candidate is struct)


def _default(field: types.Field) -> str:
    if field.required:
        return "required"
    value: Any = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    if value is None:
        return "none"
    if value in ((), {}):
        return "`[]`" if value == () else "`{}`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if field.name.endswith("_bytes") and isinstance(value, int):
        return f"`{_size(value)}`"
    if value == "":
        return "empty"
    return f"`{value}`" if not isinstance(value, float) else f"`{value:g}`"


def _size(value: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value % size == 0:
            return f"{value // size}{unit}"
    return str(value)


def reference() -> str:
    """The whole document."""
    pieces = [HEAD]
    for title, where, struct in SECTIONS:
        info = types.type_info(struct)
        assert isinstance(info, types.StructType)
        docs = field_docs(struct)
        pieces.append(f"## {title}\n\n{where} {inspect.getdoc(struct)}\n\n")
        pieces.append("| setting | values | default | meaning |\n|---|---|---|---|\n")
        for field in info.fields:
            meaning = docs.get(field.name, "").replace("see Admission.", f"{_admission()}")
            cells = (f"`{field.name}`", described(field.type), _default(field), meaning.replace("|", "\\|"))
            pieces.append(f"| {' | '.join(cells)} |\n")
        pieces.append("\n")
    return "".join(pieces).rstrip("\n") + "\n"


def _admission() -> str:
    """The text below the type of that name."""
    module = ast.parse(inspect.getsource(config))
    for node, after in zip(module.body, module.body[1:], strict=False):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "Admission":
            assert isinstance(after, ast.Expr)
            assert isinstance(after.value, ast.Constant)
            text = " ".join(str(after.value.value).split())
            return text.partition(": ")[2]
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    text = reference()
    if parser.parse_args().check:
        if TARGET.read_text(encoding="utf-8") != text:
            print(f"{TARGET.name} is out of date: run python tools/config_reference.py", file=sys.stderr)
            return 1
        return 0
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
