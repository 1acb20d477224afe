import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from attrs import define
from hypothesis import given, strategies as st
from torch import Tensor, nn

from hookdiff import PASS, Loop, LoopConfig, LossOutput, UserError, hookimpl, load_config
from hookdiff.loop.gradients import Gradients
from hookdiff.testing import toy_loop, toy_model
from hookdiff_clip import AGC, Adaptive, Clip, Norm, Percentile, Rule, Value, ZScore
from tests.conftest import Logged, Push, Restores, added_transfers, refused, still, toy_run

FOLLOWING: list[Callable[..., Rule]] = [
    partial(Adaptive, decay=0.9, factor=0.8),
    partial(Percentile, percentile=40, window=8, factor=0.9),
    partial(ZScore, deviations=0.5, window=8),
]


class Look:
    """Notes gradients before the clipper and after it."""

    def __init__(self) -> None:
        self.before: list[dict[str, Tensor]] = []
        self.after: list[dict[str, Tensor]] = []

    @hookimpl
    def after_backward(self, loop: Loop) -> None:
        self.before.append({name: g.clone() for name, g in loop.gradients.named().items()})

    @hookimpl
    def optimizer_step(self, loop: Loop) -> bool:
        self.after.append({name: g.clone() for name, g in loop.gradients.named().items()})
        self.norm, self.loss = loop.gradients.total_norm, loop.gradients.loss
        return PASS


def total(gradients: dict[str, Tensor]) -> float:
    return math.sqrt(sum(g.double().square().sum().item() for g in gradients.values()))


def clipped(rule: Rule, **config: Any) -> Look:
    look = Look()
    toy_loop({"clip": Clip(rule), "look": look}, **config).run()
    return look


def one_step(model: nn.Module, gradients: list[Tensor], rule: Rule) -> Look:
    """A step with `rule` on a model whose parameters get the given gradients."""
    look = Look()

    def objective(net: nn.Module, batch: Any) -> Tensor:
        pairs = zip(net.parameters(), gradients, strict=True)
        return sum((p * g).sum() for p, g in pairs).reshape(1)  # type: ignore[union-attr]

    config = LoopConfig(steps=1, batch_size=1)
    Loop(model, still, objective, torch.ones(1, 1), config, {"clip": Clip(rule), "look": look}).run()
    return look


def test_known_answer() -> None:
    model = nn.Linear(2, 1, bias=False)
    look = one_step(model, [torch.tensor([[3.0, 4.0]])], Norm(max_norm=1))
    assert total(look.before[0]) == pytest.approx(5)
    torch.testing.assert_close(look.after[0]["weight"], torch.tensor([[0.6, 0.8]]), rtol=1e-7, atol=0)
    assert look.norm == pytest.approx(1)


