"""Imports the objects that a config names as `module:Name`.

The config of a run directory may be a stranger's. Unless the user trusts the config, it imports only torch,
torchvision, diffusers, hookdiff, and objects that installed packages publish as entry points.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from importlib.metadata import Distribution, EntryPoint, distributions, metadata
from pathlib import Path
from typing import Any

import tomli
from attrs import define, field

from hookdiff.disk.reading import read_file
from hookdiff.errors import PluginError, nearest

TRUST = (
    "a config.toml, or a config beside the files of a run, may be a stranger's: if you trust it, add --trust (in "
    "Python: trust=True)"
)
LIBRARIES = ("torch", "torchvision", "diffusers", "hookdiff")
PLUGINS, PARTS = "hookdiff.plugins", "hookdiff.parts"  # groups of entry points


@define
class Imports:
    """The imports of one config."""

    only_installed: bool
    where: Callable[[str], str] | None = None  # see `importing`
    uninstalled: list[str] = field(
        factory=list
    )  # paths that no installed package publishes, in the order of their imports


_current: ContextVar[Imports | None] = ContextVar("imports", default=None)


@contextmanager
def importing(only_installed: bool, where: Callable[[str], str] | None = None) -> Iterator[Imports]:
    """Record the imports in the `with`. `only_installed` refuses objects that no installed package publishes.

    `where` says of a module, as the end of a message, in which folders it was looked for.
    """
    imports = Imports(only_installed, where)
    token = _current.set(imports)
    try:
        yield imports
    finally:
        _current.reset(token)


def import_object(path: str, purpose: str) -> Any:
    """Import `package.module:Name`; a class inside another is `package.module:Outer.Inner`.

    Raises:
        PluginError: if there is no such object, for a module of Python's standard library, and within `importing` for
            an object that may not be imported. Its message begins with `purpose`.
    """
    module, _, name = path.partition(":")
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise PluginError(f"{purpose}: {module} is of Python's standard library; name a class of another module")
    imports = _current.get()
    if imports and not is_installed(path):
        imports.uninstalled.append(path)
        if imports.only_installed:
            raise PluginError(f"{purpose}: would import {module}, which is no installed plugin; {TRUST}")
    try:
        imported = importlib.import_module(module)
    except (ImportError, TypeError, ValueError) as error:  # the last two if `module` starts with a dot, or is empty
        package = module.partition(".")[0]
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == package
        where = imports.where(package) if imports and imports.where and is_missing else ""
        raise PluginError(f"{purpose}: cannot import {module}: {error}{where}{_way_to_install(module)}") from error
    outer: Any = imported
    for part in name.split("."):
        # A module may hold any other, such as `sys`. An attribute of another object may be a property, which runs code.
        if outer is not imported and not isinstance(outer, type):
            raise PluginError(f"{purpose}: {path} goes through a {type(outer).__name__}, expected a class")
        try:
            outer = getattr(outer, part)
        except AttributeError:
            raise PluginError(f"{purpose}: {module} has no {name!r}{nearest(name, dir(imported))}") from None
    return outer


def import_line(path: str) -> str:
    """Return the line of a script that imports `package.module:Name`."""
    module, _, name = path.partition(":")
    return f"from {module} import {name.partition('.')[0]}"


def _way_to_install(module: str) -> str:
    """Return "; pip install ..." if the package of `module` is missing and is an extra of hookdiff; else ""."""
    package = module.partition(".")[0]
    extras = metadata("hookdiff").get_all("Provides-Extra", [])
    missing = package in extras and importlib.util.find_spec(package) is None
    return f"; pip install 'hookdiff[{package}]'" if missing else ""


def own_package(group: str, name: str) -> str:
    """Return "; ... pip install -e DIR" if a package where the shell stands would publish `name`; else ""."""
    for folder in (Path(), Path(f"hookdiff-{name.rpartition('.')[2].replace('_', '-')}")):
        try:
            project = tomli.loads(read_file(folder / "pyproject.toml").decode())["project"]
            if name in project["entry-points"][group]:
                return f"; the package in {folder.resolve()} has it, but is not installed: pip install -e {folder}"
        except (OSError, ValueError, LookupError, TypeError, RecursionError):  # no package of plugins
            continue
    return ""


def is_installed(path: str) -> bool:
    """Return whether `path` is in one of `LIBRARIES`, or an entry point of an installed package."""
    package, *inner = path.partition(":")[0].split(".")
    # Modules with an underscore are private; some, such as `__main__`, act when they are imported.
    if package in LIBRARIES and not any(part.startswith("_") for part in inner):
        return True
    return any(entry.value == path for group in (PLUGINS, PARTS) for entry in entries_of(group))


def entries_of(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of `group`. Those in a folder of `sys.path` are cached until the folder changes."""
    by_owner: dict[str, tuple[EntryPoint, ...]] = {}
    for folder in dict.fromkeys(map(os.path.abspath, sys.path)):
        for owner, entries in _entries_in(folder, _modified(folder)):
            by_owner.setdefault(owner, entries)  # as Python imports the package: from the first folder
    return tuple(entry for entries in by_owner.values() for entry in entries if entry.group == group)


@lru_cache(maxsize=256)
def _entries_in(folder: str, modified: int) -> tuple[tuple[str, tuple[EntryPoint, ...]], ...]:
    """Return the entry points of hookdiff in a folder, by their distributions."""
    found = ((owner, _of_hookdiff(owner)) for owner in distributions(path=[folder]))
    return tuple((_canonical(owner.name), entries) for owner, entries in found if entries)


def _of_hookdiff(owner: Distribution) -> tuple[EntryPoint, ...]:
    return tuple(entry for entry in owner.entry_points if entry.group.startswith("hookdiff."))


def _canonical(name: str) -> str:
    """Return the one spelling of the name of a distribution, as in PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _modified(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0


def installed(group: str = PLUGINS) -> dict[str, list[EntryPoint]]:
    """Return the entry points of `group` by name, sorted; nothing is imported.

    A name has several entry points if several distributions claim it. An entry point that Python lists twice, as it
    does for an editable install on the path, counts once.
    """
    by_name: dict[str, list[EntryPoint]] = {}
    for entry in sorted(entries_of(group), key=lambda entry: entry.name):
        by_name.setdefault(entry.name, []).append(entry)
    for name, entries in by_name.items():
        if len(entries) > 1:  # only then, because the distribution of an entry is slow to read
            unique = {(entry.value, distribution(entry)): entry for entry in entries}
            by_name[name] = [unique[key] for key in sorted(unique)]
    return by_name


def distribution(entry: EntryPoint) -> str:
    """Return the name and version of the distribution of `entry`."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown distribution"


def check_needs(plugin: str, needs: Mapping[str, str]) -> None:
    """Raise PluginError unless the packages that `plugin` needs are installed; `needs`: pip requirements by module."""
    for module, requirement in needs.items():
        try:
            spec = importlib.util.find_spec(module)
        except ModuleNotFoundError:  # its parent package is missing
            spec = None
        if spec is None:
            raise PluginError(f"the plugin {plugin!r} needs the package {module}: pip install '{requirement}'")
