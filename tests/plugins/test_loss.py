import json
import math
import re
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hookdiff import Batch, Feed, Finding, InMemory, Loop, LossOutput, hookimpl
from hookdiff.data import digits
from hookdiff.diffusion import EDM, VP, Diffusion, Flow, Process
from hookdiff.images import feed_of
from hookdiff.loop.saved import restore_state, state_of
from hookdiff.machine.ranks import num_ranks
from hookdiff.testing import ToyObjective, assert_resumes, assert_same, on_ranks, toy_loop
from hookdiff_ema import EMA
from hookdiff_loss import LossMonitor
from hookdiff_loss.held_out import Overfitting, fixed_loss, some_of
from hookdiff_loss.levels import MOST, NoiseLevels, bin_edges
from tests.conftest import Logged, Restores, Still, acting, two_ranks, warnings


class Net(nn.Module):
    """Two layers that see the pixels and the time."""

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        before = torch.get_rng_state()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(65, 128), nn.Linear(128, 64)
        self.between = nn.Sequential(nn.BatchNorm1d(128) if norm else nn.Identity(), nn.SiLU(), nn.Dropout(dropout))
        torch.set_rng_state(before)

    def forward(self, x: Tensor, timesteps: Tensor) -> Tensor:
        features = torch.cat((x.flatten(1), timesteps[:, None] / 1000), 1)
        out: Tensor = self.last(self.between(self.first(features)))
        return out.view_as(x)


