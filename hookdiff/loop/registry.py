"""The plugins of one Loop, called in order."""

import builtins
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property, partial
from operator import attrgetter
from types import NoneType, SimpleNamespace
from typing import Any, cast

import pluggy
from attrs import evolve

from hookdiff.errors import PluginError
from hookdiff.loop import defaults
from hookdiff.loop.dispatch import Hook, HookCall, Watch, bind, compile_hook, in_order, static_member
from hookdiff.loop.hookspecs import HOOKS, Hooks, declaration_of

logger = logging.getLogger("hookdiff")

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
        if self._plugins:
            from hookdiff.loop.contract_checks import check_plugins  # only with plugins

            check_plugins(self._plugins)
        for name, plugin in (*self._plugins.items(), ("defaults", defaults.Defaults())):
            try:
                self._manager.register(plugin, name)
                self._manager.check_pending()
            except pluggy.PluginValidationError as error:
                raise PluginError(f"the plugin {name!r} does not fit the contract: {error}") from error
        self._started: set[str] = set()
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

    @cached_property
    def versions(self) -> dict[str, str]:
        """The versions of python, torch, hookdiff and the distributions of the plugins."""
        from hookdiff.options.software import versions

        return versions(self.values())

    def order(self, hook: str) -> list[pluggy.HookImpl]:
        """Return the implementations of `hook` in the order in which they are called, wrappers first."""
        rank = {name: index for index, name in enumerate((*self._plugins, "defaults"))}
        return in_order(getattr(self._manager.hook, hook).get_hookimpls(), rank)

    def call(self, hook: str, **arguments: Any) -> Any:
        return getattr(self._calls, hook)(**arguments)

    def ask(self, plugin: str, question: str, **arguments: Any) -> Any:
        """Return the answer of `plugin` to a hook that is a question; None if the plugin has no such method."""
        answer = self._answers.get((plugin, question))
        return answer and answer(**arguments)

    def implement(self, hook: str) -> bool:
        """Return whether a plugin implements the seam `hook`."""
        return any(not impl.wrapper and impl.plugin_name != "defaults" for impl in self.order(hook))

    def instrument(self, watch: Watch | None) -> None:
        """Run each implementation of a hook inside of `watch(plugin, hook)` from now on; None stops that.

        `watch` returns a context manager, which is entered anew for each call. A wrapper runs inside of it before and
        after its `yield`, but not while others run. The core's implementations belong to the plugin "defaults". Hooks
        call hooks (`micro_step` calls `compute_loss`), so contexts nest.
        """
        self._watch = watch
        for hook in HOOKS.values():
            calls = self._bound(hook)
            if hook.kind == "question":
                self._answers |= {(call.plugin, hook.name): _compiled(hook, [call]) for call in calls}
            elif hook.ends:
                setattr(self._calls, hook.name, partial(self._end, hook))
            else:
                setattr(self._calls, hook.name, _compiled(hook, calls))

    def _bound(self, hook: Hook) -> list[HookCall]:
        calls = [bind(impl, hook.name, self._watch) for impl in self.order(hook.name)]
        if hook.name == "on_start":
            calls = [evolve(call, function=self._noting(call)) for call in calls]
        return calls

    def begin(self) -> None:
        """From now on, call hooks of the end only in plugins without `on_start`, and in those that have finished it."""
        self._started = set(self) - {impl.plugin_name for impl in self.order("on_start")}

    def _noting(self, call: HookCall) -> Callable[..., Any]:
        def start(*arguments: Any) -> Any:
            result = call.function(*arguments)
            self._started.add(call.plugin)
            return result

        return start

    def _end(self, hook: Hook, **arguments: Any) -> Any:
        """Call a hook of the end of a run in the plugins that have started."""
        started = [call for call in self._bound(hook) if call.plugin in self._started]
        try:
            return _compiled(hook, started)(**arguments)
        except Exception:
            if hook.name != "on_exception" and arguments["reason"] != "error":
                raise
            # The error that ended the run must not be hidden.
            logger.exception("%s failed too, after the error that ended the run", hook.name)


def _compiled(hook: Hook, calls: list[HookCall]) -> Callable[..., Any]:
    return compile_hook(hook, attrgetter(hook.result)(_TYPES), calls)


class _Manager(pluggy.PluginManager):
    """Looks for hooks only among the functions of a class, because a field may not be set yet."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        return super().parse_hookimpl_opts(plugin, name) if callable(static_member(plugin, name)) else None


def check_partners(classes: Mapping[str, type]) -> None:
    """Raise PluginError if a required plugin is missing, or a conflicting one is present."""
    for name, kind in classes.items():
        if problem := partner_problem(kind, classes):
            raise PluginError(f"the plugin {name!r} {problem}")


def partner_problem(kind: object, plugins: Collection[str]) -> str | None:
    """Return why a run with `plugins` cannot use `kind`, a class or function; None if it can."""
    declared = declaration_of(kind)
    if missing := [other for other in declared.requires if other not in plugins]:
        return f"requires {', '.join(map(repr, missing))}, which this run lacks; add them to its plugins"
    if present := [other for other in declared.conflicts if other in plugins]:
        return f"cannot be used together with {', '.join(map(repr, present))}; remove one"
    return None
