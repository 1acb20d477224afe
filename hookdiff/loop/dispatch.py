"""Hooks and their calls: pluggy registers and checks the implementations, this file sorts and calls them.

pluggy's own call costs 1 us and more, and it reverses `trylast` ties. Here the implementations of a hook are sorted and
bound to their arguments once the plugins are registered, so a call is a loop over plain functions. The meaning of every
marker is pluggy's, but an implementation of a seam leaves the answer to the next one by returning PASS and not None.
"""

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import itemgetter
from types import NoneType
from typing import Any, Final, Literal, Never, cast

from attrs import define
from pluggy import HookImpl

from hookdiff.errors import HookError

Arguments = Mapping[str, Any]
Watch = Callable[[str, str], AbstractContextManager[object]]  # takes the names of a plugin and of a hook

logger = logging.getLogger("hookdiff")


class _Pass:
    """The result of a seam in a plugin that leaves it to the next plugin; it fits every return type."""

    def __repr__(self) -> str:
        return "PASS"


PASS: Final[Never] = cast(Never, _Pass())


HookKind = Literal["moment", "seam", "question"]
# The part of a run to which a hook belongs.
Phase = Literal[
    "config",  # what a config leaves to the machine
    "model",  # the network
    "net",  # the module that training calls
    "restore",
    "start",
    "recording",  # of a step that is replayed
    "epoch",
    "batch",
    "passes",  # forward and backward
    "scale",  # of the gradients
    "nonfinite",  # loss or gradients
    "update",
    "after",  # what follows an update, an epoch or a batch
    "images",  # and weights, on request
    "log",
    "end",
]
# Which plugins a moment reaches: `starting`: all, and they count as started; `once`: all, at the first call after that;
# `started`: those that count as started, each of them also after an error in another.
Reach = Literal["starting", "once", "started"]
Changed = Literal["the weights", "the gradients"]  # what few hooks may leave otherwise than they found it


@define(frozen=True)
class Hook:
    """What the core must know of a hook; all lists of hooks are made from this."""

    name: str
    kind: HookKind
    phase: Phase
    result: str  # the type of the result, as the method names it; "None" for none
    may_be_absent: bool  # None in place of a result
    reach: Reach | None = None
    work: str = ""  # what the core's own implementation does, for tables of time
    like: tuple[str, ...] = ()  # names of it in other trainers: Lightning, Composer, transformers, Keras, fastai
    may_change: tuple[Changed, ...] = ()


@define(frozen=True)
class HookCall:
    """An implementation of a hook, and a function that takes its arguments out of those of the hook."""

    plugin: str
    is_wrapper: bool
    function: Callable[..., Any]
    take: Callable[[Arguments], Any]
    takes_one: bool  # `take` returns the argument itself, and not a tuple


def in_order(impls: Sequence[HookImpl], rank: Mapping[str, int]) -> list[HookImpl]:
    """Sort implementations into call order: wrappers, then `tryfirst`, plain, `trylast`; ties by `rank`."""

    def key(impl: HookImpl) -> tuple[bool, int, int]:
        phase = 0 if impl.tryfirst else 2 if impl.trylast else 1
        return not impl.wrapper, phase, rank[impl.plugin_name]

    return sorted(impls, key=key)


def bind(impl: HookImpl, hook: str, watch: Watch | None = None) -> HookCall:
    """Return the call of `impl`; if `watch` is given, it runs inside of `watch(plugin, hook)`."""
    plugin, names, function = impl.plugin_name, impl.argnames, impl.function
    if watch is not None:
        function = (_watched_wrapper if impl.wrapper else _watched)(function, plugin, hook, watch)
    take = itemgetter(*names) if names else lambda _: ()
    return HookCall(plugin, impl.wrapper, function, take, len(names) == 1)


def add_note(error: BaseException, plugin: str, hook: str) -> None:
    """Note on `error` that it left the implementation of `hook` in `plugin`; the core itself is not named."""
    if plugin != "defaults":
        error.add_note(f"hookdiff: in the hook {hook!r} of the plugin {plugin!r}")