def test_it_equals_torch_except_for_its_added_1e_6() -> None:
    look = clipped(Norm(max_norm=0.05), steps=1)
    parameters = [nn.Parameter(g) for g in look.before[0].values()]
    for parameter, gradient in zip(parameters, look.before[0].values(), strict=True):
        parameter.grad = gradient.clone()
    norm = nn.utils.clip_grad_norm_(parameters, 0.05).item()
    for parameter, gradient in zip(parameters, look.after[0].values(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad * ((norm + 1e-6) / norm), gradient, rtol=1e-6, atol=0)


@given(max_norm=st.floats(1e-3, 10), kind=st.sampled_from([None, *FOLLOWING]))
def test_it_never_raises_the_norm_and_keeps_the_direction(max_norm: float, kind: Any) -> None:
    look = clipped(kind(max_norm=max_norm, warmup=2) if kind else Norm(max_norm), steps=6)
    for before, after in zip(look.before, look.after, strict=True):
        assert total(after) <= min(total(before), max_norm) * (1 + 1e-6)
        ratio = total(after) / total(before)
        for name in before:
            torch.testing.assert_close(after[name], before[name] * ratio, rtol=1e-5, atol=1e-9)


def run(norms: list[float], rule: Rule) -> list[float]:
    """Return the thresholds before each step and after the last, for gradients with `norms`; inf for none."""
    logged, norms = Logged(), [*norms, 1.0]
    plugins = {"push": Push(norms), "clip": Clip(rule), "logged": logged}
    toy_loop(plugins, optimizers=still, steps=len(norms), log_every=1).run()
    return [values.get("clip/threshold", math.inf) for _, values in logged.calls if "clip/share" in values]


class TestFollowing:
    def test_the_threshold_follows_the_mean(self) -> None:
        seen = run([1.0, 2.0, 4.0], Adaptive(max_norm=100, factor=1.5, decay=0.9, warmup=3))
        assert seen == pytest.approx([100, 100, 100, 1.5 * (0.81 * 1 + 0.9 * 2 + 4) / 2.71], rel=1e-5)

    @pytest.mark.parametrize("percentile", [0, 10, 50, 93.5, 100])
    def test_the_threshold_follows_the_percentile(self, percentile: float) -> None:
        norms = [3.0, 1.0, 2.0, 8.0, 5.0, 6.0]
        seen = run(norms, Percentile(max_norm=100, warmup=6, window=5, percentile=percentile, factor=1.25))
        expected = 1.25 * torch.quantile(torch.tensor(norms[1:]), percentile / 100).item()
        assert seen[-1] == pytest.approx(expected, rel=1e-5)

    def test_the_threshold_follows_mean_and_deviation(self) -> None:
        norms = [3.0, 1.0, 2.0, 8.0, 5.0]
        seen = run(norms, ZScore(max_norm=100, warmup=5, window=4, deviations=2))
        assert seen[-1] == pytest.approx(statistics.fmean(norms[1:]) + 2 * statistics.pstdev(norms[1:]), rel=1e-5)

    @pytest.mark.parametrize("kind", [Adaptive, Percentile, ZScore])
    def test_a_spike_hardly_raises_the_threshold(self, kind: Any) -> None:
        norms = [1.0 + 0.1 * (step % 5) for step in range(40)]
        quiet = run(norms, kind(max_norm=math.inf, warmup=20))[-1]
        norms[30] = 1e6
        assert run(norms, kind(max_norm=math.inf, warmup=20))[-1] == pytest.approx(quiet, rel=0.1)

    @pytest.mark.parametrize("kind", [Adaptive, Percentile, ZScore])
    def test_the_threshold_follows_norms_that_stay_higher(self, kind: Any) -> None:
        norms = [1.0 + 0.1 * (step % 5) for step in range(40)] + [20.0 + step % 5 for step in range(400)]
        assert 20 < run(norms, kind(max_norm=math.inf, warmup=20))[-1] < math.inf

    @pytest.mark.parametrize("kind", [Adaptive, Percentile, ZScore])
    def test_the_threshold_stays_within_its_bounds(self, kind: Any) -> None:
        seen = run([10.0 ** (step % 7 - 3) for step in range(30)], kind(max_norm=2, min_norm=0.5, warmup=1))
        assert all(0.5 <= threshold <= 2 for threshold in seen)
        assert len(set(seen)) > 2

    def test_a_threshold_that_is_not_known_yet_is_not_logged(self) -> None:
        logged, clip = Logged(), Clip(Adaptive(max_norm=math.inf, warmup=7))
        toy_loop({"push": Push([3.0] * 15), "clip": clip, "logged": logged}, optimizers=still, steps=15).run()
        assert logged.of("clip/threshold") == pytest.approx({10: 6, 15: 6})  # the mean of those known, times 2
        assert logged.of("clip/share")[5] == 0

    @pytest.mark.parametrize("kind", [partial(Adaptive, factor=3.0), partial(Percentile, factor=3.0), ZScore])
    def test_the_warm_up_has_a_threshold_of_its_own(self, kind: Any) -> None:
        seen = run([8.0] * 20, kind(max_norm=math.inf, start=2.0, warmup=5))
        assert seen[:5] == [2.0] * 5
        # It follows the norms after clipping, and its ceiling is not that of the warm-up.
        assert seen[5] == pytest.approx(2.0 if kind is ZScore else 6.0, rel=1e-5)
        assert run([0.1] * 20, kind(max_norm=math.inf, min_norm=0.5, start=2.0, warmup=5))[-1] == 0.5
        for wrong, known in ((4.0, 3.0), (0.5, 1.0)):
            with pytest.raises(ValueError, match=rf"start \({wrong:g}\) .* \({known:g}\)"):
                kind(max_norm=3.0, min_norm=1.0, start=wrong)

    def test_the_norms_of_another_rule_begin_a_new_warm_up(self) -> None:
        saved: dict[str, Any] = {}
        for rule, threshold in ((Adaptive, None), (Adaptive, 2.0), (ZScore, 10.0), (Norm, 10.0)):
            clip, logged = Clip(rule(max_norm=10, **({} if rule is Norm else {"warmup": 2}))), Logged()
            plugins = {"push": Push([1.0] * 8), "clip": clip, "logged": logged, "saved": Restores(saved)}
            steps = 5 if threshold else 4
            loop = toy_run(plugins, optimizers=still, steps=steps, log_every=1, resume=bool(threshold))
            if threshold is None:
                saved = loop.state_dict()
            else:
                assert logged.of("clip/threshold")[5] == pytest.approx(threshold)


@given(kind=st.sampled_from(FOLLOWING), scale=st.floats(1e-6, 1e6))
def test_without_bounds_a_threshold_that_follows_is_scale_free(kind: Any, scale: float) -> None:
    norms = [1.0, 2.0, 0.5, 1.5, 30.0, 1.0, 3.0, 0.1, 2.5, 2.0]
    after = []
    for factor in (1.0, scale):
        plugins = {"push": Push([norm * factor for norm in norms]), "clip": Clip(kind(max_norm=math.inf, warmup=3))}
        toy_run({**plugins, "look": (look := Look())}, optimizers=still, steps=len(norms))
        after.append([total(gradients) for gradients in look.after])
    assert [norm * scale for norm in after[0]] == pytest.approx(after[1], rel=1e-4)
    assert sum(clipped < norm * 0.99 for clipped, norm in zip(after[0], norms, strict=True)) >= 3


def test_values_are_clamped_as_torch_clamps_them() -> None:
    logged, look = Logged(), Look()
    toy_loop({"clip": Clip(Value(max_value=0.01)), "look": look, "logged": logged}, steps=5).run()
    for before, after in zip(look.before, look.after, strict=True):
        assert all(torch.equal(after[name], before[name].clamp(-0.01, 0.01)) for name in before)
    entries = sum(g.numel() for g in look.before[4].values())
    clamped = sum((g.abs() >= 0.01).sum().item() for g in look.before[4].values())
    assert logged.of("clip/share") == pytest.approx({5: clamped / entries})
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
        after = one_step(model, [gradient], AGC()).after[0]["weight"]
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
        look = one_step(model, gradients, AGC())
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
        assert look.norm == pytest.approx(total(look.after[0]), rel=1e-6)

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
            looks.append(one_step(model, gradients, AGC(factor=0.1)))
        for name, one in looks[0].after[0].items():
            torch.testing.assert_close(looks[1].after[0][name], one * scale, rtol=1e-4, atol=0)

    def test_what_is_excluded_stays(self) -> None:
        look = clipped(AGC(factor=1e-3, exclude=("3.*",)), steps=1)
        same = [name for name, before in look.before[0].items() if torch.equal(before, look.after[0][name])]
        assert same == ["3.weight", "3.bias"]

    def test_a_pattern_that_fits_nothing_is_refused(self) -> None:
        with refused(UserError, "plugins.clip.rule.exclude", "'3.weight'"):
            toy_run({"clip": Clip(AGC(exclude=("3.wieght",)))})

    def test_parameters_without_a_gradient_and_frozen_ones_are_passed_over(self) -> None:
        model = toy_model()
        model.register_parameter("unused", nn.Parameter(torch.ones(3, 3)))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in ("3.bias", "unused"))
        look = clipped(AGC(factor=1e-3), model=model, steps=2)
        assert list(look.after[0]) == ["3.bias"]
        assert total(look.after[0]) < total(look.before[0])

    def test_weights_without_an_optimizer_are_not_clipped(self) -> None:
        model, logged = toy_model(), Logged()
        plugins, bias = {"clip": Clip(AGC(factor=1e-6)), "logged": logged}, [model[0].bias]
        toy_run(plugins, model=model, optimizers=lambda _: torch.optim.SGD(bias, lr=0.1), steps=3, log_every=1)
        assert logged.of("clip/share") == dict.fromkeys((1, 2, 3), 1.0)  # of one bias
        assert model[3].weight.grad.abs().max() > 1e-3  # neither cleared nor clipped

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_other_precisions(self, dtype: torch.dtype) -> None:
        model = nn.Linear(2, 1).to(dtype)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[2.0, 0.0]]))
        look = one_step(model, [torch.tensor([[0, 1.0]]), torch.zeros(1)], AGC())
        assert look.after[0]["weight"].dtype == dtype
        assert look.after[0]["weight"][0, 1].item() == pytest.approx(0.02, rel=0.01)


