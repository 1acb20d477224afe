"""The plugin `debug`: its warnings, and that it changes nothing."""

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from hookdiff import Batch
from hookdiff.diffusion import EDM, VP, Diffusion, EDMPrediction, Flow
from hookdiff.loop.saved import restore_state, state_of
from hookdiff.testing import CountTransfers, assert_same, toy_loop, toy_model, weights
from hookdiff_debug import Debug
from hookdiff_debug.checks import check_inputs
from hookdiff_debug.measure import measure_inputs, measure_layers, measure_outputs, untouched
from hookdiff_debug.trial import Trial
from hookdiff_networks import DiT, UNet
from tests.conftest import Logged, acting, toy_run, warnings
from tests.plugins.test_compile import Counter, Net

PICTURES = torch.rand(64, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1


def judged(inputs, **options):
    return check_inputs(measure_inputs(inputs), **options)


def test_the_numbers_of_a_batch():
    batch = torch.tensor([[[0.0, 1.0]], [[-1.0, 4.0]], [[2.0, 2.0]]])  # 3 images, 1 channel of 2 values
    found = measure_inputs(batch, Diffusion(data_mean=-0.5, data_std=0.5))
    values = torch.tensor([0, 1, -1, 4, 2, 2]).double()
    assert (found.num, found.low, found.high) == (3, -1, 4)
    assert found.mean == pytest.approx(float(values.mean()))
    assert found.std == pytest.approx(float(values.std(correction=0)))
    assert found.scaled_mean == pytest.approx(float(values.mean()) * 2 + 1)
    assert found.scaled_std == pytest.approx(float(values.std(correction=0)) * 2)
    assert (found.constant, found.same, found.nonfinite, found.channels) == (pytest.approx(1 / 3), 0, 0, ())


def test_a_nan_does_not_hide_the_other_numbers():
    batch = PICTURES.clone()
    batch[0, 0, 0, 0], batch[1] = math.nan, math.inf
    found = measure_inputs(batch)
    clean = torch.cat([PICTURES.flatten()[1:64], PICTURES.flatten()[128:]])
    assert found.nonfinite == pytest.approx(65 / (64 * 64))
    assert (found.low, found.high) == (float(clean.min()), float(clean.max()))
    assert found.mean == pytest.approx(float(clean.mean()), abs=1e-6)
    assert found.std == pytest.approx(float(clean.std(correction=0)), rel=1e-5)


def test_the_steps_of_a_trial_are_counted_from_one():
    assert Trial(3, measure_inputs(PICTURES), losses=[1.0, math.inf, math.nan]).first_bad == 2


@pytest.mark.parametrize(
    ("inputs", "severity", "numbers"),
    [
        (PICTURES, "ok", "from -1 to 1"),
        ((PICTURES + 1) * 127.5, "error", "[0, 255]"),
        ((PICTURES + 1) / 2, "error", "[0, 1]"),
        (PICTURES * 30, "error", "from -30 to 30"),
        (PICTURES * 2, "warning", "from -2 to 2"),
        (PICTURES[:, :, :1, :1].expand(-1, -1, 8, 8), "error", "constant"),
        (torch.where(PICTURES > 0.99, math.nan, PICTURES), "error", f"{100 * (PICTURES > 0.99).float().mean():.3g}%"),
        (PICTURES / 50 + 0.9, "warning", "mean 0.9"),
        (torch.cat([PICTURES, torch.ones_like(PICTURES)], 1), "warning", "channel 1"),
        (PICTURES[:1].expand(8, -1, -1, -1), "warning", "100%"),
    ],
)
def test_inputs_are_judged(inputs, severity, numbers):
    found = judged(inputs)
    assert found.severity == severity
    assert numbers in str(found)
    assert bool(found.remedy) == (severity != "ok")


@given(scale=st.floats(0.3, 1), shift=st.floats(-0.5, 0.5))
def test_images_that_use_much_of_the_range_cause_no_warning(scale, shift):
    assert judged(PICTURES * scale + shift * (1 - scale)).severity == "ok"


def test_latents_of_any_range_are_fine_once_they_are_standardised():
    latents = (PICTURES - PICTURES.mean()) * 9 + 3
    for std, severity in ((5.2, "ok"), (1.0, "warning")):
        diffusion = Diffusion(VP(schedule="cosine"), data_mean=3.0, data_std=std)
        found = check_inputs(measure_inputs(latents, diffusion), standardised=True)
        assert found.severity == severity
    assert "data_mean = 3 " in found.remedy
    assert "data_std = 5.2" in found.remedy


def test_sigma_data_far_from_the_data_is_named_with_the_right_one():
    found = judged(PICTURES / 5, sigma_data=0.5)
    assert found.severity == "warning"
    assert f"sigma_data = {PICTURES.std() / 5:.2g} " in found.remedy


def test_the_first_step_names_pixels_in_0_to_255_and_the_way_out(caplog):
    toy_loop({"debug": Debug()}, data=torch.linspace(0, 255, 160).reshape(40, 4), batch_size=40).run()
    (said,) = warnings(caplog)  # once, and nothing that follows from it
    first, numbers, remedy = said.splitlines()
    assert first.startswith("step 1: ")
    assert "[0, 255]" in first
    assert "from 0 to 255" in numbers
    assert "image / 127.5 - 1" in remedy


def test_a_nan_in_the_data_is_named_once_in_the_report(caplog):
    data = torch.linspace(-1, 1, 160).reshape(40, 4)
    data[11] = math.nan
    loop = toy_loop({"debug": Debug(every=0)}, data=data)
    assert loop.run() == "on_nan"
    (said,) = warnings(caplog)
    assert said.startswith("step 4 (batch 3) is not finite: loss nan")
    assert "debug: inputs not finite" in said
    assert "12.5%" in said


class Dead(nn.Module):
    """A net with a branch whose ReLU is off for all inputs."""

    def __init__(self):
        super().__init__()
        self.main = toy_model()
        self.side, self.out, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(2, 2)
        nn.init.constant_(self.side.bias, -100.0)

    def forward(self, x):
        return self.main(x) + self.out(self.side(x).relu())


def test_a_dead_layer_is_named_after_two_measurements_without_a_gradient(caplog):
    loop = toy_run({"debug": Debug()}, model=Dead(), steps=40)
    (said,) = [text for text in warnings(caplog) if "side" in text]
    assert said.startswith("step 16: dead layers")
    assert "1 of 5: side" in said
    assert not any("main" in text for text in warnings(caplog))
    assert state_of(loop.plugins["debug"])["alarms"]["gradients"][0] == "error"


def test_a_layer_that_is_not_called_is_named(caplog):
    model = Dead()
    nn.init.zeros_(model.side.bias)
    loop = toy_run({"debug": Debug()}, model=model, steps=40)
    (said,) = warnings(caplog)
    assert said.startswith("step 8: ")
    assert "1 of 5 layers: unused" in said
    assert state_of(loop.plugins["debug"])["alarms"]["gradients"][0] == "warning"


def test_a_finding_that_comes_back_is_reported_again(caplog):
    scales = acting(before_step=lambda loop, batch: batch.inputs.mul_(255 if loop.progress.step in (2, 3, 7) else 1))
    plugins = {"scales": scales, "debug": Debug(every=1)}
    toy_loop(plugins, data=torch.rand(40, 4) * 2 - 1, steps=9, batch_size=40).run()
    assert [line.split(":")[0] for line in warnings(caplog) if "inputs" in line] == ["step 3", "step 8"]


@pytest.mark.parametrize("net", [UNet(channels=8, num_res_blocks=1, head_dim=8), DiT(hidden_size=32, depth=2)])
@pytest.mark.parametrize(
    "objective",
    [Diffusion(VP(schedule="cosine")), Diffusion(Flow()), Diffusion(EDM(), EDMPrediction(sigma_data=0.6))],
    ids=["cosine", "flow", "edm"],
)
def test_real_networks_that_start_at_zero_cause_no_warning(net, objective, caplog):
    net.reset_parameters() if isinstance(net, UNet) else None
    logged = Logged()
    plugins = {"debug": Debug(every=10, num=16), "logged": logged}
    toy_loop(plugins, model=net, objective=objective, data=PICTURES, steps=20, batch_size=16).run()
    assert warnings(caplog) == []
    assert list(logged.of("debug/input_std")) == [1, 2, 4, 8, 10, 16, 20]
    assert 0 < logged.of("debug/by_image")[20] < 3
    assert 0 < logged.of("debug/by_time")[20] < 3
    assert logged.of("debug/silent_layers")[20] == 0


class Disturbing(nn.Module):
    """Draws random numbers, counts its calls in a buffer and behaves differently in training."""

    def __init__(self):
        super().__init__()
        self.net = toy_model(dropout=0.5)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("size", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.size = self.size + len(x)
        return self.norm(self.net(x)) + torch.rand(()) * 0


def test_a_measurement_changes_nothing():
    runs = []
    for plugins in ({}, {"debug": Debug(every=1)}):
        torch.manual_seed(3)
        model = Disturbing()
        loop = toy_run(plugins, model=model, micro_batch=3, data=torch.rand(40, 4) * 2 - 1)
        assert all(module.training for module in model.modules())
        runs.append((weights(loop), torch.rand(3)))
    assert_same(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])


def test_a_compiled_network_is_not_compiled_again():
    counters = Counter(), Counter()
    for counter, plugins in zip(counters, ({}, {"debug": Debug(every=1)}), strict=True):
        torch.compiler.reset()
        model = Net(*toy_model())
        model.compile(backend=counter, dynamic=False)
        toy_run(plugins, model=model, steps=3)
    assert counters[0].graphs == counters[1].graphs > 0


def test_only_measured_steps_have_transfers():
    counts = []
    for plugins in ({"debug": Debug(every=0)}, {}):
        with toy_loop(plugins, log_every=1000) as loop:
            counts.append([])
            steps = loop.steps()
            for _ in range(12):
                with CountTransfers() as transfers:
                    next(steps)
                counts[-1].append(transfers.count)
    more = [with_it - without for with_it, without in zip(*counts, strict=True)]
    assert [step + 1 for step, count in enumerate(more) if count] == [1, 2, 4, 8]
    assert max(more) <= 3


def test_an_output_that_ignores_an_input_is_measured():
    class Deaf(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x, t):
            return x * self.weight

    loop = toy_loop(model=Deaf(), objective=Diffusion(VP(schedule="cosine")), data=PICTURES)
    with loop:
        batch = loop.objective.draw(Batch(PICTURES), torch.Generator().manual_seed(0))
        with untouched(loop):
            found = measure_outputs(loop, batch)
        alpha, sigma, _ = loop.objective.process.rates(batch.draws["timesteps"], 4)
        x = alpha * PICTURES + sigma * batch.draws["noise"]
        assert found.std == pytest.approx(float(x.std(correction=0)), rel=1e-5)
        other = (x.roll(1, 0) - x).square().mean().sqrt() / x.square().mean().sqrt()
        assert found.by_image == pytest.approx(float(other), rel=1e-5)
        assert found.by_time == 0
        assert math.isnan(found.by_label)


def test_layers_have_the_norms_of_their_parameters_together():
    loop = toy_run(steps=1)
    linear = loop.model[3]
    expected = torch.cat([linear.weight.grad.flatten(), linear.bias.grad]).norm()
    found = measure_layers(loop)["3"]
    assert found.norm == pytest.approx(float(expected), rel=1e-6)
    assert (found.size, set(measure_layers(loop))) == (36, {"0", "3"})


def test_a_resumed_run_does_not_report_it_again(caplog):
    data = (torch.rand(40, 4) * 255).round()
    first = toy_run({"debug": Debug(every=1)}, data=data, steps=3)
    assert any("inputs" in line for line in warnings(caplog))
    caplog.clear()
    again = Debug(every=1)
    restore_state(again, state_of(first.plugins["debug"]))
    toy_loop({"debug": again}, data=data, steps=3).run()
    assert not any("inputs" in line for line in warnings(caplog))
