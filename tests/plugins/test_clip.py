import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hookdiff import Loop, LoopConfig, UserError, hookimpl
from hookdiff.testing import count_transfers, toy_loop, toy_model
from hookdiff_clip import Clip

ADAPTIVE: dict[str, dict[str, Any]] = {
    "mean": {"decay": 0.9, "factor": 0.8},
    "percentile": {"percentile": 40, "window": 8, "factor": 0.9},
    "zscore": {"deviations": 0.5, "window": 8},
}


class Look:
    """Notes gradients before the clipper and after it."""

    def __init__(self) -> None:
        self.before: list[dict[str, Tensor]] = []
        self.after: list[dict[str, Tensor]] = []

    @hookimpl
    def after_backward(self, loop: Loop) -> None:
        self.before.append({name: g.clone() for name, g in loop.gradients.named().items()})

    @hookimpl
    def optimizer_step(self, loop: Loop) -> None:
        self.after.append({name: g.clone() for name, g in loop.gradients.named().items()})
        self.norm, self.loss = loop.gradients.total_norm, loop.gradients.loss


class Push:
    """Replaces the gradients: at step k, all of them point along one vector and have the norm norms[k]."""

    def __init__(self, norms: list[float]) -> None:
        self.norms = norms

    @hookimpl(tryfirst=True)
    def unscale(self, loop: Loop) -> None:
        size = math.sqrt(sum(g.numel() for g in loop.gradients.tensors()))
        for gradient in loop.gradients.tensors():
            gradient.fill_(self.norms[loop.progress.position] / size)


class Thresholds:
    def __init__(self, clip: Clip) -> None:
        self.clip, self.seen = clip, [clip.threshold]

    @hookimpl
    def after_optimizer_step(self) -> None:
        self.seen.append(self.clip.threshold)


def total(gradients: dict[str, Tensor]) -> float:
    return math.sqrt(sum(g.double().square().sum().item() for g in gradients.values()))


def clipped(clip: Clip, **config: Any) -> Look:
    look = Look()
    toy_loop({"clip": clip, "look": look}, **config).run()
    return look


