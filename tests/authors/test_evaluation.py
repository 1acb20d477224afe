import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from attrs import define, field
from torch import Tensor, nn

from hookdiff import Evaluation, Feed, HookError, Loop, SampleRequest, UnknownWeights
from hookdiff.testing import assert_same, toy_loop, toy_model, weights
from hookdiff_ema import EMA
from tests.conftest import Logged, Restores, acting, added_transfers, kept, ran, refused, saved


@define(eq=False)
class Measure(Evaluation):
    """Calls `read`, and keeps the steps of its calls."""

    read: Callable[[Loop], Any] = lambda loop: {"bias": loop.model[0].bias.sum()}
    steps: list[int] = field(init=False, factory=list)

    def evaluate(self, loop: Loop) -> Any:
        self.steps.append(loop.progress.step)
        return self.read(loop)


def draws(loop: Loop) -> dict[str, float]:
    """Draw from all global generators, which a training may use too."""
    return {"torch": float(torch.rand(())), "numpy": float(numpy.random.rand()), "python": random.random()}


def roll(loop: Loop) -> None:
    """Add numbers of all global generators to the gradients."""
    for gradient in loop.gradients.tensors():
        gradient += torch.rand(()) + numpy.random.rand() + random.random()


DICE = {"dice": acting(after_backward=roll)}


def test_values_are_logged_under_val() -> None:
    logged = Logged()
    measure = Measure(every=4, read=lambda loop: {"a": 2.0, "b": (6.0, 4)})
    toy_loop({"measure": measure, "logged": logged}, steps=9).run()
    assert (logged.of("val/a"), logged.of("val/b")) == ({4: 2.0, 8: 2.0, 9: 2.0}, {4: 1.5, 8: 1.5, 9: 1.5})


def test_it_measures_each_epoch_unless_it_is_set() -> None:
    measure = Measure()
    toy_loop({"measure": measure}, steps=12).run()
    assert measure.steps == [5, 10, 12]


def test_it_measures_in_eval_mode_without_gradients_and_restores_both() -> None:
    modes = []

    def read(loop: Loop) -> dict[str, float]:
        modes.append((loop.model.training, loop.model[2].training, torch.is_grad_enabled()))
        return {}

    loop = toy_loop({"measure": Measure(every=1, read=read)}, model=toy_model(dropout=0.5), steps=2)
    loop.model[1].eval()  # a module that was in eval mode before stays in it
    with loop:
        loop.model[1].eval()
        for _ in loop.steps():
            assert torch.is_grad_enabled()
            assert [module.training for module in loop.model] == [True, False, True, True]
    assert modes == [(False, False, False)] * 2


def test_a_measurement_does_not_change_the_training() -> None:
    def run(plugins: dict[str, object]) -> Loop:
        torch.manual_seed(0)
        numpy.random.seed(0)
        random.seed(0)
        model = nn.Sequential(toy_model(dropout=0.3), nn.BatchNorm1d(4))
        return ran(toy_loop({**plugins, "ema": EMA(), **DICE}, model=model, steps=8, micro_batch=3))

    def read(loop: Loop) -> dict[str, Any]:
        return {**draws(loop), "mean": loop.net(torch.randn(5, 4)).mean()}

    assert_same(weights(run({})), weights(run({"measure": Measure(every=1, read=read)})))


def test_each_measurement_has_the_same_randomness() -> None:
    logged = Logged()
    toy_loop({"measure": Measure(every=1, read=draws), **DICE, "logged": logged}, steps=3).run()
    for name in ("torch", "numpy", "python"):
        assert len(logged.of(f"val/{name}")) == 3
        assert len(set(logged.of(f"val/{name}").values())) == 1
    other = Logged()
    toy_loop({"measure": Measure(every=1, read=draws), "logged": other}, steps=1, seed=1).run()
    assert other.of("val/torch")[1] != logged.of("val/torch")[1]