class Heard(Logged):
    """Keeps the logged values and the outputs of all steps."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[LossOutput] = []
        self.losses: list[float] = []

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        self.outputs.append(loop.output)
        self.losses.append(loop.gradients.loss)


def adamw(lr: float) -> Any:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=lr, fused=True)


def make(plugin: LossMonitor | None = None, held_out: int = 0, lr: float = 1e-3, **options: Any) -> tuple[Loop, Heard]:
    heard = Heard()
    plugins = {"loss": plugin} if plugin else {}
    loop = toy_loop(
        {**options.pop("before", {}), **plugins, "heard": heard},
        model=options.pop("model", None) or Net(),
        optimizers=adamw(lr),
        objective=options.pop("objective", None) or Diffusion(VP(schedule="cosine")),
        data=feed_of(options.pop("data", None) or InMemory(digits().images[:400]), held_out=held_out),
        **{"batch_size": 32, "log_every": 10, **options},
    )
    return loop, heard


def trained(*arguments: Any, **options: Any) -> tuple[Loop, Heard]:
    """Return a loop that has run, and what was logged."""
    loop, heard = make(*arguments, **options)
    assert loop.run() == "done"
    return loop, heard


# Findings


@pytest.mark.parametrize("lr", [0.1, 1.0])
def test_a_learning_rate_far_too_high_is_the_first_finding(lr: float, caplog: pytest.LogCaptureFixture) -> None:
    trained(LossMonitor(), lr=lr, steps=100, log_every=50, objective=Diffusion("ddpm"))
    texts = warnings(caplog)
    assert all("learning rate probably too high" in text for text in texts)
    assert 1 <= len(texts) <= 2  # again if much worse
    assert f"; learning rate {lr:g}" in texts[0]


@pytest.mark.wide
def test_a_healthy_run_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    trained(LossMonitor(patience=200), held_out=40, steps=500, objective=Diffusion(prediction="v_prediction"))
    assert warnings(caplog) == []


def test_a_loss_that_ran_away_is_reported_with_the_nan(caplog: pytest.LogCaptureFixture) -> None:
    def explode(loop: Loop) -> None:
        for parameter in loop.model.parameters() if loop.progress.step >= 150 else ():
            parameter.data.mul_(1e3 if loop.progress.step < 152 else math.nan)

    loop, _ = make(LossMonitor(), before={"explodes": acting(before_step=explode)}, steps=200)
    assert loop.run() == "on_nan"
    assert warnings(caplog)[0].startswith("step 153: learning rate probably too high")
    assert " of step 150, " in warnings(caplog)[0]
    assert "; learning rate 0.001" in warnings(caplog)[0]
    assert caplog.records[-1].getMessage().startswith("step 153 ")  # the loop's own report


def test_levels_at_which_nothing_is_learned_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    class Half(Net):
        """Predicts 0 where there is more noise than image."""

        def forward(self, x: Tensor, timesteps: Tensor) -> Tensor:
            return super().forward(x, timesteps) * (timesteps < 500).view(-1, 1, 1, 1)

    _, heard = trained(LossMonitor(patience=100), model=Half(), lr=3e-3, steps=250, log_every=25)
    (text,) = warnings(caplog)
    assert "for 100 updates" in text
    below = float(re.findall(r"log-SNR below (-?[\d.]+)", text)[0])
    assert -1 <= below <= 2  # the log-SNR at half the time is 0
    assert heard.values[250]["loss/unlearned"] > 3


# Numbers


def test_the_smoothed_loss_is_logged() -> None:
    _, heard = trained(LossMonitor(decay=0.9), steps=20)
    for step in (10, 20):
        weights = 0.9 ** numpy.arange(step)[::-1]
        mean = numpy.average(heard.losses[:step], weights=weights)
        assert heard.values[step]["loss/smooth"] == pytest.approx(mean)
        deviation = math.sqrt(numpy.average((heard.losses[:step] - mean) ** 2, weights=weights))
        assert heard.values[step]["loss/deviation"] == pytest.approx(deviation)
        assert heard.values[step]["loss/spikes"] == 0


@pytest.mark.parametrize("process", [VP(schedule="cosine"), Flow(), EDM()], ids=["cosine", "flow", "edm"])
@pytest.mark.parametrize("micro_batch", [None, 12])
def test_bins_hold_the_means_of_the_samples_since_the_last_log(process: Process, micro_batch: int | None) -> None:
    times: Any = "log_normal" if process == EDM() else "uniform"
    plugin, diffusion = LossMonitor(), Diffusion(process, weighting="min_snr", times=times)
    _, heard = trained(plugin, objective=diffusion, steps=20, micro_batch=micro_batch)
    edges = [-math.inf, *bin_edges(diffusion, 12), math.inf]
    for last in (10, 20):
        outputs = heard.outputs[last - 10 : last]
        columns = [[getattr(output, name) for output in outputs] for name in ("log_snr", "per_sample", "timesteps")]
        log_snr, error, times = (torch.cat(column) for column in columns)
        floor = diffusion.floor(times, plugin._levels.variance)
        logged = heard.values[last]
        bins = sorted(name for name in logged if name.startswith("loss/snr-"))
        floors = sorted(name for name in logged if name.startswith("loss/floor-"))
        filled = 0
        for k, (low, high) in enumerate(pairwise(edges)):
            here = (log_snr > low) & (log_snr <= high)
            if not here.any():
                assert not any(name.startswith(f"loss/snr-{k:02d}") for name in logged)
                continue
            assert bins[filled].startswith(f"loss/snr-{k:02d}:")
            assert logged[bins[filled]] == pytest.approx(float(error[here].mean()), rel=1e-5)
            # the variance of the data is that of the batches so far
            assert logged[floors[filled]] == pytest.approx(float(floor[here].mean()), rel=0.05)
            filled += 1
        assert filled == len(bins) == len(floors) >= 8
        whole = error.sum() / diffusion.target_variance(times, plugin._levels.variance).sum()
        assert logged["loss/unexplained"] == pytest.approx(float(whole), rel=0.05)


def test_pure_noise_is_in_the_first_bin() -> None:
    diffusion = Diffusion(VP(rescale_betas_zero_snr=True), prediction="v_prediction")
    levels = NoiseLevels(diffusion, [-1.0, 0.0, 1.0], torch.device("cpu"), 100)
    levels.measure(torch.randn(8, 1, 4, 4), 1.0)
    log_snr = torch.tensor([-math.inf, -1.0, -0.5, 1.0, 1.5, 30.0])
    levels.add(log_snr, torch.tensor([1.0, 3.0, 5.0, 7.0, 9.0, 13.0]), torch.tensor([999, 700, 600, 300, 200, 0]))
    values = levels.close(1)
    means = {name: float(pair[0] / pair[1]) for name, pair in values.items() if name.startswith("loss/snr-")}
    assert means == {
        "loss/snr-00:-inf..-1.0": 2.0,
        "loss/snr-01:-1.0..+0.0": 5.0,
        "loss/snr-02:+0.0..+1.0": 7.0,
        "loss/snr-03:+1.0..+inf": 11.0,
    }
    assert list(means) == sorted(means)


@pytest.mark.parametrize("num", [1, 2, 3])
def test_sums_of_each_rank_are_saved_as_they_are(num: int) -> None:
    def add(levels: NoiseLevels, seed: int, length: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        log_snr, error, picture = (torch.randn(length, generator=generator) for _ in range(3))
        levels.measure(picture.view(-1, 1, 1, 1), 1 / num_ranks())
        levels.add(log_snr, error, (error.abs() * 100).long())

    def begun(rank: int) -> NoiseLevels:
        levels = NoiseLevels(Diffusion(VP()), [-1.0, 1.0], torch.device("cpu"), 100)
        for length in (5, 3 if rank else MOST):  # so many that the first rank sums them at once; others wait
            add(levels, rank, length)
        return levels

    def ended(levels: NoiseLevels, rank: int) -> list[float]:
        add(levels, 9, 1 + rank)
        return list(map(float, tree_leaves(levels.close(1))))

    def whole(rank: int) -> tuple[list[float], Any]:
        levels = begun(rank)
        state = deepcopy(state_of(levels))
        return ended(levels, rank), state

    def resumed(rank: int, state: Any) -> list[float]:
        levels = begun(rank)  # as a rollback finds it
        restore_state(levels, state)
        return ended(levels, rank)

    (expected, state), *_ = on_ranks(num, whole)
    assert on_ranks(num, lambda rank: ended(begun(rank), rank))[0] == expected  # a state was not asked for
    assert on_ranks(num, lambda rank: resumed(rank, state))[0] == expected
    counts = [sum(on_ranks(count, lambda rank: resumed(rank, state))[0][1:6:2]) for count in (1, 2, 3)]
    assert [count - counts[0] for count in counts] == [0, 2, 5]  # new samples; none of the saved ones is lost


@pytest.mark.parametrize(
    "diffusion",
    [
        Diffusion("ddpm"),
        Diffusion(VP(schedule="cosine")),
        Diffusion(VP(rescale_betas_zero_snr=True), prediction="sample"),
    ],
)
def test_edges_span_the_process(diffusion: Diffusion) -> None:
    edges = bin_edges(diffusion, 12)
    steps = numpy.diff(edges)
    assert len(edges) == 11
    assert steps.max() - steps.min() < 0.21  # a tenth is rounded at either end
    _, _, log_snr = diffusion.process.rates(torch.arange(1000), 1)
    assert (log_snr < edges[0]).sum() == pytest.approx(10, abs=8)
    assert (log_snr > edges[-1]).sum() == pytest.approx(10, abs=8)
    assert bin_edges(ToyObjective(), 3) == [-10.0, 10.0]


def test_ranges_in_words() -> None:
    levels = NoiseLevels(ToyObjective(), [-2.0, 0.5, 2.0, 4.0], torch.device("cpu"), 100)
    assert levels.ranges([0]) == "log-SNR below -2"
    assert levels.ranges([0, 1, 3]) == "log-SNR below 0.5, 2 to 4"
    assert levels.ranges([2, 3, 4]) == "log-SNR above 0.5"
    assert levels.ranges([0, 1, 2, 3, 4]) == "any noise level"


def test_on_white_noise_the_best_network_is_at_the_floor() -> None:
    class Best(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor, timesteps: Tensor) -> Tensor:
            t = (timesteps / 1000).view(-1, 1, 1, 1)
            return self.one * x * (t - 0.25 * (1 - t)) / (0.25 * (1 - t) ** 2 + t**2)

    data = InMemory(0.5 * torch.randn(512, 1, 8, 8, generator=torch.Generator().manual_seed(0)))
    options: dict[str, Any] = {"objective": Diffusion(Flow(), times="uniform"), "data": data, "lr": 0.0}
    _, heard = trained(LossMonitor(), model=Best(), **options, steps=40, log_every=40)
    logged = heard.values[40]
    for name in [name for name in logged if name.startswith("loss/snr-")]:
        assert logged[name] == pytest.approx(logged[name.replace("snr", "floor")], rel=0.1)
    assert logged["loss/unlearned"] == 0


def test_a_loss_other_than_the_squared_error_has_no_floor() -> None:
    _, heard = trained(LossMonitor(), objective=Diffusion(loss="l1"), steps=10)
    assert any(name.startswith("loss/snr-") for name in heard.values[10])
    assert not any("floor" in name or "un" in name for name in heard.values[10])


def test_a_batch_that_is_skipped_does_not_spoil_the_floor() -> None:
    def spoil(loop: Loop, batch: Batch) -> None:
        if loop.progress.position == 2:
            batch.inputs[0] = math.nan

    spoils = acting(before_step=spoil, on_nan=lambda: "skip")
    loop, heard = trained(LossMonitor(), before={"spoils": spoils}, steps=10)
    assert loop.progress.position == 11
    assert heard.values[10]["loss/unexplained"] > 0
    assert all(math.isfinite(value) for value in heard.values[10].values())


def test_an_objective_without_noise_levels_is_not_split() -> None:
    heard = Heard()
    toy_loop({"loss": LossMonitor(), "heard": heard}, objective=lambda net, batch: net(batch.inputs).square()).run()
    assert heard.values[20].keys() == {"loss", "grad_norm", "loss/smooth", "loss/deviation", "loss/spikes"}


# Held out


def test_the_held_out_loss_has_the_same_noise_each_time() -> None:
    _, heard = trained(LossMonitor(every=4), 50, before={"still": Still()}, steps=10, model=Net(dropout=0.5))
    measured = [logged["val/loss"] for logged in heard.values.values() if "val/loss" in logged]
    assert len(measured) == 3  # at 4, at 8, and at the end
    assert len(set(measured)) == 1


def test_each_held_out_sample_counts_alike_in_a_batch_of_any_size() -> None:
    data = torch.arange(40.0).reshape(10, 4)

    def objective(net: nn.Module, batch: Batch) -> torch.Tensor:
        return batch.inputs.mean(1) + 0 * net(batch.inputs).mean(1)

    with toy_loop(objective=objective, data=data, batch_size=8, steps=1) as loop:
        assert fixed_loss(loop, torch.arange(10)).item() == pytest.approx(data.mean().item())


def test_the_held_out_loss_is_that_of_the_samples_held_out() -> None:
    loop, heard = trained(LossMonitor(every=10), 50, steps=10)
    feed = Feed(digits().images[:400], held_out=50).bind(loop.config.batch_size, loop.config.seed, loop.device)
    (batch,) = feed.unaugmented(loop.feed.held_out_indices, 5000)
    diffusion = Diffusion(VP(schedule="cosine"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        losses = [float(diffusion(loop.model, diffusion.draw(batch, generator)).loss) for _ in range(100)]
    # One measurement has 50 draws of noise, so its error is that of such a mean.
    spread = float(numpy.std(losses))
    assert heard.values[10]["val/loss"] == pytest.approx(numpy.mean(losses), abs=4 * spread)
    gap = heard.values[10]["val/loss"] - heard.values[10]["val/loss_trained"]
    assert heard.values[10]["val/loss_gap"] == pytest.approx(gap, abs=1e-6)
    assert abs(gap) < 3 * spread


def test_the_training_is_the_same_with_held_out_measurements() -> None:
    runs = []
    for plugin in (None, LossMonitor(every=3)):
        loop, _ = trained(plugin, 50, steps=12, model=Net(dropout=0.3, norm=True), micro_batch=8)
        assert all(module.training for module in loop.model.modules())
        runs.append(loop)
    assert_same(runs[0].model.state_dict(), runs[1].model.state_dict())


def test_without_samples_held_out_there_is_nothing_to_measure() -> None:
    _, heard = trained(LossMonitor(every=1), steps=4)
    assert not any("val/loss" in logged for logged in heard.values.values())


def test_the_held_out_loss_of_an_average() -> None:
    def measured(name: str) -> float:
        _, heard = trained(LossMonitor(every=0, weights=name), 50, before={"ema": EMA(decay=0.9)}, steps=10)
        return heard.values[10]["val/loss"]

    assert abs(measured("ema") - measured("model")) > 1e-4


def test_samples_are_spread_evenly() -> None:
    assert some_of(torch.arange(100, 200), 3).tolist() == [100, 150, 199]
    assert some_of(torch.arange(5), 9).tolist() == [0, 1, 2, 3, 4]


def overfit(pairs: list[tuple[float, float]]) -> list[Finding | None]:
    watch, findings = Overfitting(), []
    for step, (held, trained) in enumerate(pairs):
        states = [json.loads(json.dumps(state_of(keeper))) for keeper in (watch, watch.alarms)]
        watch = Overfitting()  # resumed between any two
        for keeper, state in zip((watch, watch.alarms), states, strict=True):
            restore_state(keeper, state)
        findings.append(watch.observe(step, held, trained))
    return findings


def test_overfitting_is_found_when_held_out_rises_while_train_falls() -> None:
    curve = [(1.0, 1.0), (0.5, 0.5), (0.52, 0.45), (0.53, 0.4), (0.54, 0.35), (0.55, 0.3), (0.7, 0.1), (0.75, 0.1)]
    findings = {step: finding for step, finding in enumerate(overfit(curve)) if finding}
    assert list(findings) == [4, 6]
    assert findings[4].severity == "warning"
    assert "step 1" in findings[4].what
    assert re.findall(r"[\d.]+\d", findings[4].why) == ["0.5", "0.54", "0.5", "0.35"]


def test_other_curves_are_not_overfitting() -> None:
    assert overfit([(0.5, 0.5), *[(0.6, 0.6)] * 9]) == [None] * 10  # both rise
    assert overfit([(0.5, 0.5), *[(0.51, 0.3)] * 9]) == [None] * 10  # hardly
    short = [(0.5, 0.5), (0.6, 0.4), (0.6, 0.4), (0.49, 0.3), (0.6, 0.2), (0.6, 0.2)]
    assert overfit(short) == [None] * 6


# Resume, ranks, config


def test_a_resumed_run_is_the_run_that_was_never_stopped() -> None:
    data, objective = Feed(InMemory(digits().images[:400]), held_out=50), Diffusion(VP(schedule="cosine"))
    options: dict[str, Any] = {"model": Net(), "objective": objective, "data": data, "batch_size": 32, "log_every": 10}
    assert_resumes(lambda: LossMonitor(every=5, window=20, plateau=0), at=(3, 10, 14), steps=24, **options)


def test_the_number_of_bins_may_change_on_resume() -> None:
    first = Restores(at=7)
    trained(LossMonitor(), before={"restores": first}, steps=7)
    _, heard = trained(LossMonitor(bins=20), before={"restores": Restores(first.state)}, steps=20)
    assert any(name.startswith("loss/snr-15:") for name in heard.values[20])


def measured_still() -> tuple[dict[str, float], int]:
    """Return the values that a run without an update logs, and the number of samples that it saw."""
    _, heard = trained(LossMonitor(every=10), 50, before={"still": Still()}, steps=10)
    values = {name: value for name, value in heard.values.get(10, {}).items() if "snr" in name or "val" in name}
    return values, sum(len(output.per_sample) for output in heard.outputs if output.per_sample is not None)


@pytest.mark.wide
def test_ranks_sum_their_samples(tmp_path: Path) -> None:
    code = "from tests.plugins.test_loss import measured_still\nresult = measured_still()"
    (values, own), (others, its) = two_ranks(code, tmp_path)
    assert others == {}  # the first rank has the log
    assert own == its == 160  # each saw its own share
    assert values == pytest.approx(measured_still()[0], rel=1e-4)


def test_a_plateau_needs_ten_windows() -> None:
    with pytest.raises(ValueError, match=r"plateau \(500\) must be at least 10 times window \(100\), or 0"):
        LossMonitor(plateau=500)


def test_the_variance_is_that_of_standardised_data() -> None:
    # The variance is that of the data as the process has it, also where the config standardises.
    images = torch.rand(400, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    plugin = LossMonitor()
    trained(plugin, data=InMemory(images), objective=Diffusion(data_std=0.25, data_mean=0.1), steps=12)
    expected = float(images.var(correction=0)) / 0.25**2
    assert float(plugin._levels.variance) == pytest.approx(expected, rel=0.02)
