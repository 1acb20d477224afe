"""Steps of several passes: `accumulate`, `Loop.run_pass`, and the gradients of each pass."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from hookdiff import Batch, HookError, Loop, LossOutput, hookimpl
from hookdiff.testing import ToyObjective, assert_same, toy_loop, toy_model, weights
from hookdiff_amp import AMP
from tests.conftest import Batches, acting, check_facts, outcomes, ran, refused
from tests.sam import SAM

RHO = 0.05


def skipping(reports: list[Any]) -> object:
    """Return a plugin that skips bad steps, and adds their reports to the list."""
    return acting(on_nan=lambda report: reports.append(report) or "skip")


def model_of() -> nn.Module:
    return toy_model().double()


def data() -> Tensor:
    return torch.linspace(-1, 1, 160, dtype=torch.float64).reshape(40, 4)


class Double(ToyObjective):
    """Computes in float64, so that a difference is an error and no rounding."""

    def __call__(self, net: nn.Module, batch: Batch) -> LossOutput:
        noise = batch.draws["noise"].double()
        per_sample = (net(batch.inputs.double() + 0.5 * noise) - noise).square().mean(1)
        return LossOutput(per_sample.mean(), per_sample, batch.draws["timesteps"])


@settings(max_examples=8, deadline=None)
@given(micro_batch=st.sampled_from([None, 1, 3, 8]), steps=st.integers(1, 6))
def test_two_passes_equal_a_plain_loop(micro_batch: int | None, steps: int) -> None:
    batches, model = Batches(), model_of()
    plain, plugins = copy.deepcopy(model), {"batches": batches, "sam": SAM(RHO)}
    with toy_loop(plugins, model=model, objective=Double(), steps=steps, micro_batch=micro_batch) as loop:
        losses = [step.loss for step in loop.steps()]
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, fused=True)
    for batch, loss in zip(batches.seen, losses, strict=True):
        optimizer.zero_grad()
        first = Double()(plain, batch).loss
        first.backward()
        assert loss == pytest.approx(first.item(), rel=1e-12)
        grads = [parameter.grad.clone() for parameter in plain.parameters() if parameter.grad is not None]
        norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
        with torch.no_grad():
            for parameter, grad in zip(plain.parameters(), grads, strict=True):
                parameter.add_(RHO * grad / norm)
        optimizer.zero_grad()
        Double()(plain, batch).loss.backward()
        with torch.no_grad():
            for parameter, grad in zip(plain.parameters(), grads, strict=True):
                parameter.sub_(RHO * grad / norm)
        optimizer.step()
    for name, value in plain.named_parameters():
        torch.testing.assert_close(weights(loop)[name], value.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_a_second_pass_repeats_the_dropout_or_draws_its_own(micro_batch: int | None) -> None:
    losses: list[float] = []

    def passes(loop: Loop, batch: Batch) -> LossOutput:
        losses.extend(float(loop.run_pass(batch, *stream).loss) for stream in ((), (), ("other",), ("other",)))
        return loop.run_pass(batch)

    plugins = {"passes": acting(accumulate=passes)}
    toy_loop(plugins, model=toy_model(dropout=0.5), steps=1, micro_batch=micro_batch).run()
    one, again, other, other_again = losses
    assert (one, other) == (again, other_again)
    assert one != other


def test_gradients_that_are_not_cleared_are_added() -> None:
    norms: list[float] = []

    def passes(loop: Loop, batch: Batch) -> LossOutput:
        for _ in range(2):
            output = loop.run_pass(batch)
            norms.append(loop.gradients.total_norm)
        return output

    toy_loop({"passes": acting(accumulate=passes)}, model=model_of(), objective=Double(), steps=1).run()
    assert norms[1] == pytest.approx(2 * norms[0])


class BadPass:
    """Makes two passes; one of them gets a gradient or a loss that is not finite."""

    def __init__(self, number: int, value: float, what: str = "gradient") -> None:
        self.number, self.value, self.what = number, value, what

    @hookimpl
    def accumulate(self, loop: Loop, batch: Batch) -> LossOutput:
        self.now = 0
        loop.run_pass(batch)
        loop.gradients.zero()
        self.now = 1
        return loop.run_pass(batch)

    @hookimpl(wrapper=True)
    def compute_loss(self) -> Any:
        output = yield
        if self.now == self.number and self.what == "loss":
            return LossOutput(output.loss * self.value)
        return output

    @hookimpl(wrapper=True)
    def micro_step(self, loop: Loop) -> Any:
        output = yield
        if self.now == self.number and self.what == "gradient":
            next(loop.model.parameters()).grad.flatten()[0] = self.value  # type: ignore[union-attr]
        return output


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("what", ["gradient", "loss"])
def test_a_value_that_is_not_finite_in_any_pass_reaches_on_nan(number: int, value: float, what: str) -> None:
    reports: list[Any] = []
    loop = toy_loop({"bad": BadPass(number, value, what), "skips": skipping(reports)}, epochs=1)
    before = weights(loop)
    assert set(outcomes(loop)) == {"skipped"}
    assert_same(weights(loop), before)
    if what == "gradient":
        check_facts(reports[0], "earlier" if number == 0 else "0.weight")


@pytest.mark.parametrize("number", [0, 1])
def test_an_overflow_in_any_pass_is_a_void_step_under_a_loss_scale(number: int) -> None:
    amp, bad, reports = AMP("fp16"), BadPass(number, float("inf")), list[Any]()
    with toy_loop({"amp": amp, "bad": bad, "skips": skipping(reports)}, steps=3) as loop:
        batches = loop.feed.batches(0)
        scale = amp.scaler.get_scale() if amp.scaler else 0.0
        before = weights(loop)
        assert loop.run_step(next(batches)).outcome == "void"
        assert_same(weights(loop), before)
        assert amp.scaler is not None
        assert amp.scaler.get_scale() == scale / 2
        bad.number = -1
        assert loop.run_step(next(batches)).outcome == "updated"
    assert not reports


def test_a_loss_that_is_not_finite_is_no_overflow() -> None:
    amp, reports = AMP("fp16"), list[Any]()
    bad = BadPass(0, float("nan"), "loss")
    toy_loop({"amp": amp, "bad": bad, "skips": skipping(reports)}, steps=1, epochs=1).run()
    assert (len(reports), amp.num_void) == (5, 0)


def test_two_passes_under_a_loss_scale_train_as_without_it() -> None:
    loops = [ran(toy_loop({"sam": SAM(), **amp}, steps=10)) for amp in ({"amp": AMP("fp16", 1024.0)}, {})]
    for name, value in weights(loops[1]).items():
        torch.testing.assert_close(weights(loops[0])[name], value, rtol=0.05, atol=5e-3)


def test_weights_that_a_pass_moved_are_restored_after_an_error() -> None:
    factors = [1.0]
    once = acting(reduce_loss=lambda output: factors.pop() * output.loss)
    loop = toy_loop({"sam": SAM(), "fails": once}, steps=3)
    before = weights(loop)
    with pytest.raises(IndexError):
        loop.run()
    assert_same(weights(loop), before)


class Scheduled:
    """Weighs the loss of each sample by a function of its time."""

    @hookimpl
    def reduce_loss(self, loop: Loop, output: LossOutput) -> Tensor:
        assert output.per_sample is not None
        assert output.timesteps is not None
        assert not torch.is_autocast_enabled(loop.device.type)
        assert output.per_sample.dtype in (torch.float32, torch.float64)
        self.seen = output
        return ((1 + output.timesteps) * output.per_sample).mean()


@pytest.mark.parametrize("micro_batch", [1, 3, 8])
def test_a_loss_of_samples_does_not_depend_on_the_micro_batch(micro_batch: int) -> None:
    loops = [
        toy_loop({"weighs": Scheduled()}, model=model_of(), objective=Double(), steps=5, micro_batch=size)
        for size in (None, micro_batch)
    ]
    losses = []
    for loop in loops:
        with loop:
            losses.append([step.loss for step in loop.steps()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    for name, value in weights(loops[0]).items():
        torch.testing.assert_close(weights(loops[1])[name], value, rtol=1e-10, atol=1e-12)


def test_the_loss_of_samples_is_single_precision_outside_of_autocast() -> None:
    class Half(ToyObjective):
        def __call__(self, net: nn.Module, batch: Batch) -> LossOutput:
            per_sample = net(batch.inputs).square().mean(1)
            assert per_sample.dtype == torch.bfloat16
            return LossOutput(per_sample.mean(), per_sample, batch.draws["timesteps"])

    weighs = Scheduled()
    toy_loop({"amp": AMP("bf16"), "weighs": weighs}, objective=Half(), steps=1).run()
    assert weighs.seen.per_sample is not None


def test_the_weights_of_the_objective_are_there() -> None:
    from hookdiff.diffusion.diffusion import Diffusion
    from hookdiff.diffusion.process import VP
    from hookdiff.diffusion.weighting import MinSNR

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return self.scale * x

    def reads(output: LossOutput) -> Tensor:
        assert output.weights is not None
        assert output.per_sample is not None
        loss = (output.weights * output.per_sample).mean()
        torch.testing.assert_close(loss, output.loss)
        return loss

    images, objective = torch.rand(16, 1, 4, 4) * 2 - 1, Diffusion(VP(), weighting=MinSNR())
    toy_loop({"reads": acting(reduce_loss=reads)}, model=Net(), objective=objective, data=images, steps=2).run()


def test_an_objective_of_a_scalar_alone_skips_it() -> None:
    plugins = {"never": acting(reduce_loss=lambda: pytest.fail("was called"))}
    loop = toy_loop(plugins, objective=lambda net, batch: net(batch.inputs).square().mean(), steps=2)
    assert loop.run() == "done"


def test_a_loss_without_its_graph_or_of_another_shape_is_refused() -> None:
    class Detached(ToyObjective):
        def __call__(self, net: nn.Module, batch: Batch) -> LossOutput:
            return Double()(net.double(), batch).detach()

    shaped = acting(reduce_loss=lambda output: output.per_sample)
    with refused(HookError, "reduce_loss", "per_sample"):
        toy_loop({"weighs": Scheduled()}, objective=Detached(), steps=1).run()
    with refused(HookError, "reduce_loss", "(8,)"):
        toy_loop({"shaped": shaped}, model=model_of(), objective=Double(), steps=1).run()
