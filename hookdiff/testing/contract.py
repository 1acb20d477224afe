"""Checks that a plugin keeps the rules of its hooks, even rules that do not affect the values of a run."""

from __future__ import annotations

import gc
import io
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import NoneType
from typing import Any

import attrs
import torch
from attrs import define, field
from torch import Tensor
from torch._C import DisableTorchFunction

from hookdiff.errors import UserError
from hookdiff.loop import gradients
from hookdiff.loop.hookspecs import HOOKS, hookimpl, hooks_of
from hookdiff.loop.loop import Loop
from hookdiff.machine import ranks
from hookdiff.machine.dtensor import local
from hookdiff.testing.companions import COMPANIONS
from hookdiff.testing.compare import fail
from hookdiff.testing.graphs import Graphs
from hookdiff.testing.record import PLUGIN, Record, Runs
from hookdiff.testing.transfers import CountTransfers

_OF_STEPS = {*hooks_of("batch", "passes", "scale", "update", "after")} - {"on_epoch_end"}
_OF_THE_STEP = {gradients.__file__, ranks.__file__}  # files in which the loop makes the one transfer of a step
_MUTABLE = (list, dict, set, deque)
_BROKEN = "the plugin breaks the contract"
_INSTEAD = {
    "the weights": "change weights in optimizer_step, or offer others, made in on_done, by offer_weights",
    "the gradients": "change gradients in after_backward",
}


def assert_keeps_contract(
    make_plugin: Callable[[], object], *, others: Mapping[str, Callable[[], object]] = COMPANIONS, **loop: Any
) -> None:
    """Raise AssertionError, with the hook and the remedy, unless the plugin keeps the rules of the hooks.

    The plugin is compared by identity, its options have types, and no two instances share a value that changes. It
    changes weights and gradients only in hooks that may do so, and clears gradient norms after such a change. Its hooks
    in a step print nothing, and do not wait for the device in every unlogged step. No autograd graph outlives its step.

    Args:
        make_plugin: returns a new plugin.
        others: functions that make the other plugins of the run, by name.
        loop: further arguments of `toy_loop`.
    """
    kind = type(make_plugin())
    seen, before = _Watch(), _of_all_instances(kind)
    with Runs(make_plugin, {**others, "watch": lambda: seen}, loop) as runs:
        fail(_BROKEN, _of_class(kind))
        printed = io.StringIO()
        seen.printed = printed
        with redirect_stdout(printed), seen.transfers, _no_collection():
            try:
                runs.train(Record("the run"))
            except ValueError as error:
                notes = "\n".join(getattr(error, "__notes__", []))
                if not isinstance(error, UserError) and f"'on_start' of the plugin {PLUGIN!r}" in notes:
                    remedy = "for a mistake of the user raise UserError, with a text that begins with plugins.NAME.KEY"
                    raise AssertionError(f"{error!r} in on_start: {remedy}") from error
                raise
        after = _of_all_instances(kind)
        facts = [
            f"{name} belongs to the class and changed in the run: {name} = {_field_of(*before[name])}"
            for name in before
            if before[name] != after.get(name)
        ]
        fail(_BROKEN, [*facts, *seen.facts()])


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage during the `with`: a collection may free a graph that a plugin keeps in a reference cycle."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _of_class(kind: Any) -> Iterator[str]:
    if kind.__eq__ is not object.__eq__:
        yield f"{kind.__name__} compares by value: write @define(eq=False) above the class"
    for each in attrs.fields(kind) if attrs.has(kind) else ():
        if each.init and each.type is None:
            yield f"the option {each.name} has no type: write {each.name}: TYPE = ..."
        if isinstance(each.default, _MUTABLE):
            mutable = type(each.default).__name__
            yield f"{each.name} has one {mutable} for all instances: write field(factory={mutable})"


def _of_all_instances(kind: type) -> dict[str, tuple[str, str]]:
    """Return the type and the text of each plain class attribute of `kind` and its bases, by name."""
    bodies = [vars(base) for base in kind.__mro__[:-1]]
    plain = (*_MUTABLE, bool, int, float, str, NoneType, Tensor)
    values = {name: value for body in reversed(bodies) for name, value in body.items() if not name.startswith("__")}
    return {name: (type(value).__name__, repr(value)) for name, value in values.items() if isinstance(value, plain)}


def _field_of(kind: str, text: str) -> str:
    """Return the code of a field that gives each instance its own value of type `kind`, written as `text`."""
    first = f"factory={kind}" if kind in [mutable.__name__ for mutable in _MUTABLE] else f"default={text}"
    return f"field({first}, init=False)"


