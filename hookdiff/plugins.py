"""The plugins of one Loop: checked against the contract, and called in order."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pluggy

from hookdiff.defaults import Defaults
from hookdiff.dispatch import Watch, compile_hook, in_order
from hookdiff.errors import PluginError, nearest
from hookdiff.hookspecs import HOOK_NAMES, Hooks

# A plugin's tensors are saved in a file with the plugin's name; these names are taken.
RESERVED = ("defaults", "manifest", "model", "optimizers")


class Plugins(Mapping[str, object]):
    """A mapping of names to plugins; `hook` calls their hooks, as `hook.on_start(loop=loop)`.

    Plugins are called in the order of the mapping, within the phases of their markers (`tryfirst`, `trylast`). Raises
    PluginError for a hook or an argument that does not exist, for `requires` and `conflicts` that are not met, and for
    mistakes that pluggy accepts in silence: a method named like a hook without `@hookimpl`, a class in place of an
    instance.
    """

    def __init__(self, plugins: Mapping[str, object]) -> None:
        self._plugins = dict(plugins)
        self._manager = _Manager("hookdiff")
        self._manager.add_hookspecs(Hooks)
        for name, plugin in self._plugins.items():
            check_plugin(name, plugin)
            self._register(name, plugin)
        check_partners({name: type(plugin) for name, plugin in self._plugins.items()})
        self._register("defaults", Defaults())
        self._calls = SimpleNamespace()
        self.hook = cast(Hooks, self._calls)
        self.instrument(None)

    def __getitem__(self, name: str) -> object:
        return self._plugins[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._plugins)

    def __len__(self) -> int:
        return len(self._plugins)

    def order(self, hook: str) -> list[pluggy.HookImpl]:
        """Return the implementations of `hook` in the order in which they are called, wrappers first."""
        rank = {name: index for index, name in enumerate((*self._plugins, "defaults"))}
        return in_order(getattr(self._manager.hook, hook).get_hookimpls(), rank)

    def call(self, hook: str, **arguments: Any) -> Any:
        return getattr(self._calls, hook)(**arguments)

    def implement(self, hook: str) -> bool:
        """Return whether a plugin implements the seam `hook`."""
        return any(not impl.wrapper and impl.plugin_name != "defaults" for impl in self.order(hook))

    def instrument(self, watch: Watch | None) -> None:
        """Run each implementation of a hook inside of `watch(plugin, hook)` from now on; None ends it.

        `watch` returns a context manager, which is entered anew for each call. A wrapper runs inside of it before and
        after its `yield`, but not while others run. The core's implementations belong to the plugin "defaults". Hooks
        call hooks (`micro_step` calls `compute_loss`), so contexts nest.
        """
        for name in HOOK_NAMES:
            firstresult = bool(getattr(self._manager.hook, name).spec.opts["firstresult"])
            setattr(self._calls, name, compile_hook(name, self.order(name), firstresult, watch))

    def _register(self, name: str, plugin: object) -> None:
        try:
            self._manager.register(plugin, name)
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            raise PluginError(f"the plugin {name!r} does not fit the contract: {error}") from error


class _Manager(pluggy.PluginManager):
    """Looks for hooks among the functions of a class only: a field that is not set yet must not be read."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        if not callable(_static(plugin, name)):
            return None
        return super().parse_hookimpl_opts(plugin, name)


def check_plugin(name: str, plugin: object) -> None:
    """Raise PluginError for a plugin with a method that would never be called, or that can only save or load state."""
    if name in RESERVED:
        raise PluginError(f"a plugin cannot be named {name!r}: the core uses that name")
    if inspect.isclass(plugin):
        raise PluginError(f"the plugin {name!r} is the class {plugin.__name__}; give an instance: {plugin.__name__}()")
    keeps, takes = (callable(_static(plugin, half)) for half in ("state_dict", "load_state_dict"))
    if keeps != takes:
        there, missing = ("state_dict", "load_state_dict") if keeps else ("load_state_dict", "state_dict")
        raise PluginError(f"the plugin {name!r} has {there} and no {missing}: its state would be lost on resume")
    for attribute in dir(plugin):
        member = _static(plugin, attribute)
        if not callable(member):
            continue
        options = getattr(member, "hookdiff_impl", None)
        if options is None:
            if attribute in HOOK_NAMES:
                raise PluginError(
                    f"the plugin {name!r} has a method {attribute} without @hookimpl; it would never be called"
                )
            continue
        hook = options["specname"] or attribute
        if hook not in HOOK_NAMES:
            raise PluginError(f"the plugin {name!r}: there is no hook {hook!r}{nearest(hook, HOOK_NAMES)}")
        if options["hookwrapper"]:
            raise PluginError(f"the plugin {name!r}: use wrapper=True in place of hookwrapper=True in {attribute}")


def _static(plugin: object, attribute: str) -> object:
    """Return the attribute without running a property; for a static or class method, the function."""
    member = inspect.getattr_static(plugin, attribute, None)
    return member.__func__ if isinstance(member, staticmethod | classmethod) else member


def check_partners(classes: Mapping[str, type]) -> None:
    """Raise PluginError if the `requires` or `conflicts` of a plugin (names of plugins) are not met."""
    for name, kind in classes.items():
        required: Iterable[str] = getattr(kind, "requires", ())
        if missing := [other for other in required if other not in classes]:
            raise PluginError(
                f"the plugin {name!r} requires {', '.join(map(repr, missing))}, which this run does not have"
            )
        unwanted: Iterable[str] = getattr(kind, "conflicts", ())
        if present := [other for other in unwanted if other in classes]:
            raise PluginError(f"the plugin {name!r} cannot be used together with {', '.join(map(repr, present))}")
