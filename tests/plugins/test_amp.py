import logging
import math
import re

import pytest
import torch
from torch import nn

from hookdiff import UserError, hookimpl
from hookdiff.testing import ToyObjective, assert_same, toy_loop, toy_model, weights
from hookdiff_amp import AMP
from tests.conftest import Logged, acting, check_facts, refused, toy_run, two_ranks


class Dtypes(ToyObjective):
    """Notes the dtypes of the outputs of the net."""

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
    loop = toy_run({"amp": AMP(precision)}, objective=objective, steps=2)
    assert set(objective.seen) == {dtype}
    assert all(parameter.dtype == torch.float32 for parameter in loop.model.parameters())


@pytest.mark.parametrize("amp_first", [False, True])
def test_other_wrappers_of_the_loss_compute_in_the_precision_too(amp_first):
    class Around:
        def __init__(self):
            self.seen = []

        @hookimpl(wrapper=True)
        def compute_loss(self, loop, batch):
            self.seen.append(loop.net(batch.inputs).dtype)
            return (yield)

    around, amp = Around(), AMP("bf16")
    plugins = {"amp": amp, "around": around} if amp_first else {"around": around, "amp": amp}
    toy_loop(plugins, steps=1).run()
    assert around.seen == [torch.bfloat16]


def test_off_changes_nothing():
    assert_same(weights(toy_run()), weights(toy_run({"amp": AMP("off")})))


def test_fp16_trains_nearly_as_float32_does_and_clippers_see_true_norms():
    plain, half = Recorder(), Recorder()
    toy_loop({"recorder": plain}, steps=5).run()
    toy_loop({"amp": AMP("fp16"), "recorder": half}, steps=5).run()
    assert half.norms == pytest.approx(plain.norms, rel=0.02)


def test_an_overflow_is_a_void_step_and_not_a_nan():
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


class Normed(nn.Module):
    """A toy net with a batch norm that gets values beyond float16 in the first step."""

    def __init__(self):
        super().__init__()
        self.net, self.norm, self.calls = toy_model(), nn.BatchNorm1d(4), 0

    def forward(self, inputs):
        self.calls += 1
        output = self.net(inputs)
        self.norm(output * (1e9 if self.calls == 1 else 1.0))
        return output


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_a_void_step_leaves_no_trace_in_buffers(micro_batch):
    model = Normed()
    before, outcomes = weights(toy_loop(model=model)), []
    with toy_loop({"amp": AMP("fp16", init_scale=2.0**40)}, model=model, steps=5, micro_batch=micro_batch) as loop:
        for step in loop.steps():
            outcomes.append(step.outcome)
            if step.outcome == "void":
                assert_same(weights(loop), before)
            before = weights(loop)
    assert outcomes[0] == "void"
    assert set(outcomes) == {"void", "updated"}
    assert before["norm.num_batches_tracked"] == 5 * (1 if micro_batch is None else 3)
    assert all(value.isfinite().all() for value in before.values())


class Broken(ToyObjective):
    def __call__(self, net, batch):
        output = super().__call__(net, batch)
        weight = next(net.parameters())
        return output.loss + (weight - weight).sqrt().sum() * 0  # a NaN gradient under a finite loss


def test_a_nan_in_the_loss_is_not_an_overflow():
    class NaNLoss(ToyObjective):
        def __call__(self, net, batch):
            return super().__call__(net, batch).loss * math.nan

    amp, recorder = AMP("fp16"), Recorder()
    loop = toy_loop({"amp": amp, "recorder": recorder}, objective=NaNLoss())
    assert loop.run() == "on_nan"
    assert (len(recorder.nans), amp.num_void, recorder.updates) == (1, 0, 0)
    assert amp.scaler.get_scale() == 32768  # halved on both


def test_a_nan_gradient_without_a_scaler_is_reported_at_once():
    recorder = Recorder()
    loop = toy_loop({"amp": AMP("bf16"), "recorder": recorder}, objective=Broken())
    assert loop.run() == "on_nan"
    assert (recorder.nans[0].position, recorder.updates) == (0, 0)


@pytest.mark.parametrize(("options", "scales"), [({}, [16, 8, 4, 2, 1]), ({"min_scale": 3.0}, [16, 8, 4, 3])])
def test_at_the_lowest_scale_an_overflow_is_a_failure_and_the_report_says_how_the_scale_fell(options, scales):
    skip = acting(on_nan=lambda loop: "skip" if loop.progress.position < 6 else "stop")
    amp, recorder = AMP("fp16", init_scale=16.0, **options), Recorder()
    loop = toy_loop({"amp": amp, "recorder": recorder, "skip": skip}, objective=Broken())
    before = weights(loop)
    assert loop.run() == "on_nan"
    *fell, lowest = scales
    assert (amp.num_void, amp.scaler.get_scale()) == (len(fell), lowest)
    assert "0.weight" in recorder.nans[0].parameters
    (note,) = {report.notes["loss scale"] for report in recorder.nans}
    by_batch = [number for batch, scale in enumerate(fell) for number in (scale, batch)]
    assert [int(number) for number in re.findall(r"\d+", note)] == [*by_batch, lowest]
    assert_same(weights(loop), before)