class _Transfers(CountTransfers):
    """Counts the transfers that the plugin makes, except for the gradient norms of a step, which all plugins share."""

    is_own = False  # whether a hook of the plugin runs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():  # a compiler waits for no device, and cannot follow the frames
            return func(*args, **(kwargs or {}))
        before = self.count
        result = super().__torch_function__(func, types, args, kwargs)
        frame = sys._getframe(1)
        while frame.f_back and Path(torch.__file__).parent in Path(frame.f_code.co_filename).parents:
            frame = frame.f_back
        if not self.is_own or frame.f_code.co_filename in _OF_THE_STEP:
            self.count = before
        return result


@define(eq=False)
class _Watch:
    """A plugin of the run that watches the calls of the tested plugin."""

    printed: io.StringIO = field(factory=io.StringIO)
    transfers: _Transfers = field(factory=_Transfers)
    _loop: Loop = field(init=False)
    _graphs: Graphs = field(factory=Graphs, init=False)
    _facts: dict[str, None] = field(factory=dict, init=False)  # each once
    _reading: set[str] = field(factory=set, init=False)  # hooks that have waited for the device
    _is_logged: bool | None = field(default=None, init=False)  # whether this step is logged; None: no update
    _quiet: list[bool] = field(factory=list, init=False)  # for each step that is not logged: whether no hook has waited

    @hookimpl(tryfirst=True)
    def on_start(self, loop: Loop) -> None:
        self._loop = loop
        self._graphs.watch(loop.model)
        loop.plugins.instrument(self._call)
        loop.resources.callback(loop.plugins.instrument, None)

    @hookimpl(trylast=True)
    def after_optimizer_step(self, loop: Loop) -> None:
        self._is_logged = loop.log.due

    @hookimpl(trylast=True)
    def between_steps(self) -> None:
        if self._is_logged is False:
            self._quiet.append(not self.transfers.count)
        self.transfers.count, self._is_logged = 0, None
        if self._graphs.num_alive:
            self._note("a graph of compute_loss outlives its step: detach() the tensors that the plugin keeps")

    @contextmanager
    def _call(self, plugin: str, hook: str) -> Iterator[None]:
        if plugin != PLUGIN:
            with self._counting(False):
                yield
            return
        before, place, count = self._held(), self.printed.tell(), self.transfers.count
        try:
            with self._counting(hook in _OF_STEPS):
                yield
        finally:  # also after the StopIteration of a wrapper
            if self.printed.tell() > place and hook in _OF_STEPS:
                self._note(f'it prints in {hook}: use logging.getLogger("hookdiff")')
            if self.transfers.count > count:
                self._reading.add(hook)
            self._compare(hook, before)

    @contextmanager
    def _counting(self, is_own: bool) -> Iterator[None]:
        outer, self.transfers.is_own = self.transfers.is_own, is_own
        try:
            yield
        finally:
            self.transfers.is_own = outer

    def _compare(self, hook: str, before: dict[str, dict[str, Tensor]]) -> None:
        after, may = self._held(), HOOKS[hook].may_change
        for what, values in before.items():
            same = values.keys() == after[what].keys() and all(
                torch.equal(values[name].nan_to_num(), after[what][name].nan_to_num()) for name in values
            )
            if same:
                continue
            if what not in may:
                self._note(f"it changes {what} in {hook}, which may not: {_INSTEAD[what]}")
            elif what == "the gradients" and self._is_stale():
                self._note(
                    f"it changes the gradients in {hook}, and not their norms: call loop.gradients.clear(), or scale_()"
                )

    def _held(self) -> dict[str, dict[str, Tensor]]:
        with DisableTorchFunction():
            named = dict(self._loop.model.named_parameters()) if self._loop.weights.name == "model" else {}
            copies = {name: local(p.grad).clone() for name, p in named.items() if p.grad is not None}
            return {
                "the weights": {name: local(p.detach()).clone() for name, p in named.items()},
                "the gradients": copies,
            }

    def _is_stale(self) -> bool:
        known = self._loop.gradients.known_norms
        with DisableTorchFunction():
            return known is not None and not torch.allclose(
                known, self._loop.gradients.measure(), rtol=1e-3, equal_nan=True
            )

    def _note(self, fact: str) -> None:
        self._facts[fact] = None

    def facts(self) -> list[str]:
        remedy = "pass tensors to loop.log, and read values on the host, or rehearse, only in some steps"
        waits = [f"it waits for the device in every step, in {hook}: {remedy}" for hook in self._reading]
        return [*self._facts, *(waits if self._quiet and not any(self._quiet) else ())]
