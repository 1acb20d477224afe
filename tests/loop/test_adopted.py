"""Modules that plugins bring with them: `Loop.adopt`."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import define, field
from torch import Tensor, nn

from hookdiff import Batch, Loop, LossOutput, PluginError, UserError, hookimpl
from hookdiff.testing import assert_resumes, assert_same, toy_loop, toy_model, weights
from hookdiff_amp import AMP
from hookdiff_checkpoint import Checkpoint
from hookdiff_clip import Clip
from hookdiff_ema import EMA
from tests.conftest import Batches, Restores, acting, check_facts, ran, refused
from tests.sam import Uncertainty


class _Spoiled(torch.autograd.Function):
    """Adds zero, with a gradient that is not finite."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradient: float) -> Tensor:
        ctx.gradient = gradient
        return torch.zeros_like(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.full_like(gradient, ctx.gradient), None


@define(eq=False)
class Weight(Uncertainty):
    """May spoil its gradient."""

    spoil: float | None = None

    @hookimpl
    def reduce_loss(self, output: LossOutput) -> Tensor:
        loss = super().reduce_loss(output)
        if self.spoil is not None:
            loss = loss + _Spoiled.apply(self.net.weight, self.spoil).sum()  # type: ignore[no-untyped-call]
        return loss


def plain_run(steps: int, every: int) -> tuple[nn.Module, nn.Module]:
    """Train as the loop does, in plain torch, on the batches of a run."""

    loop = ran(toy_loop({"batches": (batches := Batches())}, steps=steps))
    model, uncertainty = toy_model(), Uncertainty(every)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    other = torch.optim.Adam(uncertainty.net.parameters(), lr=uncertainty.lr)
    for number, batch in enumerate(batches.seen, 1):
        optimizer.zero_grad()
        other.zero_grad()
        uncertainty.reduce_loss(loop.objective(model, batch)).backward()  # type: ignore[arg-type]
        optimizer.step()
        if number % every == 0:
            other.step()
    return model, uncertainty.net


@pytest.mark.parametrize("every", [1, 3])
def test_it_is_trained_as_in_a_plain_loop(every: int) -> None:
    plugin = Uncertainty(every)
    loop = ran(toy_loop({"weight": plugin}, steps=7))
    model, net = plain_run(7, every)
    assert_same(weights(loop), dict(model.state_dict()))
    assert_same({"": plugin.net.weight.detach()}, {"": net.weight.detach()})
    assert plugin.net.weight.abs().max() > 0


def test_it_is_in_no_optimizer_norm_average_or_export_of_the_run() -> None:
    plugin, ema = Uncertainty(), EMA(decay=0.5)
    with toy_loop({"weight": plugin, "clip": Clip(), "ema": ema}, steps=2) as loop:
        for _ in loop.steps():
            pass
        own = set(loop.model.parameters())
        assert {p for o in loop.optimizers for g in o.param_groups for p in g["params"]} == own
        assert set(loop.gradients.parameters) == own
        with loop.weights("ema"):
            assert set(loop.model.state_dict()) == set(toy_model().state_dict())


@pytest.mark.parametrize("every", [1, 3])
def test_a_resumed_run_equals_an_uninterrupted_one(every: int) -> None:
    assert_resumes(lambda: Uncertainty(every), at=(1, 4))


def test_a_checkpoint_from_before_the_plugin_is_resumed_with_it_fresh(tmp_path: Path) -> None:
    toy_loop({"checkpoint": Checkpoint()}, steps=3, run_dir=tmp_path).run()
    plugins = {"weight": Uncertainty(), "checkpoint": Checkpoint()}
    with refused(UserError, "'weight'", "--fresh weight"):
        toy_loop(plugins, steps=6, run_dir=tmp_path, resume=True).run()
    plugins["weight"] = Uncertainty()
    assert toy_loop(plugins, steps=6, run_dir=tmp_path, resume=True, fresh=["weight"]).run() == "done"


def test_a_saved_module_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    toy_loop({"weight": Uncertainty(), "checkpoint": Checkpoint()}, steps=3, run_dir=tmp_path).run()
    other = Uncertainty()
    other.net = nn.Embedding(11, 1)
    with refused(UserError, "'weight'", "(11, 1)", "--fresh weight"):
        toy_loop({"weight": other, "checkpoint": Checkpoint()}, steps=6, run_dir=tmp_path, resume=True).run()


@define(eq=False)
class Pair(Weight):
    """Trains a second module, whose parameter has the same name."""

    shift: nn.Embedding = field(factory=lambda: nn.Embedding(10, 1), init=False)

    @hookimpl
    def prepare_model(self, loop: Loop) -> None:
        super().prepare_model(loop)
        loop.adopt(self, self.shift, torch.optim.SGD(self.shift.parameters(), lr=0.1))

    @hookimpl
    def reduce_loss(self, output: LossOutput) -> Tensor:
        assert output.timesteps is not None
        return super().reduce_loss(output) + self.shift(output.timesteps).square().mean()


@pytest.mark.parametrize("kind", [Weight, Pair])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_found_before_any_weight_moves(value: float, kind: type[Weight]) -> None:
    reports: list[Any] = []

    def keep(report: Any) -> str:
        reports.append(report)
        return "skip"

    plugin = kind()
    plugin.spoil = value
    loop = toy_loop({"weight": plugin, "keeps": acting(on_nan=keep)}, epochs=1)
    before, own = weights(loop), plugin.net.weight.detach().clone()
    loop.run()
    assert loop.progress.step == 0
    assert_same(weights(loop), before)
    assert torch.equal(plugin.net.weight, own)
    check_facts(reports[-1], "weight: weight")


def test_its_gradients_are_unscaled_and_an_overflow_of_theirs_is_a_void_step() -> None:
    amp, plugin = AMP("fp16", 1024.0), Weight()
    with toy_loop({"weight": plugin, "amp": amp}, steps=3) as loop:
        batches = loop.feed.batches(0)
        plugin.spoil = math.inf
        before = plugin.net.weight.detach().clone()
        assert loop.run_step(next(batches)).outcome == "void"
        assert amp.scaler is not None
        assert amp.scaler.get_scale() == 512
        assert torch.equal(plugin.net.weight, before)
        plugin.spoil = None
        assert loop.run_step(next(batches)).outcome == "updated"
        gradient = plugin.net.weight.grad
        assert gradient is not None
        # Ten times share 8 samples: each gradient is at most the mean of 1 - loss.
        assert 0 < gradient.abs().max() < 10


def test_a_rollback_restores_it() -> None:
    plugin, weights_at = Weight(), {}

    def look(loop: Loop) -> None:
        weights_at[loop.progress.position] = plugin.net.weight.detach().clone()
        plugin.spoil = math.nan if loop.progress.position == 4 else None

    back = acting(before_step=look, on_nan=lambda: "rollback")
    toy_loop({"weight": plugin, "back": back, "memory": Restores(at=3)}, steps=6).run()
    assert torch.equal(weights_at[5], weights_at[3])
    assert not torch.equal(weights_at[4], weights_at[3])


def test_a_module_that_is_only_used_is_frozen_and_not_saved() -> None:
    class Teacher:
        def __init__(self) -> None:
            self.net = nn.Sequential(nn.Linear(4, 4), nn.Dropout())

        @hookimpl
        def prepare_model(self, loop: Loop) -> None:
            loop.adopt(self, self.net)

        @hookimpl(wrapper=True)
        def compute_loss(self, loop: Loop, batch: Batch) -> Any:
            output = yield
            return LossOutput(output.loss + self.net(loop.net(batch.inputs.double())).square().mean())

    teacher = Teacher()
    model = toy_model().double()

    def objective(net: nn.Module, batch: Batch) -> Tensor:
        output: Tensor = net(batch.inputs.double())
        return output.square().mean()

    loop = toy_loop({"teacher": teacher}, model=model, objective=objective, steps=3)
    before = {name: value.double() for name, value in teacher.net.state_dict().items()}
    loop.run()
    assert_same(dict(teacher.net.state_dict()), before)
    assert not teacher.net.training
    assert not any(parameter.requires_grad for parameter in teacher.net.parameters())
    assert "teacher" not in loop.state_dict()["plugins"]


def test_a_script_may_enter_the_loop_twice() -> None:
    with ran(toy_loop({"weight": Uncertainty()}, steps=2)) as loop:
        assert len(loop.adopted.optimizers) == 1


def adopting(adopt: Any, hook: str = "prepare_model") -> object:
    """Return a plugin that adopts a module in its `hook`."""
    return type("Adopts", (), {hook: hookimpl(lambda self, loop: adopt(self, loop, nn.Embedding(10, 1)))})()


@pytest.mark.parametrize(
    ("plugin", "facts"),
    [
        (Uncertainty(every=0), ("'weight'", "every", 0)),
        (Uncertainty(every=-1), ("'weight'", "every", -1)),
        (
            adopting(lambda plugin, loop, net: loop.adopt(plugin, net, torch.optim.Adam(loop.model.parameters()))),
            ("'weight'", "Adam"),
        ),
        (adopting(lambda plugin, loop, net: loop.adopt(plugin, net), "on_start"), ("loop.adopt", "prepare_model")),
        (adopting(lambda plugin, loop, net: loop.adopt(object(), net)), ("loop.adopt", "prepare_model")),
    ],
    ids=["every 0", "every -1", "an optimizer of other parameters", "too late", "of no plugin"],
)
def test_a_module_that_cannot_be_adopted_is_refused(plugin: object, facts: tuple[object, ...]) -> None:
    with refused(PluginError, *facts):
        toy_loop({"weight": plugin}).run()
