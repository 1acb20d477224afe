"""Calls hooks: pluggy registers and checks the implementations, this file sorts and calls them.

pluggy's own call costs 1 us and more, and it reverses `trylast` ties. Here the implementations of a hook are sorted and
bound to their arguments once the plugins are registered, so a call is a loop over plain functions. The meaning of every
marker is pluggy's.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import itemgetter
from typing import Any

from attrs import define
from pluggy import HookImpl

from hookdiff.errors import HookError

Arguments = Mapping[str, Any]
Bound = Callable[[Arguments], Any]
Watch = Callable[[str, str], AbstractContextManager[object]]  # takes the names of a plugin and of a hook


def in_order(impls: Sequence[HookImpl], rank: Mapping[str, int]) -> list[HookImpl]:
    """Sort implementations into call order: wrappers, then `tryfirst`, plain, `trylast`; ties by `rank`."""

    def key(impl: HookImpl) -> tuple[bool, int, int]:
        phase = 0 if impl.tryfirst else 2 if impl.trylast else 1
        return not impl.wrapper, phase, rank[impl.plugin_name]

    return sorted(impls, key=key)


def compile_hook(
    name: str, impls: Sequence[HookImpl], firstresult: bool, watch: Watch | None = None
) -> Callable[..., Any]:
    """Return the function that calls the ordered `impls` of hook `name` with keyword arguments.

    A seam that ends in None raises HookError. Otherwise a wrapper that forgets to return the result of its `yield`
    would go unnoticed. If `watch` is given, each implementation runs inside of `watch(plugin, name)`.
    """
    bound = [(impl, _bind(impl) if watch is None else _watched(impl, name, watch)) for impl in impls]
    wrappers = [call for impl, call in bound if impl.wrapper]
    plain = [call for impl, call in bound if not impl.wrapper]
    names = ", ".join(impl.plugin_name for impl in impls)

    def moment(arguments: Arguments) -> list[Any]:
        return [result for call in plain if (result := call(arguments)) is not None]

    def seam(arguments: Arguments) -> Any:
        for call in plain:
            if (result := call(arguments)) is not None:
                return result
        return None

    body: Bound = seam if firstresult else moment
    for wrapper in reversed(wrappers):
        body = _surround(name, wrapper, body)

    def call_seam(**arguments: Any) -> Any:
        if (result := body(arguments)) is None:
            raise HookError(f"the hook {name!r} ended in None; it went through: {names}")
        return result

    def call_moment(**arguments: Any) -> Any:
        return body(arguments)

    return call_seam if firstresult else call_moment


def _bind(impl: HookImpl) -> Bound:
    function, names = impl.function, impl.argnames
    if not names:
        return lambda arguments: function()
    if len(names) == 1:
        (name,) = names
        return lambda arguments: function(arguments[name])
    take = itemgetter(*names)
    return lambda arguments: function(*take(arguments))


def _watched(impl: HookImpl, name: str, watch: Watch) -> Bound:
    call, plugin = _bind(impl), impl.plugin_name
    if impl.wrapper:
        return lambda arguments: _WatchedWrapper(call(arguments), lambda: watch(plugin, name))

    def watched(arguments: Arguments) -> Any:
        with watch(plugin, name):
            return call(arguments)

    return watched


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


def _surround(name: str, wrapper: Bound, body: Bound) -> Bound:
    """Run `body` at the `yield` of `wrapper`, which sees its result or its exception."""

    def call(arguments: Arguments) -> Any:
        around: Generator[None, Any, Any] = wrapper(arguments)
        try:
            next(around)
        except StopIteration:
            raise HookError(f"a wrapper of the hook {name!r} returned without a yield") from None
        try:
            result = body(arguments)
        except BaseException as error:
            try:
                around.throw(error)
            except StopIteration as end:
                return end.value
        else:
            try:
                around.send(result)
            except StopIteration as end:
                return end.value
        around.close()
        raise HookError(f"a wrapper of the hook {name!r} has a second yield")

    return call
