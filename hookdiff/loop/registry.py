"""The plugins of one Loop: checked against the contract, and called in order."""

import builtins
import inspect
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from operator import attrgetter
from types import NoneType, SimpleNamespace
from typing import Any, cast

import pluggy
from attrs import evolve, fields

from hookdiff.errors import PluginError, nearest
from hookdiff.loop import defaults
from hookdiff.loop.dispatch import Hook, HookCall, Watch, bind, compile_hook, in_order
from hookdiff.loop.hookspecs import ELSEWHERE, HOOK_NAMES, HOOKS, HOOKS_VERSION, Declaration, Hooks, declaration_of
from hookdiff.loop.saved import saved_fields

logger = logging.getLogger("hookdiff")

# A plugin's tensors are saved in a file with the plugin's name; these names are taken.
RESERVED = ("data", "defaults", "manifest", "model", "optimizers")
# The types that results of hooks may have, by their names in `Hooks`: a default has to import the type of its seam.
_TYPES = SimpleNamespace(**vars(builtins) | vars(defaults) | {"None": NoneType, "Verdict": str})


class Plugins(Mapping[str, object]):
    """A mapping of names to plugins; `hook` calls their hooks, as `hook.on_start(loop=loop)`.

    Plugins are called in the order of the mapping, within the phases of their markers (`tryfirst`, `trylast`). Raises
    PluginError for a hook or an argument that does not exist, and for mistakes that pluggy accepts in silence: a method
    named like a hook without `@hookimpl`, a class in place of an instance.
    """

    def __init__(self, plugins: Mapping[str, object]) -> None:
        self._plugins = dict(plugins)
        self._manager = _Manager("hookdiff")
        self._manager.add_hookspecs(Hooks)
        for name, plugin in self._plugins.items():
            if name in RESERVED:
                raise PluginError(f"a plugin cannot be named {name!r}: the core uses that name")
            if inspect.isclass(plugin):
                kind = plugin.__name__
                raise PluginError(f"the plugin {name!r} is the class {kind}; give an instance: {kind}()")
            check_contract(name, plugin)
        check_distinct(self._plugins)
        for name, plugin in (*self._plugins.items(), ("defaults", defaults.Defaults())):
            try:
                self._manager.register(plugin, name)
                self._manager.check_pending()
            except pluggy.PluginValidationError as error:
                raise PluginError(f"the plugin {name!r} does not fit the contract: {error}") from error
        self._started: set[str] = set()
        self._is_ready = True  # on_ready has been called since on_start
        # Whether a plugin implements or wraps `make_batch`.
        self.make_batches = any(impl.plugin_name != "defaults" for impl in self.order("make_batch"))
        self._calls = SimpleNamespace()
        self._answers: dict[tuple[str, str], Callable[..., Any]] = {}  # by plugin and question
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

    def ask(self, plugin: str, question: str, **arguments: Any) -> Any:
        """Return the answer of `plugin` to a hook that is a question; None if it has no such method."""
        answer = self._answers.get((plugin, question))
        return answer and answer(**arguments)

    def implement(self, hook: str) -> bool:
        """Return whether a plugin implements the seam `hook`."""
        return any(not impl.wrapper and impl.plugin_name != "defaults" for impl in self.order(hook))

    def instrument(self, watch: Watch | None) -> None:
        """Run each implementation of a hook inside of `watch(plugin, hook)` from now on; None ends it.

        `watch` returns a context manager, which is entered anew for each call. A wrapper runs inside of it before and
        after its `yield`, but not while others run. The core's implementations belong to the plugin "defaults". Hooks
        call hooks (`micro_step` calls `compute_loss`), so contexts nest.
        """
        for hook in HOOKS.values():
            calls = [bind(impl, hook.name, watch) for impl in self.order(hook.name)]
            if hook.kind == "question":
                self._answers |= {(call.plugin, hook.name): _compiled(hook, [call]) for call in calls}
            else:
                reaching = {"starting": self._starting, "once": self._once, "started": self._stopping, None: _compiled}
                setattr(self._calls, hook.name, reaching[hook.reach](hook, calls))

    def _starting(self, hook: Hook, calls: list[HookCall]) -> Callable[..., Any]:
        """Return `on_start`, which notes the plugins that have started."""

        def noted(call: HookCall) -> HookCall:
            def start(*arguments: Any) -> Any:
                result = call.function(*arguments)
                self._started.add(call.plugin)
                return result

            return evolve(call, function=start)

        start = _compiled(hook, [noted(call) for call in calls])

        def on_start(**arguments: Any) -> Any:
            self._started = set(self._plugins) - {call.plugin for call in calls}  # those that have nothing to start
            self._is_ready = False
            return start(**arguments)

        return on_start

    def _once(self, hook: Hook, calls: list[HookCall]) -> Callable[..., Any]:
        """Return `on_ready`, which reaches the plugins at its first call after `on_start`."""
        ready = _compiled(hook, calls)

        def on_ready(**arguments: Any) -> Any:
            if not self._is_ready:
                self._is_ready = True
                ready(**arguments)

        return on_ready

    def _stopping(self, hook: Hook, calls: list[HookCall]) -> Callable[..., Any]:
        """Return `on_exception` or `on_stop`, which reach all plugins that have started."""

        def stop(**arguments: Any) -> Any:
            started = [call for call in calls if call.plugin in self._started]
            try:
                return _compiled(hook, started)(**arguments)
            except Exception:
                if hook.name != "on_exception" and arguments["reason"] != "error":
                    raise
                # The error that ended the run must not be hidden.
                logger.exception("%s failed too, after the error that ended the run", hook.name)

        return stop


