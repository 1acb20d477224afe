"""Finds the classes of plugins by name, among the entry points of installed packages, or as `module:Class`."""

import inspect
import logging
from collections.abc import Callable, Collection
from typing import Any

from hookdiff.errors import PluginError, nearest
from hookdiff.loop.contract_checks import check_contract, implements
from hookdiff.loop.hookspecs import HOOK_NAMES, declaration_of
from hookdiff.options.imports import PLUGINS, check_needs, distribution, import_object, installed, own_package

logger = logging.getLogger("hookdiff")


def plugin_name(path: str) -> str:
    """Return the name under which a plugin is registered and configured: "class" for `module:Class`."""
    return path.rpartition(":")[2].lower() if ":" in path else path


class LeftOut:
    """Takes the place of a plugin that is left out, so that its saved state is not reported as unclaimed."""


def is_needed(plugin: object, hooks: Collection[str] | None) -> bool:
    """Return whether a loop that calls only `hooks` (None: all) needs `plugin`, or a plugin of this class.

    Only a loop that restores needs a plugin that saves.
    """
    if hooks is None:
        return True
    saves = implements(plugin, "restore") and "restore" not in hooks
    return not saves and implements(plugin, *hooks)


def trains_on_ranks(plugin: object) -> bool:
    """Return whether several ranks train one model with `plugin`, or with a plugin of this class."""
    return declaration_of(plugin).trains_on_ranks


def installed_that(fits: Callable[[type], bool], among: Collection[str] | None = None) -> list[str]:
    """Return the names of the installed plugins, or of those `among` them, with a class that `fits`, for messages.

    The plugins are imported. A plugin that cannot be used is left out, with a warning.
    """
    names = []
    for name in sorted(installed().keys() & among) if among else installed():
        try:
            if fits(_load(name)):
                names.append(name)
        except Exception as error:  # a broken package must not hide the others
            logger.warning("the plugin %r cannot be used: %s", name, error)
    return names


def plugin_class(path: str, hooks: Collection[str] | None = None) -> type:
    """Import the class of the plugin `path`: a name from the entry points, or `module:Class`.

    With `hooks`, packages may be missing, except for a plugin that a loop with these hooks needs.

    Raises PluginError if no plugin or several have that name, if it cannot be imported, if it is no class, if a package
    that it `needs` (a mapping of modules to requirements of pip) is missing, or if it does not fit the hooks or
    implements none.
    """
    kind = import_object(path, f"the plugin {path!r}") if ":" in path else _load(path)
    if not inspect.isclass(kind):
        raise PluginError(f"the plugin {path!r} is a {type(kind).__name__}, expected a class")
    check_contract(path, kind)
    check_needs(path, declaration_of(kind).needs if is_needed(kind, hooks) else {})
    if not implements(kind, *HOOK_NAMES):
        raise PluginError(f"{path!r} is no plugin: give the class a method with @hookimpl")
    return kind


def _load(name: str) -> Any:
    known = installed()
    if name not in known:
        near = own_package(PLUGINS, name) or nearest(name, known)
        raise PluginError(f"no plugin named {name!r}{near}; installed: {', '.join(known)}")
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