@pytest.mark.parametrize("order", [["ema", "measure"], ["measure", "ema"]])
@pytest.mark.parametrize("name", [None, "ema", "model"])
def test_the_weights_that_were_asked_for_are_measured(name: str | None, order: list[str]) -> None:
    held: list[tuple[str, Tensor]] = []

    def read(loop: Loop) -> dict[str, float]:
        held.append((loop.weights.name, loop.model[0].weight.detach().clone()))
        assert loop.sample(SampleRequest(1, weights=loop.weights.name)).weights == loop.weights.name
        return {}

    ema = EMA(decay=0.5)
    plugins = {"ema": ema, "measure": Measure(every=3, weights=name, read=read)}
    with toy_loop({key: plugins[key] for key in order}, steps=4) as loop:
        for step in loop.steps():
            if step.step == 3:
                own, average = loop.model[0].weight.detach().clone(), ema.shadow["0.weight"].clone()
    assert not torch.equal(own, average)
    assert held[0][0] == (name or "ema")
    assert torch.equal(held[0][1], own if name == "model" else average)


def test_without_an_average_the_weights_of_the_model_are_measured() -> None:
    held: list[str] = []
    toy_loop({"measure": Measure(read=lambda loop: held.append(loop.weights.name) or {})}, steps=1).run()
    assert held == ["model"]


def test_unknown_weights_are_refused_before_the_training() -> None:
    measure = Measure(weights="emma")
    loop = toy_loop({"measure": measure, "ema": EMA()})
    with refused(UnknownWeights, "emma", "ema", "model"):
        loop.run()
    assert (loop.progress.position, measure.steps) == (0, [])


@pytest.mark.parametrize("result", [None, 0.5])
def test_a_result_of_another_type_is_refused_by_its_name(result: Any) -> None:
    with refused(HookError, "Measure.evaluate", type(result).__name__):
        toy_loop({"measure": Measure(every=1, read=lambda loop: result)}).run()


@pytest.mark.parametrize("values", [{"bad": torch.zeros(3)}, {"good": torch.ones(()), "bad": (torch.zeros(3), 2)}])
def test_a_value_that_is_no_scalar_is_refused_by_its_name(values: Any) -> None:
    with refused(HookError, "Measure.evaluate", "'bad'", "(3,)", "scalar") as caught:
        toy_loop({"measure": Measure(every=1, read=lambda loop: values)}).run()
    assert caught.value.__notes__ == ["hookdiff: in the hook 'after_optimizer_step' of the plugin 'measure'"]


def test_a_measurement_adds_one_transfer_which_is_that_of_the_log() -> None:
    several = Measure(every=5, read=lambda loop: {name: value.sum() for name, value in loop.model.named_parameters()})
    assert added_transfers({"measure": several}, steps=20) == len(several.steps) == 4


@pytest.mark.parametrize("cut", [4, 6, 7])
@pytest.mark.parametrize("every", [3, "1 epochs"])
def test_a_resumed_run_measures_at_the_same_steps(every: Any, cut: int) -> None:
    whole, restores = Measure(every=every), Restores(at=cut)
    toy_loop({"measure": whole, "restores": restores}, steps=11).run()
    again = Measure(every=every)
    toy_loop({"measure": again, "restores": Restores(restores.state)}, steps=11).run()
    assert again.steps == [step for step in whole.steps if step > cut]


@pytest.mark.parametrize("every", [3, 4, "1 epochs", 0])
def test_a_run_that_was_done_is_not_measured_again(every: Any) -> None:
    loop, again = ran(toy_loop({"measure": Measure(every=every)}, steps=8)), Measure(every=every)
    toy_loop({"measure": again, "restores": Restores(saved(loop))}, steps=8).run()
    assert again.steps == []


def test_the_end_is_measured_by_the_resumed_run_if_the_first_was_killed_before() -> None:
    restores, again = kept({"measure": Measure(every=3)}, at=8), Measure(every=3)  # the last step
    toy_loop({"measure": again, "restores": restores}, steps=8).run()
    assert again.steps == [8]


def test_a_measurement_of_held_out_samples() -> None:
    def read(loop: Loop) -> dict[str, float]:
        return {"samples": sum(len(batch) for batch in loop.feed.unaugmented(loop.feed.held_out_indices))}

    logged = Logged()
    data = Feed(torch.rand(40, 4), held_out=7)
    toy_loop({"held_out": Measure(read=read), "logged": logged}, data=data, steps=1).run()
    assert logged.of("val/samples") == {1: 7.0}
