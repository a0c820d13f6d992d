"""tierkv/_native.pyi against the module: every name both ways, every signature, and the shared constants."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import tierkv
from tierkv import _native as native
from tierkv import types

STUB = ast.parse((Path(tierkv.__file__).parent / "_native.pyi").read_text())
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}


def functions(body: list[ast.stmt]) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


def constants() -> set[str]:
    return {node.target.id for node in STUB.body if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]


def signature(node: ast.FunctionDef) -> str:
    return f"({ast.unparse(node.args)}) -> {ast.unparse(node.returns)}"  # type: ignore[arg-type]


def native_signature(function: object) -> str:
    text = function.__nb_signature__[0][0]  # type: ignore[attr-defined]
    (node,) = ast.parse(f"{text}: ...").body
    assert isinstance(node, ast.FunctionDef)
    return signature(node)


def public(names: object) -> set[str]:
    return {name for name in names if not name.startswith("_") or name == "__init__"}  # type: ignore[attr-defined]


def test_the_module_has_the_names_of_the_stub() -> None:
    stub = constants() | set(CLASSES) | set(functions(STUB.body))
    assert public(vars(native)) == stub


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_has_the_methods_of_the_stub(name: str) -> None:
    stub = functions(CLASSES[name].body)
    assert public(vars(getattr(native, name))) == set(stub)
    for method, node in stub.items():
        assert native_signature(vars(getattr(native, name))[method]) == signature(node), method


def test_the_functions_have_the_signatures_of_the_stub() -> None:
    for name, node in functions(STUB.body).items():
        assert native_signature(getattr(native, name)) == signature(node), name


def test_everything_is_documented_in_the_stub() -> None:
    for body in [STUB.body, *(node.body for node in CLASSES.values())]:
        for name, node in functions(body).items():
            assert ast.get_docstring(node) or name == "__init__", name


def test_the_constants_are_those_of_types() -> None:
    assert native.NO_SLOT == types.NO_SLOT
    assert native.NO_TIER == types.NO_TIER
    reserve = [getattr(native, name) for name in sorted(constants()) if name.startswith("RESERVE_")]
    assert sorted(reserve) == list(range(5))
    assert all(isinstance(getattr(native, name), int) for name in constants())
    assert not inspect.isclass(native.NO_SLOT)


def test_the_build_says_what_it_is() -> None:
    info = native.build_info()
    assert set(info) == {"compiler", "build_type", "optimized", "sanitizer"}
    assert info["sanitizer"] == "none"
    assert info["optimized"] == "yes"
