"""Hooks and their calls: pluggy registers and checks the implementations, this file sorts and calls them.

pluggy's own call costs 1 us and more, and it reverses `trylast` ties. Here the implementations of a hook are sorted and
bound to their arguments once the plugins are registered, so a call is a loop over plain functions. Markers
mean the same as in pluggy, but an implementation of a seam returns PASS, not None, to leave the answer to the next.
"""

import inspect
import logging
import re
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

_ATTRIBUTE = re.compile(r"'(\w+)' object has no attribute '(\w+)'")


class _Pass:
    """The result with which a plugin leaves a seam to the next plugin; it fits every return type."""

    def __repr__(self) -> str:
        return "PASS"


PASS: Final[Never] = cast(Never, _Pass())


HookKind = Literal["moment", "seam", "question"]
# The part of a run to which a hook belongs.
Phase = Literal[
    "config",  # "auto" values
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
    "after",  # an update, an epoch or a batch
    "images",  # and weights, on request
    "log",
    "end",
]
Changed = Literal["the weights", "the gradients"]  # which only a few hooks may change


@define(frozen=True)
class Hook:
    """The facts about a hook; all lists of hooks are made from them."""

    name: str
    kind: HookKind
    phase: Phase
    result: str  # the type of the result, as the method names it; "None" for none
    may_be_absent: bool  # the result may be None
    ends: bool = False  # called in every plugin that has started, also after an error of another plugin
    work: str = ""  # the work of the core's own implementation, for tables of time
    like: tuple[str, ...] = ()  # names of the hook in other trainers: Lightning, Composer, transformers, Keras, fastai
    may_change: tuple[Changed, ...] = ()


@define(frozen=True)
class HookCall:
    """An implementation of a hook, and a function that picks its arguments from the arguments of the hook."""

    plugin: str
    is_wrapper: bool
    method: Callable[..., Any]  # of the plugin
    function: Callable[..., Any]  # the method, or a function that runs it inside of a watch
    take: Callable[[Arguments], Any]
    takes_one: bool  # `take` returns the argument itself, and not a tuple


def static_member(plugin: object, attribute: str) -> object:
    """Return the attribute without running a property; for a static or class method, the function."""
    member = inspect.getattr_static(plugin, attribute, None)
    return member.__func__ if isinstance(member, staticmethod | classmethod) else member


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
    return HookCall(plugin, impl.wrapper, impl.function, function, take, len(names) == 1)


def _add_note(error: BaseException, call: HookCall, hook: str) -> None:
    """Note on `error` that it left the `call` of `hook`; the core itself is not named."""
    if call.plugin == "defaults":
        return
    error.add_note(f"hookdiff: in the hook {hook!r} of the plugin {call.plugin!r}")
    match = _ATTRIBUTE.search(str(error)) if isinstance(error, AttributeError) else None
    kind = type(getattr(call.method, "__self__", None))
    if match and match[1] == kind.__name__ and hasattr(kind, "__slots__") and not hasattr(kind, match[2]):
        error.add_note(
            f"hookdiff: {match[1]} has slots: declare `{match[2]} = field(init=False)` in it, or `saved(...)` if a "
            "checkpoint needs it"
        )


def leave_out_core(error: BaseException) -> None:
    """Cut the traceback of `error` where the code of the user called the core, if it came from there."""
    before, entry = None, error.__traceback__
    while entry and not str(entry.tb_frame.f_globals.get("__name__")).startswith("hookdiff."):
        before, entry = entry, entry.tb_next
    if before is None:
        error.__traceback__ = None
    else:
        before.tb_next = None


