"""Finds plugins by name, among the entry points of installed packages, or as `module:Class`."""

import importlib.util
import inspect
from collections.abc import Collection, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from hookdiff.choices import import_object
from hookdiff.errors import PluginError, nearest
from hookdiff.plugins import check_contract

GROUP = "hookdiff.plugins"


def installed(group: str = GROUP) -> dict[str, list[EntryPoint]]:
    """Return the entry points of `group` by name, sorted; nothing is imported.

    A name has several entry points if several distributions claim it. An entry point that is found twice, as happens
    with an editable install that is on the path, counts once.
    """
    unique = {(entry.name, entry.value, distribution(entry)): entry for entry in entry_points(group=group)}
    found: dict[str, list[EntryPoint]] = {}
    for key in sorted(unique):
        found.setdefault(key[0], []).append(unique[key])
    return found


def distribution(entry: EntryPoint) -> str:
    """Return the name and version of the distribution that brings `entry`."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown distribution"


def plugin_name(given: str) -> str:
    """Return the name under which `given` is registered and configured: for `module:Class`, `class`."""
    return given.rpartition(":")[2].lower() if ":" in given else given


def is_needed(plugin: object, hooks: Collection[str] | None) -> bool:
    """Return whether a loop that calls only `hooks` (None: all) needs `plugin`, or a plugin of this class.

    Only a loop that restores needs a plugin that saves.
    """
    if hooks is None:
        return True
    saves = hasattr(plugin, "restore") and "restore" not in hooks
    return not saves and any(hasattr(plugin, hook) for hook in hooks)


def plugin_class(given: str, hooks: Collection[str] | None = None) -> type:
    """Import the class of the plugin `given`: a name from the entry points, or `module:Class`.

    With `hooks`, packages are required only of a plugin that a loop with these hooks needs.

    Raises PluginError if there is none or several of that name, if it cannot be imported, if it is no class, if a
    package that it `needs` (a mapping of modules to requirements of pip) is missing, or if it does not fit the hooks.
    """
    kind = import_object(given, f"the plugin {given!r}") if ":" in given else _load(given)
    if not inspect.isclass(kind):
        raise PluginError(f"the plugin {given!r} is a {type(kind).__name__}, expected a class")
    needs: Mapping[str, str] = getattr(kind, "needs", {}) if is_needed(kind, hooks) else {}
    for module, requirement in needs.items():
        try:
            spec = importlib.util.find_spec(module)
        except ModuleNotFoundError:  # its parent package is missing
            spec = None
        if spec is None:
            raise PluginError(f"the plugin {given!r} needs the package {module}: pip install '{requirement}'")
    check_contract(given, kind)
    return kind


def _load(name: str) -> Any:
    known = installed()
    if name not in known:
        raise PluginError(f"no plugin named {name!r}{nearest(name, known)}; installed: {', '.join(known)}")
    if len(known[name]) > 1:
        owners = " and ".join(distribution(entry) for entry in known[name])
        raise PluginError(f"the plugin name {name!r} is claimed by {owners}; uninstall one, or use module:Class")
    (entry,) = known[name]
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        is_ours = isinstance(error, ImportError) and str(error.name).partition(".")[0] == "hookdiff"
        way_out = "; it may need a later hookdiff: pip install -U hookdiff" * is_ours
        raise PluginError(
            f"the plugin {name!r} of {distribution(entry)} cannot be imported: {error}{way_out}"
        ) from error
