from __future__ import annotations

from itertools import product
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hookdiff.data.batch import Batch
from hookdiff.diffusion import (
    LOSSES,
    PREDICTION_TYPES,
    SCHEDULES,
    TIMES,
    WEIGHTINGS,
    Diffusion,
    loss_weights,
    make_schedule,
)

# All schedules with all predictions that they can be read with
PAIRS = [pair for pair in product(SCHEDULES, PREDICTION_TYPES) if pair != ("flow", "epsilon")]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(num: int = 8) -> Batch:
    return Batch(torch.rand(num, 3, 4, 4, generator=seeded(1)) * 2 - 1)


def labelled(num: int = 8) -> Batch:
    return attrs.evolve(images(num), labels=torch.arange(num) % 10)


class Net(nn.Module):
    """A convolution that remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor, timesteps: Tensor, labels: Tensor | None = None) -> Tensor:
        self.seen = x.detach(), timesteps
        self.labels = labels
        output: Tensor = self.conv(x)
        return output


def by_hand(schedule: str, prediction_type: str, x0: Tensor, noise: Tensor, times: Tensor) -> tuple[Tensor, ...]:
    """What the network is shown and told, its target, and the log-SNR."""
    times = times.view(-1, 1, 1, 1)
    if schedule == "flow":
        alpha, sigma, told = 1 - times, times, 1000 * times
    elif schedule == "edm":
        alpha, sigma, told = torch.ones_like(times), times, 250 * times.log()
    else:
        remaining = (1 - make_schedule(schedule, 100).betas).cumprod(0)[times]
        alpha, sigma, told = remaining.sqrt().float(), (1 - remaining).sqrt().float(), times
    x_t = alpha * x0 + sigma * noise
    shown = x_t
    if prediction_type == "edm":
        ratio, x = sigma / alpha, x_t / alpha
        shown = x / (ratio**2 + 0.25).sqrt()
        target = (x0 - 0.25 / (ratio**2 + 0.25) * x) / (0.5 * ratio / (ratio**2 + 0.25).sqrt())
    else:
        target = {
            "epsilon": noise,
            "sample": x0,
            "v_prediction": alpha * noise - sigma * x0,
            "flow_prediction": noise - x0,
        }[prediction_type]
    return shown, told.flatten(), target, 2 * (alpha / sigma).log().flatten()


@pytest.mark.parametrize(("schedule", "prediction_type"), PAIRS)
def test_loss_is_that_of_a_few_lines_of_torch(schedule: str, prediction_type: str) -> None:
    timesteps: dict[str, Any] = {} if schedule in ("flow", "edm") else {"timesteps": 100}
    diffusion = Diffusion(schedule=schedule, prediction_type=prediction_type, **timesteps)
    net, batch = Net(), diffusion.draw(images(), seeded())
    noise, times = batch.draws["noise"], batch.draws["timesteps"]
    shown, told, target, log_snr = by_hand(schedule, prediction_type, batch.inputs, noise, times)
    expected = nn.functional.mse_loss(net(shown, told), target)

    output = diffusion(net, batch)
    assert net.labels is None
    torch.testing.assert_close(net.seen[0], shown, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(net.seen[1], told)  # and their dtype
    torch.testing.assert_close(output.loss, expected, rtol=1e-4, atol=1e-5)
    assert output.per_sample is not None
    assert output.log_snr is not None
    assert output.loss.requires_grad
    assert not output.per_sample.requires_grad
    assert output.per_sample.shape == output.log_snr.shape == (8,)
    torch.testing.assert_close(output.per_sample.mean(), expected.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(output.log_snr, log_snr.float(), rtol=1e-4, atol=1e-3)
    assert output.timesteps is times


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("loss", LOSSES)
def test_weights_and_errors(weighting: str, loss: str) -> None:
    options: dict[str, Any] = {"huber_delta": 0.3} if loss == "huber" else {}
    diffusion = Diffusion(prediction_type="v_prediction", weighting=weighting, loss=loss, **options)
    net, batch = Net(), diffusion.draw(images(), seeded())
    noise, times = batch.draws["noise"], batch.draws["timesteps"]
    alpha, sigma, _ = diffusion.process.rates(times, 4)
    error = net(alpha * batch.inputs + sigma * noise, times) - (alpha * noise - sigma * batch.inputs)
    size = error.abs()
    of_pixel = {"mse": error**2, "l1": size, "huber": torch.where(size < 0.3, error**2 / 2, 0.3 * (size - 0.15))}[loss]
    per_sample = of_pixel.flatten(1).mean(1)
    weights = loss_weights(
        weighting, diffusion.parametrization, alpha.flatten(), sigma.flatten(),
        snr_gamma=5.0, p2_k=1.0, p2_gamma=1.0, sigma_data=0.5,
    )  # fmt: skip
    output = diffusion(net, batch)
    torch.testing.assert_close(output.loss, (weights * per_sample).mean())
    assert output.per_sample is not None
    torch.testing.assert_close(output.per_sample, per_sample.detach())  # without the weights
    output.loss.backward()
    assert net.conv.weight.grad is not None
    assert net.conv.weight.grad.isfinite().all()


def test_options_of_the_weightings_reach_them() -> None:
    alpha, sigma = torch.tensor([0.9]), torch.tensor([0.435889894])  # a SNR of 4.263
    snr = float((alpha / sigma) ** 2)
    assert float(Diffusion(weighting="min_snr", snr_gamma=2.0).weights(alpha, sigma)) == pytest.approx(2 / snr)
    p2 = Diffusion(weighting="p2", p2_k=2.0, p2_gamma=0.5)
    assert float(p2.weights(alpha, sigma)) == pytest.approx((2 + snr) ** -0.5)
    edm = Diffusion(schedule="edm", weighting="edm", prediction_type="sample", sigma_data=0.25)
    expected = (0.3**2 + 0.25**2) / (0.3 * 0.25) ** 2
    assert float(edm.weights(torch.ones(1), torch.tensor([0.3]))) == pytest.approx(expected)


def test_draw() -> None:
    batch = attrs.evolve(images(4000), draws={"flip": torch.ones(4000)})
    batch = Diffusion(timesteps=10).draw(batch, seeded())
    noise, timesteps = batch.draws["noise"], batch.draws["timesteps"]
    assert noise.shape == batch.inputs.shape
    assert noise.dtype == torch.float32
    assert float(noise.mean()) == pytest.approx(0, abs=0.01)
    assert float(noise.std()) == pytest.approx(1, abs=0.01)
    assert timesteps.dtype == torch.int64
    assert timesteps.bincount().tolist() == pytest.approx([400] * 10, abs=80)
    assert "flip" in batch.draws  # what others drew stays
    assert "labels" not in batch.draws
    assert Diffusion(schedule="flow").draw(images(), seeded()).draws["timesteps"].dtype == torch.float32


@pytest.mark.parametrize("options", [{}, {"conditional": True}, {"schedule": "edm", "stratified": True}])
def test_draw_depends_on_the_generator_alone(options: dict[str, Any]) -> None:
    diffusion = Diffusion(**options)
    torch.manual_seed(1)
    first = diffusion.draw(labelled(), seeded(3)).draws
    torch.manual_seed(2)
    torch.set_default_dtype(torch.float64)
    try:
        second = diffusion.draw(labelled(), seeded(3)).draws
    finally:
        torch.set_default_dtype(torch.float32)
    assert first.keys() == second.keys()
    for name, drawn in first.items():
        assert torch.equal(drawn, second[name])
        assert drawn.dtype == second[name].dtype


def test_labels_are_told_and_some_left_out() -> None:
    net, diffusion = Net(), Diffusion(conditional=True, label_dropout=0.2)
    batch = labelled(5000)
    drawn = diffusion.draw(batch, seeded()).draws["labels"]
    left_out = drawn == -1
    assert float(left_out.float().mean()) == pytest.approx(0.2, abs=0.025)  # four standard deviations
    assert batch.labels is not None
    assert torch.equal(drawn[~left_out], batch.labels[~left_out])
    assert drawn.dtype == torch.int64
    for label in range(10):  # whatever the label
        assert float(left_out[batch.labels == label].float().mean()) == pytest.approx(0.2, abs=0.08)

    small = diffusion.draw(labelled(), seeded(1))
    diffusion(net, small)
    assert net.labels is small.draws["labels"]
    unchanged = labelled().labels
    assert unchanged is not None
    for share, expected in ((0.0, unchanged), (1.0, torch.full((8,), -1))):
        drawn = Diffusion(conditional=True, label_dropout=share).draw(labelled(), seeded()).draws["labels"]
        assert torch.equal(drawn, expected)
    Diffusion(conditional=False)(net, Diffusion().draw(labelled(), seeded()))
    assert net.labels is None


def test_conditional_without_labels_is_an_error() -> None:
    with pytest.raises(ValueError, match="conditional, but the data has no labels"):
        Diffusion(conditional=True).draw(images(), seeded())


@pytest.mark.parametrize(
    "options",
    [{}, {"conditional": True, "weighting": "min_snr"}, {"schedule": "flow", "data_mean": 0.1, "data_std": 0.4}],
)
def test_micro_batches_add_up_to_the_batch(options: dict[str, Any]) -> None:
    diffusion, net = Diffusion(**options), Net()
    batch = diffusion.draw(labelled(), seeded())
    diffusion(net, batch).loss.backward()
    assert net.conv.weight.grad is not None
    whole, net.conv.weight.grad = net.conv.weight.grad, None
    for rows in (slice(0, 5), slice(5, 8)):
        part = batch[rows]
        (diffusion(net, part).loss * len(part) / part.total).backward()
    torch.testing.assert_close(net.conv.weight.grad, whole)


@pytest.mark.parametrize("options", [{}, {"schedule": "edm"}, {"prediction_type": "edm", "data_std": 0.5}])
def test_autocast_touches_only_the_network(options: dict[str, Any]) -> None:
    diffusion, net = Diffusion(**options), Net()
    batch = diffusion.draw(images(), seeded())
    if "schedule" not in options:
        batch = attrs.evolve(batch, draws={**batch.draws, "timesteps": torch.full((8,), 999)})
    plain = diffusion(net, batch)
    x_t, told = net.seen
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = diffusion(net, batch)
        assert net(*net.seen).dtype == torch.bfloat16
    seen, timesteps = net.seen
    assert torch.equal(seen, x_t)  # float32, to the bit
    assert seen.dtype == output.loss.dtype == torch.float32
    assert torch.equal(timesteps, told)
    assert timesteps.dtype == told.dtype
    if "schedule" not in options:
        assert timesteps.dtype == torch.int64
        assert timesteps.tolist() == [999] * 8
        assert timesteps.bfloat16().tolist() == [1000] * 8  # the trap
    torch.testing.assert_close(output.loss, plain.loss, rtol=1e-2, atol=0)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_network_may_answer_in_bfloat16(loss: str) -> None:
    """Its answer is rounded; the error is not."""
    diffusion, net = Diffusion(loss=loss), Net()
    batch = diffusion.draw(images(), seeded())
    output = diffusion(lambda x, t: net(x, t).bfloat16(), batch)
    expected = diffusion(lambda x, t: net(x, t).bfloat16().float(), batch)
    assert output.loss.dtype == torch.float32
    assert torch.equal(output.loss, expected.loss)
    output.loss.backward()
    assert net.conv.weight.grad is not None
    assert net.conv.weight.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("schedule", "prediction_type", "s", "floor"),
    [
        ("linear", "epsilon", 1.0, 0.275513233397),
        ("linear", "epsilon", 0.5, 0.173053406084),
        ("linear", "v_prediction", 0.5, 0.379790054563),
        ("linear", "v_prediction", 1.0, 1.0),
        ("linear", "sample", 1.0, 0.724486766603),
        ("flow", "flow_prediction", 0.5, 0.785398163397),
        ("flow", "flow_prediction", 1.0, 1.57079632679),
        ("flow", "flow_prediction", 2.0, 3.14159265359),
    ],
)
def test_loss_floor_of_gaussian_data(
    gaussian: type, schedule: str, prediction_type: str, s: float, floor: float
) -> None:
    """The best possible network on N(2, s²) data reaches the floor and no less."""
    diffusion = Diffusion(schedule=schedule, prediction_type=prediction_type)
    inputs = 2 + s * torch.randn(16_000, 1, 4, 4, generator=seeded(1))
    batch = diffusion.draw(Batch(inputs), seeded())
    # every time equally often, so that only the noise is left to chance
    number = torch.arange(16_000)
    times = number % 1000 if schedule == "linear" else (number + 0.5) / 16_000
    batch = attrs.evolve(batch, draws={**batch.draws, "timesteps": times})
    output = diffusion(gaussian(diffusion, mu=2.0, s=s), batch)
    assert float(output.loss) == pytest.approx(floor, rel=0.02)


@pytest.mark.parametrize("weighting", ["uniform", "edm"])
@pytest.mark.parametrize("schedule", ["edm", "linear", "flow"])
@pytest.mark.parametrize("sigma_data", [0.5, 1.0])
def test_a_zero_network_begins_with_a_loss_of_one(schedule: str, weighting: str, sigma_data: float) -> None:
    """On images whose standard deviation is sigma_data: what edm predictions are made for."""
    diffusion = Diffusion(schedule=schedule, prediction_type="edm", weighting=weighting, sigma_data=sigma_data)
    inputs = sigma_data * torch.randn(8000, 1, 4, 4, generator=seeded(1))
    output = diffusion(lambda x, t: torch.zeros_like(x), diffusion.draw(Batch(inputs), seeded()))
    assert float(output.loss) == pytest.approx(1, rel=0.02)
    assert output.per_sample is not None
    assert output.log_snr is not None
    for part in output.per_sample[output.log_snr.argsort()].chunk(4):  # at every noise level
        assert float(part.mean()) == pytest.approx(1, rel=0.04)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "scaled_linear", "sigmoid"])
def test_v_at_zero_terminal_snr_is_minus_the_image(schedule: str) -> None:
    diffusion = Diffusion(schedule=schedule, rescale_betas_zero_snr=True, prediction_type="v_prediction")
    batch = diffusion.draw(images(), seeded())
    batch = attrs.evolve(batch, draws={**batch.draws, "timesteps": torch.full((8,), 999)})
    seen: list[Tensor] = []

    def net(x: Tensor, timesteps: Tensor) -> Tensor:
        seen.append(x)
        return -batch.inputs

    output = diffusion(net, batch)
    assert torch.equal(seen[0], batch.draws["noise"])
    assert output.loss == 0
    assert output.log_snr is not None
    assert output.log_snr.tolist() == [-torch.inf] * 8


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize(("schedule", "prediction_type"), PAIRS)
def test_loss_and_gradient_are_finite_at_the_ends(schedule: str, prediction_type: str, weighting: str) -> None:
    zero_snr = schedule not in ("flow", "edm") and prediction_type != "epsilon"
    diffusion = Diffusion(
        schedule=schedule, prediction_type=prediction_type, weighting=weighting, rescale_betas_zero_snr=zero_snr
    )
    ends = {"flow": [1e-7, 1 - 2.0**-24], "edm": [0.002, 80.0]}.get(schedule, [0, 999])
    net, batch = Net(), diffusion.draw(images(2), seeded())
    batch = attrs.evolve(batch, draws={**batch.draws, "timesteps": torch.tensor(ends)})
    loss = diffusion(net, batch).loss
    loss.backward()
    assert loss.isfinite()
    assert net.conv.weight.grad is not None
    assert net.conv.weight.grad.isfinite().all()


def test_the_network_sees_standardised_images() -> None:
    mean, std = (0.1, -0.2, 0.3), (0.5, 0.6, 0.7)
    diffusion = Diffusion(schedule="flow", data_mean=mean, data_std=std)
    net, batch = Net(), diffusion.draw(images(), seeded())
    noise, t = batch.draws["noise"], batch.draws["timesteps"].view(-1, 1, 1, 1)
    per_channel = torch.tensor([mean, std]).view(2, 3, 1, 1)
    x0 = (batch.inputs - per_channel[0]) / per_channel[1]
    output = diffusion(net, batch)
    torch.testing.assert_close(net.seen[0], (1 - t) * x0 + t * noise)
    torch.testing.assert_close(output.loss, (net(*net.seen) - (noise - x0)).square().mean())
    torch.testing.assert_close(diffusion.restored(diffusion.standardised(batch.inputs)), batch.inputs)
    same_for_all = Diffusion(data_mean=0.5, data_std=[2])
    torch.testing.assert_close(same_for_all.standardised(batch.inputs), (batch.inputs - 0.5) / 2)
    assert Diffusion().standardised(batch.inputs) is batch.inputs


@pytest.mark.parametrize("options", [{"data_mean": (0.1, 0.2)}, {"data_std": (1.0, 1.0, 1.0, 2.0)}])
def test_wrong_number_of_channels_is_an_error(options: dict[str, Any]) -> None:
    (name, values), diffusion = next(iter(options.items())), Diffusion(**options)
    with pytest.raises(ValueError, match=f"{name} has {len(values)} numbers for images of 3 channels"):
        diffusion(Net(), diffusion.draw(images(), seeded()))


everything = st.fixed_dictionaries(
    {
        "weighting": st.sampled_from(list(WEIGHTINGS)),
        "loss": st.sampled_from(LOSSES),
        "times": st.sampled_from([None, *TIMES]),
        "stratified": st.booleans(),
        "conditional": st.booleans(),
        "data_std": st.sampled_from([1.0, 0.5, (0.1, 0.2, 0.3)]),
    }
)


@pytest.mark.parametrize(("schedule", "prediction_type"), PAIRS)
@given(options=everything)
@settings(max_examples=6)
def test_no_value_is_read_on_the_host(schedule: str, prediction_type: str, options: dict[str, Any]) -> None:
    """Tensors of the meta device have none: reading one, or a shape that depends on one, is an error."""
    diffusion, net = Diffusion(schedule=schedule, prediction_type=prediction_type, **options), Net().to("meta")
    batch = Batch(torch.empty(8, 3, 4, 4, device="meta"), torch.empty(8, dtype=torch.int64, device="meta"))
    output = diffusion(net, diffusion.draw(batch, seeded()))
    output.loss.backward()
    assert output.loss.device.type == "meta"
    with pytest.raises(RuntimeError, match="meta"):
        output.loss.item()


def test_wrong_output_shape_is_an_error() -> None:
    diffusion = Diffusion()
    with pytest.raises(ValueError, match=r"returned shape \(8, 1, 4, 4\) for images of shape \(8, 3, 4, 4\)"):
        diffusion(lambda x, t: x[:, :1], diffusion.draw(images(), seeded()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"schedule": "square"},
            "'schedule' must be one of linear, scaled_linear, cosine, sigmoid, flow, edm, not",
        ),
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"timesteps": 0}, "'timesteps' must be >= 1: 0"),
        ({"timesteps": 2_000_000}, "'timesteps' must be <= 1000000: 2000000"),
        ({"schedule": "flow", "timesteps": 50}, "'timesteps' is an option of schedule 'linear' or .*, not .*'flow'"),
        ({"beta_start": 0.0}, r"'beta_start' must be in \(0, 1\): 0"),
        (
            {"schedule": "cosine", "beta_start": 0.1},
            "'beta_start' is an option of schedule 'linear' or .*'cosine'",
        ),
        ({"beta_end": 1.0}, r"'beta_end' must be in \(0, 1\): 1"),
        ({"schedule": "edm", "beta_end": 0.1}, "'beta_end' is an option of schedule 'linear'"),
        ({"schedule": "edm", "rescale_betas_zero_snr": True}, "'rescale_betas_zero_snr' is an option of schedule"),
        ({"time_shift": 3.0}, "'time_shift' is an option of schedule 'flow', not .*'linear'"),
        ({"schedule": "flow", "time_shift": 0.0}, "'time_shift' must be > 0: 0"),
        ({"time_scale": 1.0}, "'time_scale' is an option of schedule 'flow' or 'edm', not .*'linear'"),
        ({"schedule": "edm", "time_scale": -1.0}, "'time_scale' must be > 0: -1"),
        ({"sigma_min": 0.1}, "'sigma_min' is an option of schedule 'edm', not .*'linear'"),
        ({"schedule": "edm", "sigma_min": 0.0}, "'sigma_min' must be > 0: 0"),
        ({"schedule": "edm", "sigma_min": 90.0}, "'sigma_min' must be below sigma_max = 80: 90"),
        ({"schedule": "flow", "sigma_max": 90.0}, "'sigma_max' is an option of schedule 'edm', not .*'flow'"),
        ({"schedule": "edm", "sigma_max": 0.0}, "'sigma_max' must be > 0: 0"),
        ({"prediction_type": "eps"}, "'prediction_type' must be one of epsilon, sample, .*, edm, not 'eps'"),
        ({"rescale_betas_zero_snr": True}, "'prediction_type' cannot be 'epsilon': .* use 'v_prediction', 'sample'"),
        ({"schedule": "flow", "prediction_type": "epsilon"}, "cannot be 'epsilon': .* use 'flow_prediction', 'sample'"),
        ({"sigma_data": 0.0}, "'sigma_data' must be > 0: 0"),
        (
            {"weighting": "minsnr"},
            "'weighting' must be one of uniform, .*'minsnr'; did you mean 'min_snr'",
        ),
        ({"snr_gamma": 4.0}, "'snr_gamma' is an option of weighting 'min_snr', not .*'uniform'"),
        ({"weighting": "min_snr", "snr_gamma": 0.0}, "'snr_gamma' must be > 0: 0"),
        ({"p2_k": 2.0}, "'p2_k' is an option of weighting 'p2', not .*'uniform'"),
        ({"weighting": "p2", "p2_k": 0.0}, "'p2_k' must be > 0: 0"),
        ({"p2_gamma": 2.0}, "'p2_gamma' is an option of weighting 'p2', not .*'uniform'"),
        ({"weighting": "p2", "p2_gamma": -1.0}, "'p2_gamma' must be >= 0: -1"),
        ({"loss": "l2"}, "'loss' must be one of mse, l1, huber, not 'l2'"),
        ({"huber_delta": 2.0}, "'huber_delta' is an option of loss 'huber', not .*'mse'"),
        ({"loss": "huber", "huber_delta": 0.0}, "'huber_delta' must be > 0: 0"),
        (
            {"times": "log_normal", "prediction_type": "sample", "rescale_betas_zero_snr": True},
            "'times' cannot be 'log_normal' with rescale_betas_zero_snr: the last timestep",
        ),
        ({"times": "lognormal"}, "'times' must be one of uniform, .*, not 'lognormal'; did you mean 'log_normal'"),
        ({"schedule": "edm", "time_std": 0.0}, "'time_std' must be > 0: 0"),
        ({"time_std": 2.0}, "'time_std' is an option of times 'logit_normal' or 'log_normal', not 'uniform'"),
        ({"schedule": "edm", "times": "uniform", "time_mean": 0.5}, "'time_mean' is an option of times"),
        ({"label_dropout": 1.5}, r"'label_dropout' must be in \[0, 1\]: 1.5"),
        ({"data_std": 0.0}, r"'data_std' must be in \(0, 1e\+06\): 0"),
        ({"data_std": (1.0, float("nan"))}, r"'data_std' must be in \(0, 1e\+06\): nan"),
        ({"timesteps": 1, "rescale_betas_zero_snr": True, "prediction_type": "sample"}, "takes at least 2 timesteps"),
    ],
)
def test_bad_options_name_the_key(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Diffusion(**options)


@pytest.mark.parametrize(("schedule", "natural"), [("linear", "Epsilon"), ("flow", "FlowPrediction"), ("edm", "EDM")])
def test_each_schedule_has_its_natural_prediction(schedule: str, natural: str) -> None:
    assert type(Diffusion(schedule=schedule).parametrization).__name__ == natural


def test_options_and_tables_stay_together() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Diffusion().schedule = "cosine"  # type: ignore[misc]