def _compiled(hook: Hook, calls: list[HookCall]) -> Callable[..., Any]:
    return compile_hook(hook, attrgetter(hook.result)(_TYPES), calls)


class _Manager(pluggy.PluginManager):
    """Looks for hooks among the functions of a class only: a field that is not set yet must not be read."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        return super().parse_hookimpl_opts(plugin, name) if callable(_static(plugin, name)) else None


def check_contract(name: str, plugin: object) -> None:
    """Raise PluginError for a `plugin`, or the class of one, that does not fit this version of the hooks.

    It is made for a later version, has a method that would never be called, or can only save or only load its state.
    """
    check_declaration(name, plugin if inspect.isclass(plugin) else type(plugin))
    keeps, takes = (callable(_static(plugin, half)) for half in ("state_dict", "load_state_dict"))
    if keeps != takes:
        there, missing = ("state_dict", "load_state_dict") if keeps else ("load_state_dict", "state_dict")
        raise PluginError(f"the plugin {name!r} has {there} and no {missing}: its state would be lost on resume")
    if keeps and (saved := saved_fields(plugin)):
        raise PluginError(
            f"the plugin {name!r} has state_dict, so its saved fields ({', '.join(saved)}) would be lost on resume; "
            "keep what state_dict returns in saved fields too"
        )
    for attribute, member, options in _methods(plugin):
        if options is None:
            if attribute in HOOK_NAMES:
                raise PluginError(
                    f"the plugin {name!r} has a method {attribute} without @hookimpl; it would never be called"
                )
            continue
        hook = options["specname"] or attribute
        if hook not in HOOK_NAMES:
            way_out = f"; in hookdiff it is {ELSEWHERE[hook]!r}" if hook in ELSEWHERE else nearest(hook, HOOK_NAMES)
            raise PluginError(f"the plugin {name!r}: there is no hook {hook!r}{way_out}")
        if options["hookwrapper"]:
            raise PluginError(f"the plugin {name!r}: use wrapper=True in place of hookwrapper=True in {attribute}")
        if options["wrapper"] and HOOKS[hook].kind == "question":
            raise PluginError(f"the plugin {name!r}: {attribute} answers for this plugin alone, so it wraps nothing")
        known = _arguments(hook)
        if unknown := [one for one in _taken(plugin, attribute) if one not in known]:
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


def _arguments(hook: str) -> list[str]:
    return list(inspect.signature(getattr(Hooks, hook)).parameters)[1:]


def _taken(plugin: object, attribute: str) -> list[str]:
    """Return the names of the arguments that a method takes from its hook: those without a default."""
    given = inspect.signature(_static(plugin, attribute)).parameters.values()  # type: ignore[arg-type]
    names = [one.name for one in given if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    is_static = isinstance(inspect.getattr_static(plugin, attribute), staticmethod)
    return names if is_static else names[1:]


def implements(plugin: object, *hooks: str) -> bool:
    """Return whether `plugin`, or the plugins of this class, implement one of `hooks`."""
    found = (options["specname"] or attribute for attribute, _, options in _methods(plugin) if options)
    return not set(hooks).isdisjoint(found)


def _methods(plugin: object) -> Iterator[tuple[str, Callable[..., Any], Mapping[str, Any] | None]]:
    """Yield the name of each method, its function, and the options of its @hookimpl; None without one."""
    for attribute in dir(plugin):
        if callable(member := _static(plugin, attribute)):
            yield attribute, member, getattr(member, "hookdiff_impl", None)


def check_declaration(name: str, kind: type) -> None:
    """Raise PluginError for a class that declares what does not fit, or is made for a later version of the hooks."""
    for keyword in fields(Declaration):
        if _static(kind, keyword.name) is not None:
            raise PluginError(
                f"the plugin {name!r}: {keyword.name} is an attribute of the class, which nobody reads; write "
                f"@plugin({keyword.name}=...) above the class"
            )
    declared = declaration_of(kind)
    for key, names in {"requires": declared.requires, "conflicts": declared.conflicts}.items():
        if isinstance(names, str):
            raise PluginError(f"the plugin {name!r}: {key} is the string {names!r}; write {key}=({names!r},)")
    if not isinstance(declared.needs, Mapping):
        raise PluginError(
            f"the plugin {name!r}: needs is {declared.needs!r}; write needs={{'pandas': 'pandas>=2'}}: modules, and "
            "what pip installs for them"
        )
    wanted = declared.hooks_version
    if not isinstance(wanted, int):
        raise PluginError(f"the plugin {name!r}: hooks_version is {wanted!r}; write hooks_version={HOOKS_VERSION}")
    if wanted > HOOKS_VERSION:
        from hookdiff.options.software import distributions

        origin = "".join(f" of {one.name} {one.version}" for one in distributions([kind]))
        raise PluginError(
            f"the plugin {name!r}{origin} is made for version {wanted} of the hooks, and this hookdiff has version "
            f"{HOOKS_VERSION}: pip install -U hookdiff"
        )


def _static(plugin: object, attribute: str) -> object:
    """Return the attribute without running a property; for a static or class method, the function."""
    member = inspect.getattr_static(plugin, attribute, None)
    return member.__func__ if isinstance(member, staticmethod | classmethod) else member


def check_distinct(plugins: Mapping[str, object]) -> None:
    """Raise PluginError for two plugins that are the same object, or of one class that compares by value.

    pluggy would take the two for one.
    """
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


def check_partners(classes: Mapping[str, type]) -> None:
    """Raise PluginError if the plugins that a class requires, or conflicts with, are not met."""
    for name, kind in classes.items():
        if problem := partner_problem(kind, classes):
            raise PluginError(f"the plugin {name!r} {problem}")


def partner_problem(kind: object, plugins: Collection[str]) -> str | None:
    """Return what is wrong if a run has `plugins` and uses `kind`, a class or function that may require some."""
    declared = declaration_of(kind)
    if missing := [other for other in declared.requires if other not in plugins]:
        return f"requires {', '.join(map(repr, missing))}, which this run does not have"
    if present := [other for other in declared.conflicts if other in plugins]:
        return f"cannot be used together with {', '.join(map(repr, present))}"
    return None