def test_the_share_of_void_steps_is_logged():
    logged, voids = Logged(), []
    with toy_loop({"amp": AMP("fp16", init_scale=2.0**40), "logged": logged}, steps=10, log_every=5) as loop:
        for step in loop.steps():
            voids += [step.step] * (step.outcome == "void")  # the updates that were made before it
    num = [sum(first <= voids_at < first + 5 for voids_at in voids) for first in (0, 5)]
    assert num[0] > 10
    # No window ends before an update.
    assert logged.of("amp/void_share") == {5: num[0] / (num[0] + 5), 10: num[1] / (num[1] + 5)}


@pytest.mark.parametrize("num_optimizers", [1, 2])
@pytest.mark.parametrize("micro_batch", [None, 3])
def test_it_is_the_plain_loop_of_torch_to_the_bit(num_optimizers, micro_batch):
    def make(model):
        groups = [[model[0], model[3]]] if num_optimizers == 1 else [[model[0]], [model[3]]]
        return [torch.optim.SGD([p for m in g for p in m.parameters()], lr=0.1) for g in groups]

    options = {"steps": 12, "micro_batch": micro_batch}
    amp = AMP("fp16", init_scale=2.0**22, growth_interval=4)
    loop = toy_run({"amp": amp}, optimizers=make, **options)

    plain, model = toy_loop(**options), toy_model()
    optimizers, scaler = make(model), torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=4)
    updates = epoch = position = 0
    while updates < 12:
        for batch in plain.feed.batches(epoch):
            drawn = plain.objective.draw(batch, plain.random.generator("noise", position, plain.device))
            position += 1
            for optimizer in optimizers:
                optimizer.zero_grad()
            for part in drawn.split(micro_batch):
                with torch.autocast("cpu", torch.float16):
                    loss = plain.objective(model, part).loss
                scaler.scale(loss * (len(part) / len(drawn))).backward()
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            finite = all(p.grad.isfinite().all() for p in model.parameters())
            if finite:  # torch's own step would leave out only the optimizer whose gradients overflowed
                for optimizer in optimizers:
                    scaler.step(optimizer)
            scaler.update()
            updates += finite
            if updates == 12:
                break
        epoch += 1
    assert position == loop.progress.position > 12
    assert scaler.state_dict() == amp.scaler.state_dict()
    assert_same(weights(loop), model.state_dict())


def test_the_choice_of_auto_is_logged_once(caplog):
    with caplog.at_level(logging.INFO, "hookdiff"):
        toy_loop({"amp": AMP()}, steps=3).run()
    (line,) = [line for line in caplog.messages if "amp" in line]
    check_facts(line, "precision", "auto", "cpu")


def test_half_precision_weights_under_a_scaler_are_refused():
    with refused(UserError, "0.weight", "torch.bfloat16"):
        toy_loop({"amp": AMP("fp16")}, model=toy_model().bfloat16()).run()


SCALES = """
from torch import nn
from hookdiff import PASS, hookimpl
from hookdiff.testing.toy import toy_loop
from hookdiff_amp import AMP
from hookdiff_ddp import DDP

class Extra:
    "Trains a module of its own; its gradient overflows in two steps, on the second rank alone."
    @hookimpl
    def prepare_model(self, loop):
        self.net = nn.Linear(4, 4)
        loop.adopt(self, self.net, torch.optim.SGD(self.net.parameters(), lr=0.01))
    @hookimpl
    def before_step(self, loop, batch):
        self.inputs = batch.inputs
    @hookimpl(tryfirst=True)
    def unscale(self, loop):
        self.net(self.inputs).square().mean().backward()
        if rank and loop.progress.position in (3, 6):
            self.net.weight.grad[0] = torch.inf
        return PASS
    @hookimpl
    def on_nan(self):
        return "skip"

result = []
for least in (4.0, 16.0):
    amp = AMP("fp16", init_scale=16.0, min_scale=least, growth_interval=4)
    with toy_loop({"ddp": DDP(), "amp": amp, "extra": Extra()}, steps=8) as loop:
        result.append([(step.outcome, amp.scaler.get_scale()) for step in loop.steps()])
"""


def test_all_ranks_have_the_same_scale_after_an_overflow_on_one_of_them(tmp_path):
    first, second = two_ranks(SCALES, tmp_path)
    assert first == second
    (_, lowered), (outcomes, kept) = (zip(*run, strict=True) for run in first)
    assert [position for position, outcome in enumerate(outcomes) if outcome != "updated"] == [3, 6]
    assert lowered == (*[16.0] * 3, *[8.0] * 3, *[4.0] * 4)
    assert kept == (16.0,) * 10  # a scale that grew at once would be 32 from the fourth step on