def compile_hook(hook: Hook, returns: type, calls: Sequence[HookCall]) -> Callable[..., Any]:
    """Return the function that calls the ordered `calls` of `hook` with keyword arguments.

    A moment calls all of them and returns a list of the results. A seam calls them until one returns something other
    than PASS, and so does a question, which has those of one plugin. An error of a plugin gets a note with the names of
    plugin and hook. HookError, with both names, is raised for a result of another type than `returns`; where no result
    is expected, a warning is logged.
    """
    plain = [(call.plugin, call.function, call.take, call.takes_one) for call in calls if not call.is_wrapper]
    allowed: Any = returns | None if hook.may_be_absent else returns
    useless: set[str] = set()  # plugins with a result that nothing takes

    # Each loop calls the functions itself: one more frame for each call is felt in a step of a small network.
    def moment(**arguments: Any) -> list[Any]:
        results = []
        for plugin, function, take, takes_one in plain:
            try:
                result = function(take(arguments)) if takes_one else function(*take(arguments))
            except Exception as error:
                add_note(error, plugin, hook.name)
                raise
            if result is None:
                continue
            if returns is NoneType:
                if plugin not in useless:
                    useless.add(plugin)
                    logger.warning("%s", _refusal(hook, returns, plugin, result))
            elif not isinstance(result, allowed):
                raise HookError(_refusal(hook, returns, plugin, result))
            results.append(result)
        return results

    def seam(**arguments: Any) -> Any:
        for plugin, function, take, takes_one in plain:
            try:
                result = function(take(arguments)) if takes_one else function(*take(arguments))
            except Exception as error:
                add_note(error, plugin, hook.name)
                raise
            if result is not PASS:
                if not isinstance(result, allowed):
                    raise HookError(_refusal(hook, returns, plugin, result))
                return result
        raise HookError(f"every implementation of the hook {hook.name!r} returned PASS")

    def to_the_end(**arguments: Any) -> list[Any]:
        errors: list[Exception] = []
        for plugin, function, take, takes_one in plain:
            try:
                function(take(arguments)) if takes_one else function(*take(arguments))
            except Exception as error:
                add_note(error, plugin, hook.name)
                if errors:
                    logger.exception("the plugin %r failed in the hook %r too", plugin, hook.name)
                errors.append(error)
        if errors:
            raise errors[0]
        return []

    body: Callable[..., Any] = seam if hook.kind != "moment" else to_the_end if hook.reach == "started" else moment
    for call in reversed([call for call in calls if call.is_wrapper]):
        body = _surround(hook, returns, call, body)
    return body


def _refusal(hook: Hook, returns: type, plugin: str, result: object) -> str:
    where = f"the plugin {plugin!r} returned {_shown(result)} from the hook {hook.name!r}"
    if returns is NoneType:
        return f"{where}, which ignores results"
    expected = f"expected {_named(returns)}"
    if hook.kind == "question":
        return f"{where}, {expected}"
    if result is None:
        return f"{where}, {expected}; a plugin that leaves it to the next returns hookdiff.PASS"
    return f"{where}, {expected}{', or PASS to leave it to the next' if hook.kind == 'seam' else ''}"


def _shown(result: object) -> str:
    is_plain = isinstance(result, bool | int | float | str | None)
    return repr(result) if is_plain else f"a {_named(type(result))}"


def _named(kind: type) -> str:
    return "True or False" if kind is bool else kind.__name__


def _watched(function: Callable[..., Any], plugin: str, hook: str, watch: Watch) -> Callable[..., Any]:
    def watched(*arguments: Any) -> Any:
        with watch(plugin, hook):
            return function(*arguments)

    return watched


def _watched_wrapper(function: Callable[..., Any], plugin: str, hook: str, watch: Watch) -> Callable[..., Any]:
    return lambda *arguments: _WatchedWrapper(function(*arguments), lambda: watch(plugin, hook))


@define(eq=False)
class _WatchedWrapper:
    """A wrapper's generator that is watched while it runs, and not while it waits at its `yield`."""

    generator: Generator[None, Any, Any]
    watch: Callable[[], AbstractContextManager[object]]

    def __next__(self) -> None:
        with self.watch():
            next(self.generator)

    def send(self, value: Any) -> None:
        with self.watch():
            self.generator.send(value)

    def throw(self, error: BaseException) -> None:
        with self.watch():
            self.generator.throw(error)

    def close(self) -> None:
        self.generator.close()


def _surround(hook: Hook, returns: type, wrapper: HookCall, body: Callable[..., Any]) -> Callable[..., Any]:
    """Run `body` at the `yield` of `wrapper`, which sees its result or its exception."""
    name, plugin = hook.name, wrapper.plugin
    given = returns if hook.kind == "seam" else object if returns is NoneType else list

    def checked(result: Any) -> Any:
        if not isinstance(result, given):
            raise HookError(
                f"the plugin {plugin!r} returned {_shown(result)} from its wrapper of the hook {name!r}, expected "
                f"{_named(given)}: return the result of its yield"
            )
        return result

    def call(**arguments: Any) -> Any:
        taken = wrapper.take(arguments)
        around: Generator[None, Any, Any] = wrapper.function(*((taken,) if wrapper.takes_one else taken))
        thrown: BaseException | None = None
        try:
            try:
                next(around)
            except StopIteration:
                raise HookError(f"the plugin {plugin!r} wraps the hook {name!r} and returned without a yield") from None
            try:
                result = body(**arguments)
            except BaseException as error:
                thrown = error
                around.throw(error)
            else:
                around.send(result)
        except StopIteration as end:
            return checked(end.value)
        except Exception as error:
            if error is not thrown:
                add_note(error, plugin, name)
            raise
        around.close()
        raise HookError(f"the plugin {plugin!r} wraps the hook {name!r} and has a second yield")

    return call
