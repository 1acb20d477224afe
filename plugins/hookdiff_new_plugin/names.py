"""The names that a new package may have. Nothing is imported: torch would take long."""

import keyword
import re
import sys
import unicodedata
from collections.abc import Collection, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from importlib.util import find_spec
from pathlib import Path

from hookdiff import UserError

# The tables in which hookdiff and its packages list their own parts, and a name in such a table.
_TABLE = re.compile(r"^(?:\w+\.known|SOURCES) = \{(.*?)\}", re.MULTILINE | re.DOTALL)
_PART = re.compile(r'"([\w-]+)":')
_CLASS = re.compile(r" as ([A-Z]\w+)")  # a class that torch.optim imports


def check_name(name: str, classes: Collection[str] = ()) -> None:
    """Check that a new plugin or part may have this `name`. Its class must not be one of `classes` of the template.

    Raises:
        UserError: for a name that is not an identifier in lower case, begins with hookdiff, is a keyword or a module of
            Python, or is taken. The message has the nearest good name.
    """
    if wrong := _why_wrong(name, classes):
        good = _spelled(name)
        while _why_wrong(good, classes):
            good = f"my_{good}"
        raise UserError(f"{name!r} {wrong}; did you mean {good!r}?")


def class_of(name: str) -> str:
    """Return the class name of a plugin or part, such as "GradNorm" for "grad_norm"."""
    return "".join(word.capitalize() for word in name.split("_"))


def _why_wrong(name: str, classes: Collection[str]) -> str:
    if re.match("hookdiff([_-]|$)", name):
        return "begins with hookdiff, which the name of the package does anyway"
    if keyword.iskeyword(name):
        return "is a keyword of Python"
    if name != _spelled(name):
        return "is no identifier of lower-case words joined by _"
    if name in sys.stdlib_module_names:
        return "is a module of Python"
    if name in entry_points(group="hookdiff.plugins").names:
        return "is the name of an installed plugin"
    if name in _parts():
        return "is the name of an installed part"
    if class_of(name) in classes:
        return f"needs a class {class_of(name)}, and the package already uses a class of that name"
    taken = next((package for package in (name, f"hookdiff_{name}") if _is_installed(package)), None)
    return f"is taken: the package {taken} is installed" if taken else ""


def _spelled(text: str) -> str:
    """Return the words of `text` as an identifier in lower case, such as "grad_norm" for "hookdiff-GradNorm"."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    words = re.findall("[a-z0-9]+", re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", plain).lower())
    while words[:1] == ["hookdiff"]:
        words = words[1:]
    name = "_".join(words) or "plugin"
    return name if name[0].isalpha() else f"my_{name}"


def _is_installed(package: str) -> bool:
    """Return whether there is a module `package`, or a distribution of this name; a folder alone does not count."""
    spec = find_spec(package)
    if spec and spec.origin:
        return True
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


def _parts() -> set[str]:
    """Return the names of all parts: those of entry points, of hookdiff and its packages, and optimizers of torch."""
    published = {name.partition(".")[2] for name in entry_points(group="hookdiff.parts").names}
    of_torch = [(folder / "optim" / "__init__.py").read_text("utf-8") for folder in _folders("torch")]
    optimizers = {name.lower() for text in of_torch for name in _CLASS.findall(text)}
    packages = {"hookdiff", *(entry.module.partition(".")[0] for entry in entry_points(group="hookdiff.plugins"))}
    return published.union(optimizers, *(_in_tables(folder) for package in packages for folder in _folders(package)))


@cache
def _in_tables(folder: Path) -> frozenset[str]:
    """Return the names in the tables of parts in a package."""
    texts = (file.read_text("utf-8", errors="replace") for file in folder.rglob("*.py"))
    return frozenset(name for text in texts for table in _TABLE.findall(text) for name in _PART.findall(table))


def _folders(package: str) -> Iterator[Path]:
    spec = find_spec(package)
    yield from map(Path, (spec and spec.submodule_search_locations) or ())