@pytest.mark.parametrize("rule", ["norm", "adaptive", "percentile", "zscore", "value", "agc"])
def test_it_adds_no_transfer(rule: str) -> None:
    assert added_transfers({"clip": Clip(rule)}, steps=6, log_every=100) == 0


def test_the_loss_stays_known_when_the_gradients_change() -> None:
    with toy_loop({"clip": Clip(AGC()), "look": (look := Look())}, steps=1) as loop:
        (step,) = loop.steps()
    assert look.loss == step.loss


class Critic:
    """Trains a module of its own with a large gradient."""

    def __init__(self) -> None:
        self.net = nn.Linear(2, 1, bias=False)
        nn.init.ones_(self.net.weight)

    @hookimpl
    def prepare_model(self, loop: Loop) -> None:
        loop.adopt(self, self.net, torch.optim.SGD(self.net.parameters(), lr=1.0))

    @hookimpl(wrapper=True)
    def compute_loss(self) -> Any:
        output = yield
        return LossOutput(output.loss + (self.net.weight * torch.tensor([[3.0, 4.0]])).sum())


@pytest.mark.parametrize(
    ("rule", "expected"),
    [(Norm(max_norm=1.0), [0.6, 0.8]), (Value(max_value=2.0), [2.0, 2.0]), (AGC(factor=1.0), [0.6, 0.8])],
)
def test_a_module_of_a_plugin_is_clipped_on_its_own_and_only_if_it_is_named(rule: Rule, expected: list[float]) -> None:
    if isinstance(rule, AGC):
        expected = [value * math.sqrt(2) for value in expected]  # the norm of the weights
    for names, clipped in (((), [3.0, 4.0]), (("critic",), expected)):
        critic, logged = Critic(), Logged()
        toy_run({"clip": Clip(rule, names), "critic": critic, "logged": logged}, steps=1, log_every=1)
        moved = 1 - critic.net.weight.detach()
        torch.testing.assert_close(moved, torch.tensor([clipped]))
        assert bool(logged.of("clip/critic/0/share")) == bool(names)