def still(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that moves nothing, so that gradients depend on the data alone."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


def one_step(model: nn.Module, gradients: list[Tensor], clip: Clip, inputs: Tensor | None = None) -> Look:
    """A step of `clip` on a model whose parameters get the given gradients."""
    look = Look()

    def objective(net: nn.Module, batch: Any) -> Tensor:
        pairs = zip(net.parameters(), gradients, strict=True)
        return sum((p * g).sum() for p, g in pairs).reshape(1)  # type: ignore[union-attr]

    config = LoopConfig(steps=1, batch_size=1)
    Loop(model, still, objective, torch.ones(1, 1), config, {"clip": clip, "look": look}).run()
    return look


def test_known_answer() -> None:
    model = nn.Linear(2, 1, bias=False)
    look = one_step(model, [torch.tensor([[3.0, 4.0]])], Clip(max_norm=1))
    assert total(look.before[0]) == pytest.approx(5)
    torch.testing.assert_close(look.after[0]["weight"], torch.tensor([[0.6, 0.8]]), rtol=1e-7, atol=0)
    assert look.norm == pytest.approx(1)


def test_it_equals_torch_but_for_the_millionth_there() -> None:
    look = clipped(Clip(max_norm=0.05), steps=1)
    parameters = [nn.Parameter(g) for g in look.before[0].values()]
    for parameter, gradient in zip(parameters, look.before[0].values(), strict=True):
        parameter.grad = gradient.clone()
    norm = nn.utils.clip_grad_norm_(parameters, 0.05).item()
    for parameter, gradient in zip(parameters, look.after[0].values(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad * ((norm + 1e-6) / norm), gradient, rtol=1e-6, atol=0)


@given(max_norm=st.floats(1e-3, 10), statistic=st.sampled_from([None, *ADAPTIVE]))
def test_it_never_raises_the_norm_and_keeps_the_direction(max_norm: float, statistic: Any) -> None:
    if statistic is None:
        clip = Clip(max_norm=max_norm)
    else:
        clip = Clip("adaptive", max_norm=max_norm, warmup=2, statistic=statistic, **ADAPTIVE[statistic])
    look = clipped(clip, steps=6)
    for before, after in zip(look.before, look.after, strict=True):
        assert total(after) <= min(total(before), max_norm) * (1 + 1e-6)
        ratio = total(after) / total(before)
        for name in before:
            torch.testing.assert_close(after[name], before[name] * ratio, rtol=1e-5, atol=1e-9)


@given(statistic=st.sampled_from([*ADAPTIVE]), scale=st.floats(1e-6, 1e6))
def test_adaptive_without_bounds_is_scale_free(statistic: Any, scale: float) -> None:
    norms = [1.0, 2.0, 0.5, 1.5, 30.0, 1.0, 3.0, 0.1, 2.5, 2.0]
    looks = []
    for factor in (1.0, scale):
        clip = Clip("adaptive", max_norm=math.inf, warmup=3, statistic=statistic, **ADAPTIVE[statistic])
        look = Look()
        pushed = Push([norm * factor for norm in norms])
        toy_loop({"push": pushed, "clip": clip, "look": look}, optimizers=still, steps=len(norms)).run()
        looks.append(look)
    ones, others = ([total(after) for after in look.after] for look in looks)
    assert [one * scale for one in ones] == pytest.approx(others, rel=1e-4)
    assert sum(one < norm * 0.99 for one, norm in zip(ones, norms, strict=True)) >= 3


class TestAdaptive:
    def run(self, norms: list[float], **options: Any) -> list[float]:
        """The thresholds before each step and after the last, of a run whose gradients have `norms`."""
        seen = Thresholds(Clip("adaptive", **options))
        toy_loop({"push": Push(norms), "clip": seen.clip, "seen": seen}, optimizers=still, steps=len(norms)).run()
        return seen.seen

    def test_the_mean(self) -> None:
        seen = self.run([1.0, 2.0, 4.0], max_norm=100, factor=1.5, decay=0.9, warmup=3)
        assert seen == pytest.approx([100, 100, 100, 1.5 * (0.81 * 1 + 0.9 * 2 + 4) / 2.71], rel=1e-5)

    @pytest.mark.parametrize("percentile", [0, 10, 50, 93.5, 100])
    def test_the_percentile(self, percentile: float) -> None:
        norms = [3.0, 1.0, 2.0, 8.0, 5.0, 6.0]
        seen = self.run(
            norms, max_norm=100, warmup=6, window=5, statistic="percentile", percentile=percentile, factor=1.25
        )
        expected = 1.25 * torch.quantile(torch.tensor(norms[1:]), percentile / 100).item()
        assert seen[-1] == pytest.approx(expected, rel=1e-5)

    def test_mean_and_deviation(self) -> None:
        norms = [3.0, 1.0, 2.0, 8.0, 5.0]
        seen = self.run(norms, max_norm=100, warmup=5, window=4, statistic="zscore", deviations=2)
        assert seen[-1] == pytest.approx(statistics.fmean(norms[1:]) + 2 * statistics.pstdev(norms[1:]), rel=1e-5)

    @pytest.mark.parametrize("statistic", ADAPTIVE)
    def test_a_spike_hardly_raises_it(self, statistic: str) -> None:
        norms = [1.0 + 0.1 * (step % 5) for step in range(40)]
        quiet = self.run(norms, max_norm=math.inf, warmup=20, statistic=statistic)[-1]
        norms[30] = 1e6
        spiked = self.run(norms, max_norm=math.inf, warmup=20, statistic=statistic)[-1]
        assert spiked == pytest.approx(quiet, rel=0.1)

    @pytest.mark.parametrize("statistic", ADAPTIVE)
    def test_it_follows_norms_that_stay_higher(self, statistic: str) -> None:
        norms = [1.0 + 0.1 * (step % 5) for step in range(40)] + [20.0 + step % 5 for step in range(400)]
        assert self.run(norms, max_norm=math.inf, warmup=20, statistic=statistic)[-1] > 20

    @pytest.mark.parametrize("statistic", ADAPTIVE)
    def test_its_bounds_hold(self, statistic: str) -> None:
        norms = [10.0 ** (step % 7 - 3) for step in range(30)]
        seen = self.run(norms, max_norm=2, min_norm=0.5, warmup=1, statistic=statistic)
        assert all(0.5 <= threshold <= 2 for threshold in seen)
        assert len(set(seen)) > 2

    def test_what_is_not_there_yet_is_not_logged(self) -> None:
        told: dict[int, Any] = {}

        class Listen:
            @hookimpl
            def on_log(self, step: int, values: Any) -> None:
                told[step] = values

        clip = Clip("adaptive", max_norm=math.inf, warmup=7)
        toy_loop({"push": Push([3.0] * 15), "clip": clip, "listen": Listen()}, optimizers=still, steps=15).run()
        assert "clip/threshold" not in told[5]
        # of the steps that had one: 2 times the mean
        assert (told[10]["clip/threshold"], told[15]["clip/threshold"]) == pytest.approx((6, 6))
        assert told[5]["clip/share"] == 0

    def test_norms_of_another_statistic_begin_a_new_warm_up(self) -> None:
        one = Clip("adaptive", statistic="zscore", warmup=2)
        one.load_state_dict({"statistic": "mean", "count": 7, "mean": 0.1, "norms": []})
        assert one.threshold == 1
        other = Clip("adaptive", warmup=2, max_norm=10)
        other.load_state_dict({"statistic": "mean", "count": 7, "mean": 0.1, "norms": []})
        assert other.threshold == pytest.approx(2 * 0.1 / (1 - 0.99**7))


def test_values_are_clamped_as_torch_clamps_them() -> None:
    clip = Clip("value", max_value=0.01)
    told: list[dict[str, float]] = []

    class Listen:
        @hookimpl
        def on_log(self, values: dict[str, float]) -> None:
            told.append(values)

    look = Look()
    loop = toy_loop({"clip": clip, "look": look, "listen": Listen()}, steps=5)
    loop.run()
    entries = clamped = 0
    for before, after in zip(look.before, look.after, strict=True):
        assert all(torch.equal(after[name], before[name].clamp(-0.01, 0.01)) for name in before)
    entries = sum(g.numel() for g in look.before[4].values())
    clamped = sum((g.abs() >= 0.01).sum().item() for g in look.before[4].values())
    assert told[-1]["clip/share"] == pytest.approx(clamped / entries)
    assert 0 < clamped < entries
    assert look.norm == pytest.approx(total(look.after[-1]), rel=1e-6)  # the norms are those of what is left


def by_rows(weight: Tensor, gradient: Tensor, factor: float = 0.01, floor: float = 1e-3) -> Tensor:
    """AGC as the paper writes it, one row of a matrix at a time."""
    result = gradient.clone()
    for row in range(len(weight)):
        size = max(weight[row].norm().item(), floor)
        ratio = gradient[row].norm().item() / size
        if ratio > factor:
            result[row] = gradient[row] * (factor / ratio)
    return result


class TestAGC:
    def test_known_answer(self) -> None:
        model = nn.Linear(4, 3, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[2.0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 2.0, 0]]))
        gradient = torch.tensor([[0, 1.0, 0, 0], [0, 0, 0, 1.0], [0.005, 0, 0, 0]])
        after = one_step(model, [gradient], Clip("agc")).after[0]["weight"]
        # 0.01 x 2 of a gradient of 1; weights of zero count for 1e-3; what is below the limit stays.
        torch.testing.assert_close(after, gradient * torch.tensor([[0.02], [1e-5], [1]]), rtol=1e-6, atol=0)

    def test_units_of_every_kind_of_layer(self) -> None:
        torch.manual_seed(0)
        model = nn.ModuleDict(
            {
                "linear": nn.Linear(5, 7),
                "conv": nn.Conv2d(3, 6, 3),
                "grouped": nn.Conv2d(4, 6, 3, groups=2),
                "up": nn.ConvTranspose2d(4, 6, 2),
                "up_grouped": nn.ConvTranspose1d(4, 6, 2, groups=2),
                "norm": nn.GroupNorm(1, 4),
                "embedding": nn.Embedding(5, 3),
            }
        ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        scale = nn.Parameter(torch.tensor(0.5))
        model.register_parameter("scale", scale)
        gradients = [torch.randn_like(p) * 10 ** torch.empty(()).uniform_(-4, 0) for p in model.parameters()]
        look = one_step(model, gradients, Clip("agc"))
        for name, parameter in model.named_parameters():
            weight, gradient = parameter.detach(), look.before[0][name]
            if parameter.ndim < 2:  # one unit
                expected = by_rows(weight.reshape(1, -1), gradient.reshape(1, -1)).reshape(weight.shape)
            elif name == "up.weight":  # in, out, ...
                expected = by_rows(weight.transpose(0, 1), gradient.transpose(0, 1)).transpose(0, 1)
            elif name == "up_grouped.weight":
                halves = zip(weight.chunk(2), gradient.chunk(2), strict=True)
                expected = torch.cat([by_rows(w.transpose(0, 1), g.transpose(0, 1)).transpose(0, 1) for w, g in halves])
            else:
                expected = by_rows(weight, gradient)
            torch.testing.assert_close(look.after[0][name], expected, rtol=1e-5, atol=1e-9, msg=name)

    @given(scale=st.floats(1e-2, 1e4), strength=st.floats(1e-3, 1e3))
    def test_it_is_scale_free_in_weights_and_gradients_together(self, scale: float, strength: float) -> None:
        looks = []
        for factor in (1.0, scale):
            model = toy_model()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(factor)
            torch.manual_seed(1)
            gradients = [torch.randn_like(p) * strength * factor for p in model.parameters()]
            looks.append(one_step(model, gradients, Clip("agc", agc_factor=0.1)))
        for name, one in looks[0].after[0].items():
            torch.testing.assert_close(looks[1].after[0][name], one * scale, rtol=1e-4, atol=0)

    @given(factor=st.floats(1e-4, 10), seed=st.integers(0, 99))
    def test_no_gradient_grows(self, factor: float, seed: int) -> None:
        torch.manual_seed(seed)
        gradients = [torch.randn_like(p) for p in toy_model().parameters()]
        look = one_step(toy_model(), gradients, Clip("agc", agc_factor=factor))
        for name, before in look.before[0].items():
            assert (look.after[0][name].abs() <= before.abs()).all()

    def test_the_norms_are_those_of_what_is_left(self) -> None:
        look = clipped(Clip("agc", agc_factor=1e-3), steps=3)
        assert look.norm == pytest.approx(total(look.after[-1]), rel=1e-6)
        assert total(look.after[-1]) < total(look.before[-1])

    def test_what_is_excluded_stays(self) -> None:
        look = clipped(Clip("agc", agc_factor=1e-3, exclude=("3.*",)), steps=1)
        same = [name for name, before in look.before[0].items() if torch.equal(before, look.after[0][name])]
        assert same == ["3.weight", "3.bias"]

    def test_a_pattern_that_fits_nothing_is_refused(self) -> None:
        with pytest.raises(UserError) as caught:
            toy_loop({"clip": Clip("agc", exclude=("3.wieght",))}).run()
        told = "'3.wieght' fits no trained parameter; did you mean '3.weight'? (the last is '3.bias')"
        assert str(caught.value) == f"plugins.clip.exclude: {told}"

    def test_parameters_without_a_gradient_and_frozen_ones_are_passed_over(self) -> None:
        model = toy_model()
        model.register_parameter("unused", nn.Parameter(torch.ones(3, 3)))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in ("3.bias", "unused"))
        look = clipped(Clip("agc", agc_factor=1e-3), model=model, steps=2)
        assert list(look.after[0]) == ["3.bias"]
        assert total(look.after[0]) < total(look.before[0])

    def test_weights_that_no_optimizer_holds_are_left_alone(self) -> None:
        model = toy_model()
        told: list[float] = []

        class Listen:
            @hookimpl
            def on_log(self, values: Any) -> None:
                told.append(values["clip/share"])

        loop = toy_loop(
            {"clip": Clip("agc", agc_factor=1e-6), "listen": Listen()},
            model=model,
            optimizers=lambda _: torch.optim.SGD([model[0].bias], lr=0.1),
            steps=3,
            log_every=1,
        )
        loop.run()
        assert told == [1.0] * 3  # of one bias
        assert model[3].weight.grad.abs().max() > 1e-3  # neither cleared nor clipped

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_other_precisions(self, dtype: torch.dtype) -> None:
        model = nn.Linear(2, 1).to(dtype)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[2.0, 0.0]]))
        look = one_step(model, [torch.tensor([[0, 1.0]]), torch.zeros(1)], Clip("agc"))
        assert look.after[0]["weight"].dtype == dtype
        assert look.after[0]["weight"][0, 1].item() == pytest.approx(0.02, rel=0.01)


