import logging
import math
import statistics
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given, strategies as st
from torch import Tensor, nn

from hookdiff import Batch, Loop, LossOutput, build_loop, hookimpl, load_config
from hookdiff.builtin.logged import Metrics
from hookdiff.log.distribution import Distribution
from hookdiff.loop.saved import restore_state
from hookdiff.testing import toy_loop, toy_model
from hookdiff_clip import Clip, Norm
from hookdiff_debug import Debug
from hookdiff_gradients import GradientMonitor, Numbers, diagnose_gradients, diagnose_nan
from hookdiff_gradients.diagnosis import conclude
from hookdiff_nan import NaN
from tests.conftest import Batches, Logged, Push, acting, still, toy_run, two_ranks, warnings, wide

EXAMPLE = Path(__file__).parents[2] / "examples" / "basic.toml"
LIMITS = GradientMonitor().limits
HEALTHY = Numbers(steps=100, recent=1.0, usual=1.0, depth=0.5, usual_depth=0.5, update=1e-3, growth=1.0)


class Look(Logged):
    """Notes gradients and weights around each update, and what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients: list[dict[str, Tensor]] = []
        self.weights: list[Tensor] = []

    @hookimpl
    def after_backward(self, loop: Loop) -> None:
        self.gradients.append({name: g.clone() for name, g in loop.gradients.named().items()})

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        self.weights.append(torch.cat([p.detach().flatten() for p in loop.model.parameters()]))

    after_optimizer_step = on_start

    def norms(self, name: str | None = None) -> list[float]:
        chosen = [[g for key, g in step.items() if name in (None, key)] for step in self.gradients]
        return [math.sqrt(sum(g.double().square().sum().item() for g in step)) for step in chosen]


def watch(monitor: GradientMonitor | None = None, *others: object, **config: Any) -> tuple[Look, Loop]:
    look = Look()
    plugins = {f"other{index}": other for index, other in enumerate(others)}
    return look, toy_run({"gradients": monitor or GradientMonitor(), "look": look, **plugins}, **config)


def config(*settings: str, plugins: tuple[str, ...] = ()) -> Any:
    """The first example, with a smaller net and fewer steps."""
    small = ["run.steps=60", "run.log_every=10", "run.batch_size=16", "run.device=cpu", "model.channels=8"]
    small += ["model.head_dim=8", *(["plugins.lr.warmup=20"] if "no:lr" not in plugins else [])]
    left_out = ["no:samples", "no:checkpoint", "no:progress"]
    return load_config(EXAMPLE, settings=[*small, *settings], plugins=["gradients", "loss", *left_out, *plugins])


class TestNumbers:
    def test_the_measurements_equal_plain_torch_before_clipping(self) -> None:
        monitor = GradientMonitor(per_tensor=True)
        look, _ = watch(monitor, Clip(Norm(1e-3)), steps=15, log_every=5)
        for step in (5, 10, 15):
            logged, gradients = look.values[step], look.gradients[step - 1]
            entries = torch.cat([g.flatten() for g in gradients.values()]).abs()
            assert logged["gradients/mean"] == pytest.approx(entries.mean().item(), rel=1e-5)
            assert logged["gradients/max"] == entries.max().item()
            assert logged["gradients/min"] == entries.min().item()
            for name in gradients:
                assert logged[f"gradients/norm/{name}"] == pytest.approx(look.norms(name)[step - 1], rel=1e-5)
            totals = look.norms()[:step]
            assert logged["gradients/recent_norm"] == pytest.approx(totals[-1], rel=1e-5)
            assert logged["gradients/usual_norm"] == pytest.approx(statistics.median_low(totals[:-1]), rel=1e-5)
            depths = [a / b for a, b in zip(look.norms("0.weight")[:step], look.norms("3.bias"), strict=False)]
            assert logged["gradients/depth_ratio"] == pytest.approx(depths[-1], rel=1e-5)
            before, after = look.weights[step - 1 : step + 1]
            update, growth = (after - before).norm() / before.norm(), before.norm() / look.weights[0].norm()
            assert logged["gradients/update_ratio"] == pytest.approx(update.item(), rel=1e-4)
            assert logged["gradients/weight_growth"] == pytest.approx(growth.item(), rel=1e-5)
            assert logged["gradients/zero_share"] == logged["gradients/dead_share"] == 0

    def test_growth_is_the_largest_of_any_window_since_the_last_log(self) -> None:
        look, _ = watch(GradientMonitor(window=20), steps=90, log_every=45)
        sizes = [weights.norm().item() for weights in look.weights]
        for step, ends in ((45, [0, 20, 40, 44]), (90, [40, 60, 80, 89])):
            growth = max(sizes[end] / sizes[begin] for begin, end in pairwise(ends))
            assert look.values[step]["gradients/weight_growth"] == pytest.approx(growth, rel=1e-5)

    def test_weights_of_zero_count_as_an_rms_of_0_01(self) -> None:
        model = nn.Linear(4, 4, bias=False)
        nn.init.zeros_(model.weight)
        look, _ = watch(model=model, steps=1, log_every=1)
        assert look.values[1]["gradients/update_ratio"] == pytest.approx(look.weights[1].norm().item() / (0.01 * 4))

    @pytest.mark.parametrize("steps", [3, 33])
    def test_the_history_has_the_last_steps_in_order(self, steps: int) -> None:
        monitor = GradientMonitor(window=20)
        look, _ = watch(monitor, steps=steps)
        history = monitor.history()
        assert list(history) == ["0.weight", "0.bias", "3.weight", "3.bias", "grad_norm"]
        np.testing.assert_allclose(history["grad_norm"], look.norms()[-20:], rtol=1e-5)
        np.testing.assert_allclose(history["0.bias"], look.norms("0.bias")[-20:], rtol=1e-5)

    def test_parameters_without_a_gradient_count_as_zero(self) -> None:
        class Sometimes(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.unused = nn.Parameter(torch.ones(3))
                self.net = toy_model()
                self.even, self.calls = nn.Parameter(torch.ones(4)), 0

            def forward(self, x: Tensor) -> Tensor:
                self.calls += 1
                y: Tensor = self.net(x)
                return y * self.even if self.calls % 2 == 0 else y

        monitor = GradientMonitor()
        look, _ = watch(monitor, model=Sometimes(), steps=6, log_every=1)
        history = monitor.history()
        assert history["unused"].tolist() == [0.0] * 6
        assert [norm > 0 for norm in history["even"]] == [False, True] * 3
        assert look.values[5]["gradients/zero_share"] == pytest.approx(2 / 6)
        np.testing.assert_allclose(history["net.3.bias"], look.norms("net.3.bias"), rtol=1e-5)

    def test_weights_without_an_optimizer_are_not_measured(self) -> None:
        monitor = GradientMonitor()
        watch(monitor, optimizers=lambda model: torch.optim.SGD([model[3].bias], lr=1e-5))
        assert list(monitor.history()) == ["3.bias", "grad_norm"]
        assert monitor.findings == {}

    def test_most_parameters_may_be_frozen(self) -> None:
        model = toy_model()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name == "3.bias")
        monitor = GradientMonitor()
        look, _ = watch(monitor, model=model, optimizers=lambda m: torch.optim.SGD(m[3].parameters(), lr=0.1))
        assert list(monitor.history()) == ["3.bias", "grad_norm"]
        assert look.values[20]["gradients/max"] > 0

    def test_the_history_begins_anew_when_a_parameter_is_thawed(self) -> None:
        def thaw(loop: Loop) -> None:
            loop.model[3].bias.requires_grad_(loop.progress.step >= 4)  # type: ignore[index]

        monitor = GradientMonitor()
        watch(monitor, acting(prepare_model=thaw, before_step=thaw), steps=10)
        history = monitor.history()
        assert list(history)[-2:] == ["3.bias", "grad_norm"]
        assert [norm > 0 for norm in history["3.bias"]] == [True] * 6

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_other_precisions(self, dtype: torch.dtype) -> None:
        objective = lambda net, batch: net(batch.inputs.to(dtype)).float().square().mean(1)  # noqa: E731
        monitor = GradientMonitor(per_tensor=True)
        look, _ = watch(monitor, model=toy_model().to(dtype), objective=objective, steps=5)
        assert monitor.history()["grad_norm"].dtype == (np.float64 if dtype == torch.float64 else np.float32)
        np.testing.assert_allclose(monitor.history()["grad_norm"], look.norms(), rtol=1e-5)
        assert all(math.isfinite(value) for value in look.values[5].values())

    def test_histograms_are_those_of_unclipped_gradients_and_new_weights(self) -> None:
        logged: dict[int, Mapping[str, Distribution]] = {}
        expected: dict[int, Mapping[str, Distribution]] = {}

        def hear(loop: Loop, step: int, distributions: Mapping[str, Distribution]) -> None:
            logged[step] = distributions
            tensors = {f"gradients/{name}": gradient for name, gradient in look.gradients[step - 1].items()}
            tensors |= {f"weights/{name}": weight.detach() for name, weight in loop.model.named_parameters()}
            expected[step] = {name: Distribution.of(tensor) for name, tensor in tensors.items()}

        plugins = {"gradients": GradientMonitor(histograms=2), "clip": Clip(Norm(1e-3)), "look": (look := Look())}
        toy_loop({**plugins, "hears": acting(on_distributions=hear)}, steps=5).run()
        assert list(logged) == [2, 4]
        assert logged == expected


class Scaled:
    """A constant loss scale, as amp has in fp16."""

    @hookimpl
    def micro_step(self, loop: Loop, batch: Batch) -> LossOutput:
        output = loop.hook.compute_loss(loop=loop, batch=batch)
        loop.hook.backward(loop=loop, loss=output.loss * 1024 * len(batch) / batch.total)
        return output.detach()

    @hookimpl
    def unscale(self, loop: Loop) -> bool:
        torch._foreach_mul_(loop.gradients.tensors(), 1 / 1024)
        return True


class TestNoiseScale:
    """For loss_i = w x_i the gradient of a sample is x_i itself, so all values are known."""

    def run(self, data: Tensor, *others: object, **options: Any) -> Look:
        options |= {"model": nn.Linear(data.shape[1], 1, bias=False), "objective": lambda net, batch: net(batch.inputs)}
        monitor = GradientMonitor(noise_decay=options.pop("noise_decay", 0.9))
        look, _ = watch(monitor, *others, data=data, optimizers=still, **options)
        return look

    @pytest.mark.parametrize("others", [(), (Scaled(),)], ids=["plain", "under a loss scale"])
    def test_known_answer(self, others: tuple[object, ...]) -> None:
        # The gradients are (2, 1) of a part of 2 samples and (1, 1) of all 6, in some order of the samples.
        data = torch.tensor([[2.0, 1.0]] * 2 + [[0.5, 1.0]] * 4)
        look = self.run(data, batches := Batches(), *others, steps=1, batch_size=6, micro_batch=2, log_every=1)
        (batch,) = batches.seen
        part, whole = batch.inputs[:2].mean(0).square().sum(), batch.inputs.mean(0).square().sum()
        signal, noise = (6 * whole - 2 * part) / 4, (part - whole) / (1 / 2 - 1 / 6)
        expected = (noise / signal).item() if min(noise, signal) > 0 else 0
        assert look.values[1]["gradients/noise_scale"] == pytest.approx(expected, rel=1e-4)

    @pytest.mark.parametrize("micro_batch", [*wide(4), 5])
    def test_it_finds_the_scale_of_a_known_distribution(self, micro_batch: int) -> None:
        torch.manual_seed(0)
        data = torch.randn(4000, 20) * 0.5 + 0.25  # |G|^2 = 20 / 16, S = 20 / 4: the scale is 4
        steps = {"steps": 400, "batch_size": 18, "micro_batch": micro_batch, "log_every": 1, "noise_decay": 0.995}
        look = self.run(data, **steps)
        truth = (data.var(0).sum() / data.mean(0).square().sum()).item()
        assert look.values[400]["gradients/noise_scale"] == pytest.approx(truth, rel=0.1)
        assert truth == pytest.approx(4, rel=0.05)

    def test_without_micro_batches_there_is_no_noise_scale(self) -> None:
        look = self.run(torch.ones(8, 2), steps=2, log_every=1)
        assert not any("noise" in name for logged in look.values.values() for name in logged)

    def test_a_negative_estimate_is_skipped(self) -> None:
        look = self.run(torch.zeros(8, 2), steps=4, batch_size=4, micro_batch=2, log_every=1)
        assert look.values[4]["gradients/noise_scale"] == 0


RANK = """
import torch
from hookdiff.testing.examples import Distributed
from tests.plugins.test_gradients import TestNoiseScale