def compile_hook(hook: Hook, returns: type, calls: Sequence[HookCall]) -> Callable[..., Any]:
    """Return the function that calls the ordered `calls` of `hook` with keyword arguments.

    A moment calls all of them and returns a list of results. A seam, or a question to one plugin, calls one after the
    other until a result is not PASS. An error of a plugin gets a note with the names of
    plugin and hook. HookError, with both names, is raised for a result of another type than `returns`; where no result
    is expected, a warning is logged.
    """
    plain = [(call, call.function, call.take, call.takes_one) for call in calls if not call.is_wrapper]
    allowed: Any = returns | None if hook.may_be_absent else returns
    useless: set[str] = set()  # plugins that returned an unexpected result

    # Each loop calls the functions itself: one more frame a call slows the step of a small network.
    def moment(**arguments: Any) -> list[Any]:
        results = []
        for call, function, take, takes_one in plain:
            try:
                result = function(take(arguments)) if takes_one else function(*take(arguments))
            except Exception as error:
                _add_note(error, call, hook.name)
                raise
            if result is None:
                continue
            if returns is NoneType:
                if call.plugin not in useless:
                    useless.add(call.plugin)
                    logger.warning("%s", _refusal(hook, returns, call, result))
            elif not isinstance(result, allowed):
                raise HookError(_refusal(hook, returns, call, result))
            results.append(result)
        return results

    def seam(**arguments: Any) -> Any:
        for call, function, take, takes_one in plain:
            try:
                result = function(take(arguments)) if takes_one else function(*take(arguments))
            except Exception as error:
                _add_note(error, call, hook.name)
                raise
            if result is not PASS:
                if not isinstance(result, allowed):
                    raise HookError(_refusal(hook, returns, call, result))
                return result
        raise HookError(f"every implementation of the hook {hook.name!r} returned PASS; one must return a result")

    def to_the_end(**arguments: Any) -> list[Any]:
        errors: list[Exception] = []
        for call, function, take, takes_one in plain:
            try:
                function(take(arguments)) if takes_one else function(*take(arguments))
            except Exception as error:
                _add_note(error, call, hook.name)
                if errors:
                    logger.exception("the plugin %r failed in the hook %r too", call.plugin, hook.name)
                errors.append(error)
        if errors:
            raise errors[0]
        return []

    def default(**arguments: Any) -> Any:
        return function(take(arguments)) if takes_one else function(*take(arguments))

    if hook.kind == "seam" and [call.plugin for call in calls] == ["defaults"]:  # results of the core need no check
        ((_, function, take, takes_one),) = plain
        return default
    body: Callable[..., Any] = seam if hook.kind != "moment" else to_the_end if hook.ends else moment
    for wrapper in reversed([call for call in calls if call.is_wrapper]):
        body = _surround(hook, returns, wrapper, body)
    return body


def _refusal(hook: Hook, returns: type, call: HookCall, result: object) -> str:
    what = f"the plugin {call.plugin!r} returned {_shown(result)} from the hook {hook.name!r}"
    expected = f"expected {_named(returns)}"
    if returns is NoneType:
        expected = "which ignores results"
    elif hook.kind == "seam":
        pass_on = "; a plugin that leaves it to the next returns hookdiff.PASS"
        expected += pass_on if result is None else ", or PASS to leave it to the next"
    return f"{what}, {expected}{_place(call.method)}"


def _place(method: Callable[..., Any]) -> str:
    """Return a line with the file and the line of a method, if it is written in Python."""
    code = getattr(method, "__code__", None)
    return f"\n  {code.co_filename}:{code.co_firstlineno}" if code else ""


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
    wanted = returns if hook.kind == "seam" else object if returns is NoneType else list

    def checked(result: Any) -> Any:
        if not isinstance(result, wanted):
            raise HookError(
                f"the plugin {plugin!r} returned {_shown(result)} from its wrapper of the hook {name!r}, expected "
                f"{_named(wanted)}: return the result of its yield{_place(wrapper.method)}"
            ) from None
        return result

    def call(**arguments: Any) -> Any:
        taken = wrapper.take(arguments)
        around: Generator[None, Any, Any] = wrapper.function(*((taken,) if wrapper.takes_one else taken))
        thrown: BaseException | None = None
        try:
            try:
                next(around)
            except StopIteration:
                place = _place(wrapper.method)
                raise HookError(f"the plugin {plugin!r} wraps the hook {name!r} and must yield once{place}") from None
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
                _add_note(error, wrapper, name)
            raise
        around.close()
        raise HookError(
            f"the plugin {plugin!r} wraps the hook {name!r} and must yield only once{_place(wrapper.method)}"
        )

    return call
