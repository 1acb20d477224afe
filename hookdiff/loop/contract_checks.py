"""Checks plugins against the contract, and for mistakes that pluggy accepts in silence."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from attrs import fields

from hookdiff.errors import PluginError, nearest
from hookdiff.loop.dispatch import static_member
from hookdiff.loop.hookspecs import HOOK_NAMES, HOOKS, HOOKS_VERSION, Declaration, Hooks, declaration_of
from hookdiff.loop.saved import saved_fields

# A plugin's tensors are saved in a file with the plugin's name; the core has files with these names.
RESERVED = ("data", "defaults", "manifest", "model", "optimizers")
# The nearest name here for the name of a hook in other trainers.
ELSEWHERE = {other: hook.name for hook in HOOKS.values() for other in hook.like} | {
    "validation_step": "Evaluation.evaluate",
    "on_validation_epoch_end": "Evaluation.evaluate",
    "on_evaluate": "Evaluation.evaluate",
    "eval_start": "Evaluation.evaluate",
    "on_save_checkpoint": "saved",
    "on_load_checkpoint": "saved",
}


def check_plugins(plugins: Mapping[str, object]) -> None:
    """Raise PluginError for a reserved name, and for a plugin that breaks the contract."""
    for name, plugin in plugins.items():
        if name in RESERVED:
            raise PluginError(f"a plugin cannot be named {name!r}, as the core uses the name; choose another one")
        if inspect.isclass(plugin):
            kind = plugin.__name__
            raise PluginError(f"the plugin {name!r} is the class {kind}; give an instance: {kind}()")
        check_contract(name, plugin)
    check_distinct(plugins)


def check_contract(name: str, plugin: object) -> None:
    """Raise PluginError for a plugin, or a class of plugins, that does not fit this version of the hooks.

    Such a plugin is made for a later version, has a method that is never called, or can only save or
    only load its state.
    """
    check_declaration(name, plugin if inspect.isclass(plugin) else type(plugin))
    keeps, takes = (callable(static_member(plugin, half)) for half in ("state_dict", "load_state_dict"))
    if keeps != takes:
        there, missing = ("state_dict", "load_state_dict") if keeps else ("load_state_dict", "state_dict")
        raise PluginError(f"the plugin {name!r} has {there} and no {missing}: add it, or the state is lost on resume")
    if keeps and (saved := saved_fields(plugin)):
        raise PluginError(
            f"the plugin {name!r} has state_dict, so its saved fields ({', '.join(saved)}) would be lost on resume; "
            "keep what state_dict returns in saved fields too"
        )
    for attribute, member, options in _methods(plugin):
        if options is None:
            if attribute in HOOK_NAMES:
                raise PluginError(
                    f"the plugin {name!r} has a method {attribute} without @hookimpl, so it is never called; add it"
                )
            continue
        hook = options["specname"] or attribute
        if hook not in HOOK_NAMES:
            way_out = f"; in hookdiff it is {ELSEWHERE[hook]!r}" if hook in ELSEWHERE else nearest(hook, HOOK_NAMES)
            raise PluginError(f"the plugin {name!r}: there is no hook {hook!r}{way_out}")
        if options["hookwrapper"]:
            raise PluginError(f"the plugin {name!r}: use wrapper=True in place of hookwrapper=True in {attribute}")
        if options["wrapper"] and HOOKS[hook].kind == "question":
            raise PluginError(f"the plugin {name!r}: {attribute} asks this plugin alone; remove wrapper=True")
        known = _hook_arguments(hook)
        if unknown := [argument for argument in _argument_names(plugin, attribute) if argument not in known]:
            raise PluginError(
                f"the plugin {name!r}: {attribute} takes {unknown[0]!r}, which the hook {hook!r} does not give"
                f"{nearest(unknown[0], known)}; it gives: {', '.join(known)}"
            )
        if inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member):
            raise PluginError(f"the plugin {name!r}: {attribute} is `async`, so it would never run; write `def`")
        if inspect.isgeneratorfunction(member) and not options["wrapper"]:
            raise PluginError(
                f"the plugin {name!r}: {attribute} has a `yield`, so it would never run; write "
                "@hookimpl(wrapper=True) to surround the hook, or return instead"
            )


def _hook_arguments(hook: str) -> list[str]:
    return list(inspect.signature(getattr(Hooks, hook)).parameters)[1:]


def _argument_names(plugin: object, attribute: str) -> list[str]:
    """Return the names of the arguments that a method takes from its hook: those without a default."""
    arguments = inspect.signature(static_member(plugin, attribute)).parameters.values()  # type: ignore[arg-type]
    names = [it.name for it in arguments if it.default is it.empty and it.kind is it.POSITIONAL_OR_KEYWORD]
    is_static = isinstance(inspect.getattr_static(plugin, attribute), staticmethod)
    return names if is_static else names[1:]


def implements(plugin: object, *hooks: str) -> bool:
    """Return whether a plugin, or a class of plugins, implements one of `hooks`."""
    implemented = (options["specname"] or attribute for attribute, _, options in _methods(plugin) if options)
    return not set(hooks).isdisjoint(implemented)


def _methods(plugin: object) -> Iterator[tuple[str, Callable[..., Any], Mapping[str, Any] | None]]:
    """Yield the name of each method, its function, and the options of its @hookimpl, or None."""
    for attribute in dir(plugin):
        if callable(member := static_member(plugin, attribute)):
            yield attribute, member, getattr(member, "hookdiff_impl", None)


def check_declaration(name: str, kind: type) -> None:
    """Raise PluginError for a class with a wrong declaration, or made for a later version of the hooks."""
    for keyword in fields(Declaration):
        if static_member(kind, keyword.name) is not None:
            raise PluginError(
                f"the plugin {name!r}: {keyword.name} is an attribute of the class, which has no effect; write "
                f"@plugin({keyword.name}=...) above the class"
            )
    declared = declaration_of(kind)
    for key, names in {"requires": declared.requires, "conflicts": declared.conflicts}.items():
        if isinstance(names, str):
            raise PluginError(f"the plugin {name!r}: {key} is the string {names!r}; write {key}=({names!r},)")
    if not isinstance(declared.needs, Mapping):
        raise PluginError(
            f"the plugin {name!r}: needs is {declared.needs!r}; write needs={{'pandas': 'pandas>=2'}}: the modules, "
            "and the requirements that pip installs"
        )
    if declared.hooks_version > HOOKS_VERSION:
        from hookdiff.options.software import distributions

        origin = "".join(f" of {each.name} {each.version}" for each in distributions([kind]))
        raise PluginError(
            f"the plugin {name!r}{origin} is made for version {declared.hooks_version} of the hooks, and this hookdiff "
            f"has version {HOOKS_VERSION}: pip install -U hookdiff"
        )


def check_distinct(plugins: Mapping[str, object]) -> None:
    """Raise PluginError for two plugins that are the same object, or equal by value: pluggy takes both for one."""
    by_class: dict[type, str] = {}
    for name, plugin in plugins.items():
        kind = type(plugin)
        other = by_class.setdefault(kind, name)
        if other != name and plugins[other] is plugin:
            raise PluginError(f"the plugins {other!r} and {name!r} are the same object; make one for each name")
        if other != name and kind.__eq__ is not object.__eq__:
            raise PluginError(
                f"the plugins {other!r} and {name!r} are both a {kind.__name__}, which compares by value: write "
                f"@define(eq=False) above the class"
            )
