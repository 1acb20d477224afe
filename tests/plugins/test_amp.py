import math

import pytest
import torch

from hookdiff import UserError, hookimpl
from hookdiff.testing import ToyObjective, assert_same, toy_loop, toy_model, weights
from hookdiff_amp import AMP


class Dtypes(ToyObjective):
    """Notes what the net computes in."""

    def __init__(self):
        self.seen = []

    def __call__(self, net, batch):
        self.seen.append(net(batch.inputs).dtype)
        return super().__call__(net, batch)


class Recorder:
    def __init__(self):
        self.nans, self.norms, self.updates = [], [], 0

    @hookimpl
    def on_nan(self, loop, report):
        self.nans.append(report)

    @hookimpl
    def after_backward(self, loop):
        self.norms.append(loop.gradients.total_norm)

    @hookimpl
    def after_optimizer_step(self):
        self.updates += 1


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("off", torch.float32)]
)
def test_the_net_computes_in_the_precision_asked_for(precision, dtype):
    objective = Dtypes()
    loop = toy_loop({"amp": AMP(precision)}, objective=objective, steps=2)
    loop.run()
    assert set(objective.seen) == {dtype}
    assert all(parameter.dtype == torch.float32 for parameter in loop.model.parameters())


def test_off_changes_nothing():
    plain, off = toy_loop(), toy_loop({"amp": AMP("off")})
    plain.run()
    off.run()
    assert_same(weights(plain), weights(off))


def test_fp16_trains_nearly_as_float32_does_and_clippers_see_true_norms():
    plain, half = Recorder(), Recorder()
    toy_loop({"recorder": plain}, steps=5).run()
    toy_loop({"amp": AMP("fp16"), "recorder": half}, steps=5).run()
    assert half.norms == pytest.approx(plain.norms, rel=0.02)


def test_an_overflow_is_a_void_step_and_no_nan():
    amp, recorder = AMP("fp16", init_scale=2.0**40), Recorder()
    loop = toy_loop({"amp": amp, "recorder": recorder}, steps=5)
    before, outcomes = weights(loop), []
    with loop:
        for step in loop.steps():
            outcomes.append(step.outcome)
            if step.outcome == "void" and "updated" not in outcomes:
                assert_same(weights(loop), before)
    voids = outcomes.count("void")
    assert voids > 3
    assert (loop.progress.step, loop.progress.position) == (5, 5 + voids)
    assert recorder.nans == []
    assert recorder.updates == 5
    assert amp.num_void == voids
    assert amp.scaler.get_scale() == 2.0 ** (40 - voids)
    assert all(math.isfinite(norm) for norm in recorder.norms)


class Broken(ToyObjective):
    def __call__(self, net, batch):
        output = super().__call__(net, batch)
        weight = next(net.parameters())
        return output.loss + (weight - weight).sqrt().sum() * 0  # a NaN gradient under a finite loss


def test_a_nan_in_the_loss_is_told_apart():
    class NaNLoss(ToyObjective):
        def __call__(self, net, batch):
            return super().__call__(net, batch).loss * math.nan

    amp, recorder = AMP("fp16"), Recorder()
    loop = toy_loop({"amp": amp, "recorder": recorder}, objective=NaNLoss())
    assert loop.run() == "on_nan"
    assert (len(recorder.nans), amp.num_void, recorder.updates) == (1, 0, 0)
    assert amp.scaler.get_scale() == 32768  # halved on both


def test_at_the_lowest_scale_an_overflow_is_a_failure():
    amp, recorder = AMP("fp16", init_scale=16.0), Recorder()
    loop = toy_loop({"amp": amp, "recorder": recorder}, objective=Broken())
    before = weights(loop)
    assert loop.run() == "on_nan"
    assert amp.num_void == 4  # 16, 8, 4, 2
    assert "0.weight" in recorder.nans[0].parameters
    assert_same(weights(loop), before)


def test_a_nan_gradient_without_a_scaler_is_met_at_once():
    recorder = Recorder()
    loop = toy_loop({"amp": AMP("bf16"), "recorder": recorder}, objective=Broken())
    assert loop.run() == "on_nan"
    assert (recorder.nans[0].position, recorder.updates) == (0, 0)


def test_half_precision_weights_under_a_scaler_are_refused():
    with pytest.raises(UserError, match=r"0\.weight is torch\.float16"):
        toy_loop({"amp": AMP("fp16")}, model=toy_model().half()).run()


def test_its_state_is_the_scale():
    amp = AMP("fp16", growth_interval=3)
    toy_loop({"amp": amp}, steps=7).run()
    state = amp.state_dict()
    other = AMP("fp16", growth_interval=3)
    with toy_loop({"amp": other}):
        other.load_state_dict(state)
        assert other.scaler.state_dict() == amp.scaler.state_dict()
    assert state["scaler"]["scale"] == 65536 * 4