torch.manual_seed(0)
data = torch.randn(4000, 20) * 0.5 + 0.25
options = {"steps": 400, "batch_size": 16 if micro_batch else 17, "micro_batch": micro_batch}
options |= {"log_every": 1, "noise_decay": 0.995}
look = TestNoiseScale().run(data, Distributed(), **options)
result = look.values.get(400, {}).get("gradients/noise_scale")
"""


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch", [None, 5])
def test_ranks_are_parts_of_the_batch(micro_batch: int | None, tmp_path: Path) -> None:
    # Without no_sync the gradients of the first micro-batch, too, are averaged over ranks after the backward pass.
    scale, other = two_ranks(f"micro_batch = {micro_batch}\n{RANK}", tmp_path)
    assert other is None  # the first rank has the log
    assert scale == pytest.approx(4, rel=0.12)  # |G|^2 = 20 / 16, S = 20 / 4


class TestDiagnosis:
    @pytest.mark.parametrize(
        ("changed", "cause", "numbers"),
        [
            ({"growth": 3.21}, "rate", "grew to 3.21 times"),
            ({"update": 0.2}, "rate", "by 0.2 of their norm"),
            ({"recent": 30.0}, "exploding", "norm 30 is 30 times the median of the 90 steps before"),
            ({"depth": 1e-7, "usual_depth": 1e-7}, "vanishing", "1.0e-07"),
            ({"recent": 1e-6}, "fading", "norm 1e-06 is 1e-06 times the median of the 90 steps before"),
            ({"dead": 2}, "dead", "last 100 steps"),
            ({"steps": 1, "growth": 3.0, "update": 0.6}, "rate", "grew to 3 times"),  # a bad start, at once
        ],
    )
    def test_each_cause_is_named(self, changed: dict[str, Any], cause: str, numbers: str) -> None:
        ((found, finding),) = diagnose_gradients(evolve(HEALTHY, **changed), LIMITS).items()
        assert (found, finding.severity) == (cause, "warning")
        assert numbers in finding.why
        assert finding.remedy

    @pytest.mark.parametrize(
        "changed",
        [
            {},
            {"update": 0.2, "steps": 19},  # the first updates are large
            {"depth": 1e-7, "usual_depth": 5e-8},  # behind a layer that starts at zero, and growing
            {"depth": 0.0, "usual_depth": 0.0},  # zeros are dead, or the very first step
            {"recent": 0.0, "usual": 0.0},
            {"recent": 9.0},
            {"steps": 19, "recent": 100.0},  # too early
        ],
    )
    def test_healthy_numbers_have_no_finding(self, changed: dict[str, Any]) -> None:
        assert diagnose_gradients(evolve(HEALTHY, **changed), LIMITS) == {}

    @given(
        numbers=st.builds(
            Numbers,
            steps=st.integers(1, 500),
            recent=st.just(0.0) | st.floats(1e-20, 1e6),
            usual=st.just(0.0) | st.floats(1e-20, 1e6),
            depth=st.floats(0, 1e6),
            usual_depth=st.floats(0, 1e6),
            update=st.floats(0, 10),
            growth=st.floats(0, 10),
            dead=st.integers(0, 5),
        ),
        power=st.integers(-20, 20),
    )
    def test_the_scale_of_the_gradients_changes_nothing(self, numbers: Numbers, power: int) -> None:
        scaled = evolve(numbers, recent=numbers.recent * 2.0**power, usual=numbers.usual * 2.0**power)
        assert list(diagnose_gradients(scaled, LIMITS)) == list(diagnose_gradients(numbers, LIMITS))

    @pytest.mark.parametrize(
        ("norms", "loss", "what", "numbers"),
        [
            ([1.0] * 18 + [50.0, 200.0], math.nan, "exploding", "norm 200 in the step before, 200 times"),
            ([1.0] * 20, 0.5, "backward", "loss 0.5"),
            ([1.0] * 20, math.inf, "all at once", "loss inf"),
            ([], math.nan, "first step", "loss nan"),
        ],
    )
    def test_a_nan_is_found_with_its_past(self, norms: list[float], loss: float, what: str, numbers: str) -> None:
        finding = diagnose_nan(norms, loss, 3, 4, LIMITS)
        assert finding.severity == "error"
        assert what in finding.what
        assert numbers in finding.why
        assert "3 of 4" in finding.why


class TestRuns:
    """Real runs: the first warning names the cause, and a healthy run has none."""

    @pytest.mark.parametrize(
        ("settings", "plugins"),
        [((), ("no:lr", "no:clip")), *wide((("run.micro_batch=8", "run.log_every=1", "run.steps=30"), ()))],
    )
    def test_a_healthy_run_is_silent(
        self, settings: Any, plugins: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        loop = build_loop(config(*settings, plugins=plugins), tmp_path / "run")
        assert loop.run() == "done"
        assert warnings(caplog) == []

    @pytest.mark.parametrize("plugins", [(), *wide((("no:lr", "no:clip"),))])
    def test_a_rate_100_times_too_high(self, plugins: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        loop = build_loop(config("optimizer.lr=0.1", "run.steps=30", plugins=plugins), tmp_path / "run")
        loop.run()
        first, *_ = warnings(caplog)
        assert first.partition(": ")[2].startswith("learning rate probably too high")
        assert "the weights grew to " in first or "one update changed the weights by " in first
        assert any(name in first for name in loop.gradients.names)

    def test_a_dead_layer(self, caplog: pytest.LogCaptureFixture) -> None:
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        nn.init.constant_(model[2].bias, -1e3)  # type: ignore[arg-type]
        monitor = GradientMonitor(window=20)
        look, _ = watch(monitor, model=model, steps=60, log_every=10)
        (text,) = warnings(caplog)
        assert text.startswith("step 20: ")
        assert "last 20 steps: 0.weight, 0.bias, 2.weight, 2.bias, 4.weight\n" in text
        assert look.values[60]["gradients/dead_share"] == pytest.approx(5 / 6)
        assert list(monitor.findings) == ["dead"]

    def test_layers_before_one_that_starts_at_zero_are_not_dead(self, caplog: pytest.LogCaptureFixture) -> None:
        model = toy_model()
        nn.init.zeros_(model[3].weight)  # type: ignore[index, arg-type]
        adamw = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)  # noqa: E731
        look, _ = watch(GradientMonitor(window=20), model=model, optimizers=adamw, steps=25, log_every=1)
        assert [look.values[step]["gradients/zero_share"] for step in (1, 3)] == [0.5, 0]
        assert warnings(caplog) == []

    def test_saturated_layers_let_gradients_vanish(self, caplog: pytest.LogCaptureFixture) -> None:
        torch.manual_seed(0)
        middle = [layer for _ in range(14) for layer in (nn.Linear(8, 8), nn.Sigmoid())]
        model = nn.Sequential(nn.Linear(4, 8), *middle, nn.Linear(8, 4))
        monitor, options = GradientMonitor(), {"steps": 40, "log_every": 20}
        watch(monitor, model=model, optimizers=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-4), **options)
        (text,) = warnings(caplog)
        assert list(monitor.findings) == ["vanishing"]
        assert "0.weight" in text

    def pushed(self, norms: list[float], **options: Any) -> GradientMonitor:
        monitor = GradientMonitor(**options)
        watch(monitor, Push(norms), optimizers=still, steps=len(norms), log_every=10)
        return monitor

    def test_gradients_that_explode(self, caplog: pytest.LogCaptureFixture) -> None:
        monitor = self.pushed([1.0] * 40 + [1.5**step for step in range(20)])
        assert (len(warnings(caplog)), list(monitor.findings)) == (1, ["exploding"])
        assert monitor.findings["exploding"].why.endswith(" 0.weight, 3.weight, 0.bias")

    def test_gradients_that_fade(self, caplog: pytest.LogCaptureFixture) -> None:
        monitor = self.pushed([1.0] * 40 + [1e-7] * 10)
        (text,) = warnings(caplog)
        assert text.startswith("step 50: ")
        assert list(monitor.findings) == ["fading"]
        assert "norm 1e-07 is 1e-07 times the median of the 45 steps before" in text

    def test_a_spike_is_not_an_explosion(self, caplog: pytest.LogCaptureFixture) -> None:
        self.pushed([1.0] * 59 + [1e6] + [1.0] * 20)
        assert warnings(caplog) == []

    def test_a_finding_is_reported_once_and_again_when_it_comes_back(self, caplog: pytest.LogCaptureFixture) -> None:
        sick = [1.0] * 18 + [100.0] * 2
        self.pushed([*sick, *sick, *[1.0] * 40, *sick], window=20)
        steps = [line.partition(":")[0] for line in warnings(caplog)]
        assert steps == ["step 20", "step 100"]

    def test_a_nan(self, caplog: pytest.LogCaptureFixture) -> None:
        def spoil(loop: Loop) -> bool:
            if loop.progress.position in (10, 12):
                loop.gradients.named()["0.bias"][1] = math.nan
            return True

        look, _ = watch(None, acting(unscale=spoil, on_nan=lambda: "skip"), steps=15)
        reports = [r.getMessage() for r in caplog.records if "NaN" in r.getMessage()]
        assert len(reports) == 2
        for report in reports:  # a part of the report of the loop, and no message of its own
            assert report.startswith(("step 11 (batch 10)", "step 12 (batch 12)"))
            what, why, *_ = report.partition("\n  gradients: ")[2].splitlines()
            assert "backward" in what
            assert "1 of 4 tensors" in why
            assert why.endswith(" 0.bias")
        assert look.values[15]["gradients/nonfinite_share"] == 0.25

    def test_a_nan_is_reported_once_with_all_notes(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        data = torch.linspace(-1, 1, 160).reshape(40, 4)
        data[11] = math.nan
        plugins = {"metrics": Metrics(), "gradients": GradientMonitor(), "debug": Debug(), "nan": NaN()}
        assert toy_loop(plugins, data=data, run_dir=tmp_path).run() == "on_nan"
        (report,) = warnings(caplog)
        logged = [line.partition(":")[0].strip() for line in report.splitlines()]
        assert logged.index("cause") < logged.index("gradients") < logged.index("replay")
        assert "debug" in logged
        assert "plugin" not in report

    @pytest.mark.parametrize(
        ("norms", "expected"),
        [
            ([1.0] * 50, ["gradients: healthy at 4 of 4 logged steps"]),  # step 10 is too early to say
            ([1.0] * 38 + [100.0] * 2 + [1.0] * 20, ["gradients: exploding gradients at 1 of 5 logged steps"]),
            ([1.0] * 15, []),
        ],
    )
    def test_the_summary(self, norms: list[float], expected: list[str], caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        self.pushed(norms, window=20)
        logged = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
        assert [line for line in logged if line.startswith("gradients: ")] == expected

    def test_the_summary_counts_steps_that_are_not_finite(self) -> None:
        causes = {"dead": 2, "rate": 1}
        assert conclude(3, {}, 1) == "healthy at 3 of 3 logged steps; not finite at 1 step"
        assert conclude(9, causes, 0) == "learning rate too high at 1, dead layers at 2 of 9 logged steps"
        assert conclude(0, {}, 2) == "not finite at 2 steps"


class TestState:
    @pytest.mark.parametrize("window", [20, 25, 100])
    def test_a_window_may_change(self, window: int) -> None:
        monitor, other = GradientMonitor(window=25), GradientMonitor(window=window)
        watch(monitor, steps=30)
        with toy_loop({"gradients": other}):
            restore_state(other, monitor.state_dict())
        num = min(window, 25)
        assert other.history()["3.bias"].tolist() == monitor.history()["3.bias"][-num:].tolist()

    def test_parameters_that_are_trained_may_change(self) -> None:
        monitor = GradientMonitor()
        watch(monitor, steps=3)
        other, model = GradientMonitor(), toy_model()
        model[0].weight.requires_grad_(False)  # type: ignore[index]
        with toy_loop({"gradients": other}, model=model):
            restore_state(other, monitor.state_dict())
        assert other.history()["grad_norm"].shape == (0,)

    def test_a_resumed_run_does_not_repeat_a_finding(self, caplog: pytest.LogCaptureFixture) -> None:
        norms, states = [1.0] * 18 + [100.0] * 12, []
        for steps in (20, 30):
            plugins = {"gradients": (monitor := GradientMonitor(window=20)), "push": Push(norms)}
            with toy_loop(plugins, optimizers=still, steps=steps, log_every=10) as loop:
                if states:
                    restore_state(monitor, states[0])
                    loop.progress.step = loop.progress.position = 20
                for _ in loop.steps():
                    pass
            states.append(monitor.state_dict())
        assert len(warnings(caplog)) == 1
        assert (states[1]["num_diagnoses"], states[1]["found"]) == (2, {"exploding": 1})  # of both parts
