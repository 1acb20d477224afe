"""The promise of the author's kit that a plugin keeps the rules of its hooks: each mistake gets its word."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from attrs import define, field

from hookdiff import Batch, Loop, hookimpl
from hookdiff.loop.hookspecs import HOOKS, Hooks
from hookdiff.testing import COMPANIONS, assert_keeps_contract
from tests.conftest import acting, refused


@define
class ByValue:
    pass


@define(eq=False)
class Untyped:
    rate = field(default=1.0)


@define(eq=False)
class OneForAll:
    seen: list[int] = field(default=[])


class InTheClass:
    seen: list[int] = []  # noqa: RUF012

    @hookimpl
    def before_step(self) -> None:
        self.seen.append(1)


class KeepsGraph:
    @hookimpl(wrapper=True)
    def compute_loss(self) -> Any:
        self.output = yield
        return self.output


@torch.no_grad()
def shrinks(loop: Loop) -> None:
    for parameter in loop.model.parameters():
        parameter.mul_(0.5)


def doubles(loop: Loop) -> None:
    for gradient in loop.gradients.tensors():
        gradient.mul_(2)


def doubles_and_says_so(loop: Loop) -> None:
    doubles(loop)
    loop.gradients.clear()


def reads(loop: Loop) -> None:
    loop.log({"mine": loop.output.loss.item()})


def reads_a_weight(loop: Loop) -> None:
    next(loop.model.parameters()).detach().sum().item()


def reads_for_batch(loop: Loop, batch: Batch) -> Batch:
    """Wait for the device while the batch is made, before the step begins."""
    reads_a_weight(loop)
    return batch


class ReadsAround:
    """Waits for the device after all others at the end of a step."""

    @hookimpl(wrapper=True)
    def after_optimizer_step(self, loop: Loop) -> Iterator[None]:
        yield
        reads_a_weight(loop)


class CountsInTheClass:
    """Adds tensors to a number of the class."""

    total: Any = 0.0

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        type(self).total += loop.output.loss.detach()


class LastInTheClass:
    """Keeps the newest step in the class."""

    last: Any = None

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        type(self).last = loop.progress.step


def reads_if_due(loop: Loop) -> None:
    if loop.log.due:
        reads(loop)


def in_hook(hook: str, work: Callable[..., Any]) -> Callable[[], object]:
    return lambda: acting(**{hook: work})


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (ByValue, ("ByValue", "@define(eq=False)")),
        (Untyped, ("rate", "no type")),
        (OneForAll, ("seen", "one list", "field(factory=list)")),
        (InTheClass, ("seen", "belongs to the class", "field(factory=list, init=False)")),
        (in_hook("after_optimizer_step", lambda: print("x")), ("prints in after_optimizer_step", "logging.getLogger")),
        (in_hook("after_optimizer_step", reads), ("every step", "after_optimizer_step", "pass tensors to loop.log")),
        (in_hook("before_step", reads_a_weight), ("every step", "before_step", "pass tensors to loop.log")),
        (in_hook("between_steps", reads_a_weight), ("every step", "between_steps")),
        (in_hook("make_batch", reads_for_batch), ("every step", "make_batch")),
        (ReadsAround, ("every step", "after_optimizer_step")),
        (CountsInTheClass, ("total", "belongs to the class", "total = field(default=0.0, init=False)")),
        (LastInTheClass, ("last", "belongs to the class", "last = field(default=None, init=False)")),
        (in_hook("after_backward", shrinks), ("weights in after_backward", "optimizer_step")),
        (in_hook("on_stop", shrinks), ("weights in on_stop", "offer_weights")),
        (in_hook("before_step", doubles), ("gradients in before_step", "after_backward")),
        (in_hook("on_start", lambda: int("x")), ("ValueError", "on_start", "UserError", "plugins.NAME.KEY")),
        (KeepsGraph, ("a graph of compute_loss", "detach()")),
        (in_hook("after_optimizer_step", doubles), ("gradients in after_optimizer_step", "after_backward")),
        (in_hook("after_backward", doubles), ("after_backward", "loop.gradients.clear()", "scale_()")),
        (in_hook("after_backward", doubles_and_says_so), ()),
        (in_hook("after_optimizer_step", reads_if_due), ()),
        (in_hook("after_backward", lambda loop: loop.log({"mine": loop.gradients.total_norm})), ()),
        *((make, ()) for make in COMPANIONS.values()),
    ],
)
def test_each_mistake_gets_its_word_and_a_right_plugin_passes(
    make: Any, facts: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    with refused(AssertionError, *facts) if facts else nullcontext():
        assert_keeps_contract(make, steps=6, log_every=3)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("hook", HOOKS)
def test_what_a_hook_may_change_is_what_it_says(hook: str) -> None:
    text = str(getattr(Hooks, hook).__doc__).partition("May change: ")[2].replace("the model in place", "weights")
    lasting = "".join(part for part in text.split(";") if "only during" not in part)
    assert {f"the {what}" for what in ("weights", "gradients") if what in lasting} == set(HOOKS[hook].may_change)