def test_a_plugin_without_a_module_of_its_own_cannot_be_named() -> None:
    with refused(UserError, "'critic'"):
        toy_loop({"clip": Clip(adopted=("critic",))}, steps=1).run()


@define
class Halve(Rule):
    """A user-defined rule with a factor that falls from step to step."""

    factor: float = 0.5
    power: int = 0

    def clip_(self, gradients: Gradients, is_logged: bool) -> dict[str, float]:
        self.power += 1
        gradients.scale_(self.factor**self.power)
        return {"share": 1.0}

    def state_dict(self) -> dict[str, Any]:
        return {"power": self.power}


def test_a_rule_may_be_user_defined() -> None:
    rule = Halve(0.25)
    clip = Clip(rule)
    for look in (Look(), Look()):
        toy_run({"clip": clip, "look": look}, steps=3)
        ratios = [total(after) / total(before) for before, after in zip(look.before, look.after, strict=True)]
        assert ratios == pytest.approx([1 / 4, 1 / 16, 1 / 64])
    assert clip.state_dict()["states"]["clip"] == {"power": 3}
    assert rule.power == 0


def test_a_rule_is_recorded_with_all_its_options(write_config: Any) -> None:
    agc = {"use": "agc", "exclude": ["out.*"]}
    user_defined = {"use": f"{__name__}:Halve", "factor": 0.25}
    for rule, defaults in ((user_defined, {"power": 0}), (agc, {"factor": 0.01, "min_weight": 0.001})):
        path = write_config(run={"plugins": ["clip"]}, plugins={"clip": {"rule": rule}})
        assert load_config(path).resolved()["plugins"]["clip"]["rule"] == {**rule, **defaults}
    for settings in (["plugins.clip.rule=norm"], ["plugins.clip.rule.use=norm"]):
        recorded = load_config(path, settings=[*settings, "plugins.clip.rule.max_norm=3"]).resolved()
        assert recorded["plugins"]["clip"]["rule"] == {"use": "norm", "max_norm": 3.0}
