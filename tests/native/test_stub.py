"""The stub, by which mypy checks what calls the extension, declares what the extension has."""

from __future__ import annotations

import ast
from pathlib import Path

from isthmus import native
from isthmus.native import _native


def declared(body: list[ast.stmt]) -> set[str]:
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def test_all_that_the_stub_declares_is_there() -> None:
    stub = ast.parse(Path(native.__file__).with_name("_native.pyi").read_text())
    assert not {name for name in declared(stub.body) if not hasattr(_native, name)}
    for of in (node for node in stub.body if isinstance(node, ast.ClassDef)):
        there = getattr(_native, of.name)
        assert not {f"{of.name}.{name}" for name in declared(of.body) if not hasattr(there, name)}
