"""Reads the source code of modules without importing them, because an import takes long."""

import ast
import importlib.util
from pathlib import Path

_MOST = 8  # most modules that are followed through imports


def file_of(module: str) -> Path | None:
    """Return the file of `module`; None if it has none. Nothing is imported."""
    package, *inner = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        return Path(spec.origin) if spec and not inner and spec.has_location and spec.origin else None
    for folder in spec.submodule_search_locations:
        place = Path(folder, *inner)
        for file in (place / "__init__.py", place.with_suffix(".py")):
            if file.is_file():
                return file
    return None


def definition_at(path: str) -> ast.ClassDef | ast.FunctionDef | None:
    """Return the syntax tree of the class or function `module:Name`, even if the module imports it from another.

    The stub of a package (`__init__.pyi`), which lazy_loader reads, counts as its source. Returns None if no source
    defines the name, such as for a name that is assigned. Raises SyntaxError for a broken file.
    """
    module, _, name = path.partition(":")
    for _ in range(_MOST):
        file = file_of(module)
        if file is None or file.suffix != ".py":
            return None
        stub = file.with_suffix(".pyi")
        body = ast.parse((stub if stub.is_file() else file).read_bytes()).body
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return node
        origin = next((target for node in body if (target := _imported(node, name, module))), None)
        if origin is None:
            return None
        module, name = origin
    return None


def _imported(node: ast.stmt, name: str, package: str) -> tuple[str, str] | None:
    """Return the module and the name from which an import takes `name`; relative imports start at `package`."""
    if isinstance(node, ast.ImportFrom) and node.module and node.level <= 1:
        module = f"{package}.{node.module}" if node.level else node.module
        return next(((module, each.name) for each in node.names if name == (each.asname or each.name)), None)
    return None
