"""Protocols declare all that hookdiff reads of its own kinds: `getattr` and `Any` are for foreign things."""

import ast
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path

import pytest
from asked_by_name import ASKED, UNTYPED
from import_graph import parsed

import hookdiff

ROOT = Path(hookdiff.__file__).parent.parent
if not (ROOT / "pyproject.toml").exists():
    pytest.skip("needs the sources", allow_module_level=True)

FILES = {
    path.relative_to(ROOT).as_posix(): path for top in ("hookdiff", "plugins") for path in (ROOT / top).rglob("*.py")
}
ASKING = {"getattr", "hasattr", "vars", "attrgetter"}
KINDS = {"loop", "feed", "reader", "source", "codec", "encoder", "objective", "sampler", "output", "inner"}


def asked(tree: ast.AST) -> Iterator[str]:
    """Yield the expressions that ask an object for an attribute by its name, or whether it has it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in ASKING:
            yield ast.unparse(node)
        elif isinstance(node, ast.ExceptHandler) and node.type and "AttributeError" in ast.unparse(node.type):
            yield f"except {ast.unparse(node.type)}"
        elif isinstance(node, ast.FunctionDef) and node.name == "__getattr__":
            yield "def __getattr__"


def untyped(tree: ast.AST) -> Iterator[str]:
    """Yield the parameters, attributes and results that have the name of a kind and the type Any or object."""
    for node in ast.walk(tree):
        name, hint = "", None
        if isinstance(node, ast.arg):
            name, hint = node.arg, node.annotation
        elif isinstance(node, ast.AnnAssign):
            name, hint = ast.unparse(node.target).rpartition(".")[2], node.annotation
        elif isinstance(node, ast.FunctionDef):
            name, hint = node.name, node.returns
        words = {part.id for part in ast.walk(hint) if isinstance(part, ast.Name)} if hint else set()
        if name.strip("_") in KINDS and words and words <= {"Any", "object"}:
            yield f"{name}: {ast.unparse(hint)}" if hint else name


def found_by(walk: Callable[[ast.AST], Iterator[str]]) -> dict[str, set[str]]:
    every = {file: {*walk(parsed(path))} for file, path in FILES.items()}
    return {file: expressions for file, expressions in every.items() if expressions}


def by_file(table: Mapping[str, Mapping[str, set[str]]]) -> dict[str, set[str]]:
    files = {file for reason in table.values() for file in reason}
    return {file: {*chain(*(reason.get(file, ()) for reason in table.values()))} for file in files}


def test_only_foreign_things_are_asked_by_name() -> None:
    assert found_by(asked) == by_file(ASKED)


def test_no_kind_of_our_own_is_without_a_type() -> None:
    assert found_by(untyped) == by_file(UNTYPED)
