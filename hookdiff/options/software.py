"""The versions of the software that a run uses."""

import platform
import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import Distribution, distribution, packages_distributions, version

import torch

from hookdiff.options.imports import PLUGINS, entries_of

_installed = cache(packages_distributions)  # it reads the records of all distributions, which takes half a second


def versions(plugins: Iterable[object]) -> dict[str, str]:
    """Return the versions of python, torch, hookdiff, and of the distributions of the plugins."""
    packages = distributions(map(type, plugins))
    ours = {"python": platform.python_version(), "torch": str(torch.__version__), "hookdiff": version("hookdiff")}
    return {**{package.name: package.version for package in packages}, **ours}


def distributions(classes: Iterable[type]) -> list[Distribution]:
    """Return the distributions that contain the `classes` of plugins; scripts and local modules are in none."""
    owners = {entry.module.partition(".")[0]: entry.dist for entry in entries_of(PLUGINS)}
    owners["hookdiff"] = distribution("hookdiff")
    modules = sorted({kind.__module__ for kind in classes})
    packages = dict.fromkeys(owners.get(module.partition(".")[0]) or _owner(module) for module in modules)
    return [package for package in packages if package]  # each once, since its name and version are slow to read


@cache
def _owner(module: str) -> Distribution | None:
    file = getattr(sys.modules.get(module), "__file__", None)
    for name in _installed().get(module.partition(".")[0], ()) if file else ():
        owner = distribution(name)
        if file in {str(owner.locate_file(path)) for path in owner.files or ()}:  # other packages "tests" may exist
            return owner
    return None


def changed(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return a text such as "torch 2.11 -> 2.15" for each package of which both versions are known and differ."""
    return [f"{name} {before[name]} -> {now[name]}" for name in now if before.get(name, now[name]) != now[name]]
