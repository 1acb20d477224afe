import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hookdiff import Loop, LoopConfig, hookimpl
from hookdiff.testing import toy_loop
from hookdiff_clip import Clip


class Look:
    """Notes norms and gradients before the clipper and after it."""

    def __init__(self):
        self.before, self.after = [], []

    @hookimpl
    def after_backward(self, loop):
        self.before.append({name: g.clone() for name, g in loop.gradients.named().items()})

    @hookimpl
    def optimizer_step(self, loop):
        self.after.append({name: g.clone() for name, g in loop.gradients.named().items()})
        self.norm = loop.gradients.total_norm


def total(gradients):
    return torch.sqrt(sum(g.square().sum() for g in gradients.values())).item()


def test_known_answer():
    model, look = nn.Linear(2, 1, bias=False), Look()

    def objective(net, batch):
        return net(batch.inputs).sum(1)

    config = LoopConfig(steps=1, batch_size=1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    Loop(model, sgd, objective, torch.tensor([[3.0, 4.0]]), config, {"clip": Clip(max_norm=1), "look": look}).run()
    assert total(look.before[0]) == pytest.approx(5)
    torch.testing.assert_close(look.after[0]["weight"], torch.tensor([[0.6, 0.8]]))
    assert look.norm == pytest.approx(1)


@given(max_norm=st.floats(1e-3, 10), adaptive=st.booleans())
def test_it_never_raises_the_norm_and_keeps_the_direction(max_norm, adaptive):
    clip, look = Clip("adaptive" if adaptive else "norm", max_norm=max_norm, warmup=2), Look()
    toy_loop({"clip": clip, "look": look}, steps=6).run()
    for before, after in zip(look.before, look.after, strict=True):
        assert total(after) <= min(total(before), max_norm) * (1 + 1e-5)
        ratio = total(after) / total(before)
        for name in before:
            torch.testing.assert_close(after[name], before[name] * ratio, rtol=1e-4, atol=1e-7)


def test_it_equals_torch():
    look = Look()
    loop = toy_loop({"clip": Clip(max_norm=0.05), "look": look}, steps=1)
    loop.run()
    parameters = [nn.Parameter(g) for g in look.before[0].values()]
    for parameter, gradient in zip(parameters, look.before[0].values(), strict=True):
        parameter.grad = gradient.clone()
    nn.utils.clip_grad_norm_(parameters, 0.05)
    for parameter, gradient in zip(parameters, look.after[0].values(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-8)


def test_the_adaptive_threshold_is_a_multiple_of_the_running_mean():
    clip, look = Clip("adaptive", max_norm=100, factor=1.5, decay=0.9, warmup=3), Look()
    toy_loop({"clip": clip, "look": look}, steps=3).run()
    norms = [total(g) for g in look.before]
    mean = (0.81 * norms[0] + 0.9 * norms[1] + norms[2]) / 2.71
    assert clip.threshold == pytest.approx(1.5 * mean, rel=1e-5)


def test_its_bounds_hold():
    clip = Clip("adaptive", max_norm=0.02, min_norm=0.01, warmup=1)
    thresholds = []

    class Note:
        @hookimpl
        def after_optimizer_step(self):
            thresholds.append(clip.threshold)

    toy_loop({"clip": clip, "note": Note()}).run()
    assert all(0.01 <= threshold <= 0.02 for threshold in thresholds)


def test_bounds_that_cross_are_refused():
    with pytest.raises(ValueError, match=r"min_norm \(2\) must not be above max_norm \(1\)"):
        Clip("adaptive", max_norm=1, min_norm=2)