@pytest.mark.parametrize("mode", ["norm", "adaptive", "value", "agc"])
def test_it_adds_no_transfer(mode: Any) -> None:
    counts = []
    for plugins in ({}, {"clip": Clip(mode)}):
        loop = toy_loop(plugins, steps=6, log_every=100)
        with loop, count_transfers() as transfers:
            for _ in loop.steps():
                pass
        counts.append(transfers.count)
    assert counts[0] == counts[1] > 0


def test_the_loss_stays_known_when_the_gradients_change() -> None:
    loop = toy_loop({"clip": Clip("agc"), "look": (look := Look())}, steps=1)
    with loop:
        (step,) = loop.steps()
    assert look.loss == step.loss


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "adaptive", "max_norm": 1, "min_norm": 2}, r"min_norm \(2\) must not be above max_norm \(1\)"),
        ({"warmup": 5}, "'warmup' is an option of mode 'adaptive', not 'norm'"),
        ({"mode": "agc", "max_norm": 2}, "'max_norm' is an option of mode 'norm' or 'adaptive', not 'agc'"),
        ({"mode": "value", "exclude": ("a",)}, "'exclude' is an option of mode 'agc', not 'value'"),
        ({"max_value": 2}, "'max_value' is an option of mode 'value', not 'norm'"),
        ({"statistic": "zscore"}, "'statistic' is an option of mode 'adaptive', not 'norm'"),
        (
            {"mode": "adaptive", "statistic": "zscore", "factor": 3},
            "'factor' is an option of statistic 'mean' or 'percentile', not 'zscore'",
        ),
        ({"mode": "adaptive", "window": 50}, "'window' is an option of statistic 'percentile' or 'zscore', not 'mean'"),
    ],
)
def test_options_that_nothing_reads_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        Clip(**options)
