"""Finds the test files of a module.

`python tests/tests_of.py FILE` prints the test files that mirror the module in FILE, and then those that import it; if
no file mirrors it, the rest of its room follows. The files tests/plugins/test_NAME*.py mirror the modules of the plugin
NAME; tests/ROOM/test_MODULE.py mirrors hookdiff/ROOM/MODULE.py. tests/options/test_help.py mirrors all that have keys.
"""

import ast
import re
import sys
from functools import cache
from pathlib import Path

from import_graph import files

_OF_ALL_OPTIONS = Path("tests/experiment/test_refusals.py")  # which imports none of the modules that it tries
_OF_ALL_KEYS = Path("tests/options/test_help.py")  # compares each key and its default with docs/reference/config.md


@cache
def homes(folder: Path) -> dict[str, str]:
    """Return where the names of packages come from: "hookdiff.machine.ranks.agree" by "hookdiff.machine.agree"."""
    found = {}
    for package, path in files(folder).items():
        if path.name == "__init__.py":
            stub = path.with_suffix(".pyi")
            for node in ast.parse((stub if stub.exists() else path).read_text("utf-8")).body:
                if isinstance(node, ast.ImportFrom):
                    module = ".".join(filter(None, (package if node.level else "", node.module)))
                    found |= {f"{package}.{one.asname or one.name}": f"{module}.{one.name}" for one in node.names}
    return found


@cache
def imported(test: Path, folder: Path) -> set[str]:
    """Return the modules and names that a test file imports; a name that a package has from a module, by both."""
    found, home = set(), homes(folder)
    for node in ast.walk(ast.parse(test.read_text("utf-8"))):
        names = [one.name for one in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        for name in (f"{node.module}.{one}" for one in names) if isinstance(node, ast.ImportFrom) else names:
            found.add(name)
            while name in home and home[name] not in found:
                found.add(name := home[name])
    return found


def tests_of(file: str, folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the test files that mirror `file`, its own first, and the others.

    The others import the module; those of its room come first. If no file mirrors it, the rest of its room follows.
    """
    path, tests = Path(file), sorted((folder / "tests").rglob("test_*.py"))
    if path.parts[0] == "plugins":
        name = path.parts[1].removeprefix("hookdiff_")
        home = folder / "tests" / ("networks" if name == "networks" else "plugins")
        mirror = [one for one in tests if one.parent == home and re.match(rf"test_{name}(_|\.py)", one.name)]
    else:
        home = folder / "tests" / Path(*path.parts[1:-1])
        mirror = [one for one in tests if one == home / f"test_{path.name}"]
    mirror.sort(key=lambda one: path.stem not in one.stem)
    of_keys = [folder / _OF_ALL_KEYS] if "metadata=about(" in (folder / file).read_text("utf-8") else []
    module = next(name for name, one in files(folder).items() if one == folder / file)
    found = []
    for test in set(tests) - {*mirror, *of_keys}:
        is_direct = module in (text := test.read_text("utf-8"))
        is_near = test.parent == home and home.name != "plugins"
        is_of_all = test == folder / _OF_ALL_OPTIONS
        if any(f"{name}.".startswith(f"{module}.") for name in imported(test, folder)):
            found.append((0 if is_near else 1, not is_direct, len(text), test))
        elif is_of_all or (is_near and not mirror):
            found.append((2, is_of_all, len(text), test))
    return [*mirror, *of_keys], [test for *_, test in sorted(found)]


def main(file: str) -> None:
    """Print the test files of the module."""
    root = Path(__file__).resolve().parent.parent
    path = Path(file).resolve()
    if path not in files(root).values():
        raise SystemExit(f"{file} is no module of hookdiff/ or plugins/")
    mirror, importers = tests_of(str(path.relative_to(root)), root)
    print(*(test.relative_to(root) for test in (*mirror, *importers)), sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
