from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from hookdiff import Batch, Loop, LoopConfig, SampleRequest
from hookdiff.diffusion.diffusion import Diffusion
from hookdiff.diffusion.losses import L1, MSE, Huber, Loss
from hookdiff.diffusion.prediction import EDMPrediction, Epsilon, FlowPrediction, Prediction, VPrediction
from hookdiff.diffusion.process import EDM, VP, Flow, Process
from hookdiff.diffusion.sampling import Sampling
from hookdiff.diffusion.schedules import Schedule
from hookdiff.diffusion.times import LogitNormal, LogNormal, Times, UniformTimes
from hookdiff.diffusion.weighting import EDMWeighting, MinSNR, UniformWeighting, Weighting
from hookdiff.testing import assert_same
from tests.conftest import acting, refused
from tests.diffusion.conftest import FLOORS, PAIRS, PROCESSES, SHORT, SOME_PAIRS, seeded
from tests.networks.conftest import grad_of


def images(num: int = 8) -> Batch:
    return Batch(torch.rand(num, 3, 4, 4, generator=seeded(1)) * 2 - 1)


def labelled(num: int = 8) -> Batch:
    return attrs.evolve(images(num), labels=torch.arange(num) % 10)


class Net(nn.Module):
    """A convolution that records its arguments."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor, timesteps: Tensor, labels: Tensor | None = None) -> Tensor:
        self.seen = x.detach(), timesteps
        self.labels = labels
        output: Tensor = self.conv(x)
        return output


def by_hand(process: str, prediction: str, x0: Tensor, noise: Tensor, times: Tensor) -> tuple[Tensor, ...]:
    """Return the network's input and time, its target, and the log-SNR."""
    times = times.view(-1, 1, 1, 1)
    if process == "flow":
        alpha, sigma, time = 1 - times, times, 1000 * times
    elif process == "edm":
        alpha, sigma, time = torch.ones_like(times), times, 250 * times.log()
    else:
        remaining = (1 - Schedule.of(process).betas(1000)).cumprod(0)[times]
        alpha, sigma, time = remaining.sqrt().float(), (1 - remaining).sqrt().float(), times
    x_t = alpha * x0 + sigma * noise
    shown = x_t
    if prediction == "edm":
        ratio, x = sigma / alpha, x_t / alpha
        shown = x / (ratio**2 + 0.25).sqrt()
        target = (x0 - 0.25 / (ratio**2 + 0.25) * x) / (0.5 * ratio / (ratio**2 + 0.25).sqrt())
    else:
        target = {
            "epsilon": noise,
            "sample": x0,
            "v_prediction": alpha * noise - sigma * x0,
            "flow_prediction": noise - x0,
        }[prediction]
    return shown, time.flatten(), target, 2 * (alpha / sigma).log().flatten()


@pytest.mark.parametrize(("process", "prediction"), PAIRS)
def test_loss_equals_a_few_lines_of_torch(process: str, prediction: str) -> None:
    diffusion = Diffusion(PROCESSES[process], prediction, "uniform")
    net, batch = Net(), diffusion.draw(images(), seeded())
    noise, times = batch.draws["noise"], batch.draws["timesteps"]
    shown, time, target, log_snr = by_hand(process, prediction, batch.inputs, noise, times)
    expected = nn.functional.mse_loss(net(shown, time), target)

    output = diffusion(net, batch)
    assert net.labels is None
    torch.testing.assert_close(net.seen[0], shown, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(net.seen[1], time)  # compares the dtype too
    torch.testing.assert_close(output.loss, expected, rtol=1e-4, atol=1e-5)
    assert output.per_sample is not None
    assert output.log_snr is not None
    assert (output.loss.requires_grad, output.per_sample.requires_grad) == (True, True)
    assert output.per_sample.shape == output.log_snr.shape == (8,)
    torch.testing.assert_close(output.per_sample.mean(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(output.log_snr, log_snr.float(), rtol=1e-4, atol=1e-3)
    assert output.timesteps is times


@pytest.mark.parametrize("weighting", Weighting.known)
@pytest.mark.parametrize("loss", [MSE(), L1(), Huber(0.3)], ids=str)
def test_the_loss_is_the_weighted_mean_of_the_errors(weighting: str, loss: Loss) -> None:
    diffusion = Diffusion(prediction="v_prediction", weighting=weighting, loss=loss)
    net, batch = Net(), diffusion.draw(images(), seeded())
    noise, times = batch.draws["noise"], batch.draws["timesteps"]
    alpha, sigma, _ = diffusion.process.rates(times, 4)
    error = net(alpha * batch.inputs + sigma * noise, times) - (alpha * noise - sigma * batch.inputs)
    size = error.abs()
    of_pixel = {"mse": error**2, "l1": size, "huber": torch.where(size < 0.3, error**2 / 2, 0.3 * (size - 0.15))}
    of_pixel = of_pixel[loss.use]
    per_sample = of_pixel.flatten(1).mean(1)
    weights = Weighting.of(weighting).weights(diffusion.prediction, alpha.flatten(), sigma.flatten())
    output = diffusion(net, batch)
    torch.testing.assert_close(output.loss, (weights * per_sample).mean())
    assert output.per_sample is not None
    torch.testing.assert_close(output.per_sample, per_sample.detach())  # per_sample is not weighted
    output.loss.backward()
    assert grad_of(net.conv.weight).isfinite().all()


def test_draw_adds_noise_and_timesteps() -> None:
    batch = attrs.evolve(images(4000), draws={"flip": torch.ones(4000)})
    batch = Diffusion(VP("cosine", 10)).draw(batch, seeded())
    noise, timesteps = batch.draws["noise"], batch.draws["timesteps"]
    assert (noise.shape, noise.dtype, timesteps.dtype) == (batch.inputs.shape, torch.float32, torch.int64)
    assert (float(noise.mean()), float(noise.std())) == pytest.approx((0, 1), abs=0.01)
    assert timesteps.bincount().tolist() == pytest.approx([400] * 10, abs=80)
    assert "flip" in batch.draws  # earlier draws stay
    assert "labels" not in batch.draws
    assert Diffusion("flow").draw(images(), seeded()).draws["timesteps"].dtype == torch.float32


class Watched(Net):
    """Keeps the shape and the times of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[tuple[int, ...], list[float]]] = []

    def forward(self, x: Tensor, timesteps: Tensor, labels: Tensor | None = None) -> Tensor:
        self.calls.append((tuple(x.shape[1:]), timesteps.tolist()))
        return super().forward(x, timesteps)


def test_a_run_on_two_shapes_trains_and_samples_each_at_its_own_times() -> None:
    wide, square = (3, 4, 36), (3, 12, 12)  # sqrt(h w) is 12 for both; a quarter of the square has 6

    def cropped(loop: Loop, batch: Batch) -> Batch:
        sizes = [(4, 36), (12, 12), (6, 6)][loop.progress.position % 3]
        return attrs.evolve(batch, inputs=batch.inputs[..., : sizes[0], : sizes[1]])

    objective = Diffusion(Flow(3.0, shift_side=4), times=UniformTimes())
    net, data, sampling = Watched(), torch.rand(12, 3, 12, 36, generator=seeded()) * 2 - 1, Sampling("euler", 4)

    def optimizers(prepared: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(prepared.parameters(), lr=0.01)

    config = LoopConfig(steps=3, batch_size=6, micro_batch=4)
    loop = Loop(net, optimizers, objective, data, config, {"crops": acting(make_batch=cropped)}, sampler=sampling)
    loop.run()
    assert [shape for shape, _ in net.calls] == [wide, wide, square, square, (3, 6, 6), (3, 6, 6)]
    for position, (shape, shift) in enumerate([(wide, 9.0), (square, 9.0), ((3, 6, 6), 4.5)]):
        generator = loop.random.generator("noise", position, loop.device)
        torch.randn(6, *shape, generator=generator)
        u = torch.rand(6, generator=generator)
        times = [time for _, rows in net.calls[2 * position : 2 * position + 2] for time in rows]
        assert times == pytest.approx((1000 * shift * u / (1 + (shift - 1) * u)).tolist(), rel=1e-5)

    assert loop.sampler is not None
    for shape, shift in ((wide, 27.0), ((3, 6, 6), 13.5)):
        u = torch.tensor([1, 0.75, 0.5, 0.25])
        expected = (1000 * shift * u / (1 + (shift - 1) * u)).tolist()
        for start, last in (({}, 4), ({"images": torch.zeros(1, *shape), "strength": 0.5}, 2)):
            net.calls.clear()
            loop.sampler.sample(net, objective, shape, SampleRequest(1).generators(), loop.device, **start)
            assert [seen for seen, _ in net.calls] == [shape] * last
            assert [time for _, (time,) in net.calls] == pytest.approx(expected[-last:], rel=1e-5)


def test_a_side_of_the_shift_is_refused_for_vectors() -> None:
    with refused(ValueError, "'process.shift_side'", "(5,)", "remove"):
        Diffusion(Flow(shift_side=8)).draw(Batch(torch.zeros(2, 5)), seeded())
    assert Diffusion(Flow(3.0)).draw(Batch(torch.zeros(2, 5)), seeded()).draws["timesteps"].shape == (2,)


@pytest.mark.parametrize(
    "diffusion", [Diffusion(), Diffusion("vp", conditional=True), Diffusion("edm", times=LogNormal(stratified=True))]
)
def test_draw_depends_on_the_generator_alone(diffusion: Diffusion) -> None:
    torch.manual_seed(1)
    first = diffusion.draw(labelled(), seeded(3)).draws
    torch.manual_seed(2)
    torch.set_default_dtype(torch.float64)
    try:
        second = diffusion.draw(labelled(), seeded(3)).draws
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(first, second)


def test_the_network_gets_labels_and_some_are_left_out() -> None:
    net, diffusion = Net(), Diffusion(conditional=True, label_dropout=0.2)
    batch = labelled(5000)
    drawn = diffusion.draw(batch, seeded()).draws["labels"]
    left_out = drawn == -1
    assert float(left_out.float().mean()) == pytest.approx(0.2, abs=0.025)  # four standard deviations
    assert batch.labels is not None
    assert torch.equal(drawn[~left_out], batch.labels[~left_out])
    assert drawn.dtype == torch.int64
    for label in range(10):  # for each label
        assert float(left_out[batch.labels == label].float().mean()) == pytest.approx(0.2, abs=0.08)

    small = diffusion.draw(labelled(), seeded(1))
    diffusion(net, small)
    assert net.labels is not None
    assert torch.equal(net.labels, small.draws["labels"])
    unchanged = labelled().labels
    assert unchanged is not None
    for share, expected in ((0.0, unchanged), (1.0, torch.full((8,), -1))):
        drawn = Diffusion(conditional=True, label_dropout=share).draw(labelled(), seeded()).draws["labels"]
        assert torch.equal(drawn, expected)
    Diffusion(conditional=False)(net, Diffusion().draw(labelled(), seeded()))
    assert net.labels is None


def test_conditional_without_labels_is_an_error() -> None:
    with refused(ValueError, "conditional", "labels"):
        Diffusion(conditional=True).draw(images(), seeded())


@pytest.mark.parametrize(
    "diffusion",
    [Diffusion("vp"), Diffusion(conditional=True, weighting="min_snr"), Diffusion("flow", data_mean=0.1, data_std=0.4)],
)
def test_micro_batches_add_up_to_the_batch(diffusion: Diffusion) -> None:
    net = Net()
    batch = diffusion.draw(labelled(), seeded())
    diffusion(net, batch).loss.backward()
    whole, net.conv.weight.grad = grad_of(net.conv.weight), None
    for rows in (slice(0, 5), slice(5, 8)):
        part = batch[rows]
        (diffusion(net, part).loss * len(part) / part.total).backward()
    torch.testing.assert_close(net.conv.weight.grad, whole)


@pytest.mark.parametrize(
    "diffusion",
    [Diffusion(), Diffusion("vp"), Diffusion("edm"), Diffusion(prediction=EDMPrediction(1.0), data_std=0.5)],
)
def test_autocast_touches_only_the_network(diffusion: Diffusion) -> None:
    net, has_timesteps = Net(), diffusion.process.has_timesteps
    batch = diffusion.draw(images(), seeded())
    if has_timesteps:
        batch = attrs.evolve(batch, draws={**batch.draws, "timesteps": torch.full((8,), 999)})
    plain = diffusion(net, batch)
    x_t, time = net.seen
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = diffusion(net, batch)
        assert net(*net.seen).dtype == torch.bfloat16
    seen, timesteps = net.seen
    assert torch.equal(seen, x_t)  # float32, to the bit
    assert torch.equal(timesteps, time)
    assert (seen.dtype, output.loss.dtype, timesteps.dtype) == (torch.float32, torch.float32, time.dtype)
    if has_timesteps:
        assert (timesteps.dtype, timesteps.tolist()) == (torch.int64, [999] * 8)
        assert timesteps.bfloat16().tolist() == [1000] * 8  # bfloat16 would round 999 to 1000
    torch.testing.assert_close(output.loss, plain.loss, rtol=1e-2, atol=0)


@pytest.mark.parametrize("loss", Loss.known)
def test_a_network_may_output_bfloat16(loss: str) -> None:
    """The loss is computed in float32 from the rounded output."""
    diffusion, net = Diffusion(loss=loss), Net()
    batch = diffusion.draw(images(), seeded())
    output = diffusion(lambda x, t: net(x, t).bfloat16(), batch)
    expected = diffusion(lambda x, t: net(x, t).bfloat16().float(), batch)
    assert output.loss.dtype == torch.float32
    assert torch.equal(output.loss, expected.loss)
    output.loss.backward()
    assert grad_of(net.conv.weight).dtype == torch.float32


@pytest.mark.parametrize(("process", "prediction", "s", "floor"), FLOORS)
def test_loss_floor_of_gaussian_data(gaussian: type, process: str, prediction: str, s: float, floor: float) -> None:
    """The loss of the best possible network on N(2, s²) data equals the floor."""
    diffusion = Diffusion(process, prediction)
    inputs = 2 + s * torch.randn(16_000, 1, 4, 4, generator=seeded(1))
    batch = diffusion.draw(Batch(inputs), seeded())
    # use every time equally often, so that only the noise is random
    number = torch.arange(16_000)
    times = number % 1000 if process == "ddpm" else (number + 0.5) / 16_000
    batch = attrs.evolve(batch, draws={**batch.draws, "timesteps": times})
    output = diffusion(gaussian(diffusion, mu=2.0, s=s), batch)
    assert float(output.loss) == pytest.approx(floor, rel=0.02)


@pytest.mark.parametrize("weighting", ["uniform", "edm"])
@pytest.mark.parametrize("process", Process.known)
@pytest.mark.parametrize("sigma_data", [0.5, 1.0])
def test_a_zero_network_has_a_loss_of_one(process: str, weighting: str, sigma_data: float) -> None:
    """The target of an edm prediction has variance 1 on images with the standard deviation sigma_data."""
    diffusion = Diffusion(process, EDMPrediction(sigma_data), weighting)
    inputs = sigma_data * torch.randn(8000, 1, 4, 4, generator=seeded(1))
    output = diffusion(lambda x, t: torch.zeros_like(x), diffusion.draw(Batch(inputs), seeded()))
    assert float(output.loss) == pytest.approx(1, rel=0.02)
    assert output.per_sample is not None
    assert output.log_snr is not None
    for part in output.per_sample[output.log_snr.argsort()].chunk(4):  # in each quarter of the noise levels
        assert float(part.mean()) == pytest.approx(1, rel=0.04)


@pytest.mark.parametrize("schedule", Schedule.known)
def test_v_at_zero_terminal_snr_is_minus_the_image(schedule: str) -> None:
    diffusion = Diffusion(VP(schedule, rescale_betas_zero_snr=True), "v_prediction")
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


@pytest.mark.parametrize("weighting", Weighting.known)
@pytest.mark.parametrize(("process", "prediction"), SOME_PAIRS)
def test_loss_and_gradient_are_finite_at_the_ends(process: str, prediction: str, weighting: str) -> None:
    zero_snr = process in Schedule.known and prediction != "epsilon"
    chosen = VP(process, rescale_betas_zero_snr=True) if zero_snr else PROCESSES[process]
    diffusion = Diffusion(chosen, prediction, weighting)
    ends = {"flow": [1e-7, 1 - 2.0**-24], "edm": [0.002, 80.0]}.get(process, [0, 999])
    net, batch = Net(), diffusion.draw(images(2), seeded())
    batch = attrs.evolve(batch, draws={**batch.draws, "timesteps": torch.tensor(ends)})
    loss = diffusion(net, batch).loss
    loss.backward()
    assert loss.isfinite()
    assert grad_of(net.conv.weight).isfinite().all()


def test_the_network_sees_normalized_images() -> None:
    mean, std = (0.1, -0.2, 0.3), (0.5, 0.6, 0.7)
    diffusion = Diffusion("flow", data_mean=mean, data_std=std)
    net, batch = Net(), diffusion.draw(images(), seeded())
    noise, t = batch.draws["noise"], batch.draws["timesteps"].view(-1, 1, 1, 1)
    per_channel = torch.tensor([mean, std]).view(2, 3, 1, 1)
    x0 = (batch.inputs - per_channel[0]) / per_channel[1]
    output = diffusion(net, batch)
    torch.testing.assert_close(net.seen[0], (1 - t) * x0 + t * noise)
    torch.testing.assert_close(output.loss, (net(*net.seen) - (noise - x0)).square().mean())
    torch.testing.assert_close(diffusion.denormalize(diffusion.normalize(batch.inputs)), batch.inputs)
    same_for_all = Diffusion(data_mean=0.5, data_std=[2])
    torch.testing.assert_close(same_for_all.normalize(batch.inputs), (batch.inputs - 0.5) / 2)
    assert Diffusion().normalize(batch.inputs) is batch.inputs


@pytest.mark.parametrize("options", [{"data_mean": (0.1, 0.2)}, {"data_std": (1.0, 1.0, 1.0, 2.0)}])
def test_wrong_number_of_channels_is_an_error(options: dict[str, Any]) -> None:
    (name, values), diffusion = next(iter(options.items())), Diffusion(**options)
    with refused(ValueError, name, len(values), 3):
        diffusion(Net(), diffusion.draw(images(), seeded()))


everything = st.fixed_dictionaries(
    {
        "weighting": st.sampled_from([*list(Weighting.known)[:-1], EDMWeighting(1.0)]),
        "loss": st.sampled_from(list(Loss.known)),
        "times": st.sampled_from([kind(stratified=even) for kind in Times.known.values() for even in (True, False)]),
        "conditional": st.booleans(),
        "data_std": st.sampled_from([1.0, 0.5, (0.1, 0.2, 0.3)]),
    }
)


@pytest.mark.parametrize(("process", "prediction"), SOME_PAIRS)
@given(options=everything)
@settings(max_examples=6)
def test_no_value_is_read_on_the_host(process: str, prediction: str, options: dict[str, Any]) -> None:
    """Tensors on the meta device have no values: reading a value, or a shape that depends on a value, is an error."""
    predicted = EDMPrediction(1.0) if prediction == "edm" else prediction
    diffusion, net = Diffusion(PROCESSES[process], predicted, **options), Net().to("meta")
    batch = Batch(torch.empty(8, 3, 4, 4, device="meta"), torch.empty(8, dtype=torch.int64, device="meta"))
    output = diffusion(net, diffusion.draw(batch, seeded()))
    output.loss.backward()
    assert output.loss.device.type == "meta"
    with refused(RuntimeError, "meta"):
        output.loss.item()


def test_wrong_output_shape_is_an_error() -> None:
    diffusion = Diffusion()
    with refused(ValueError, "(8, 1, 4, 4)", "(8, 3, 4, 4)"):
        diffusion(lambda x, t: x[:, :1], diffusion.draw(images(), seeded()))


@pytest.mark.parametrize(
    ("process", "prediction", "times"),
    [
        ("vp", VPrediction(), UniformTimes(stratified=True)),
        ("ddpm", Epsilon(), UniformTimes()),
        ("flow", FlowPrediction(), LogitNormal(-0.5, 1.0, stratified=True)),
        ("edm", EDMPrediction(), LogNormal(stratified=True)),
    ],
)
def test_each_process_has_its_defaults(process: str, prediction: Prediction, times: Times) -> None:
    diffusion = Diffusion(process)
    expected = (Process.known[process](), prediction, times, MSE())
    assert (diffusion.process, diffusion.prediction, diffusion.times, diffusion.loss) == expected
    assert diffusion.weighting == (MinSNR() if process == "vp" else UniformWeighting())
    assert Diffusion().process == Flow()


def test_a_name_gives_the_same_part_as_an_object() -> None:
    named = Diffusion("flow", "v_prediction", "min_snr", "logit_normal", "huber")
    for option, part in (("process", Flow()), ("weighting", MinSNR()), ("loss", Huber())):
        assert getattr(named, option) == part
    assert Diffusion(Flow(3.0)).process == Flow(3.0)


@pytest.mark.parametrize("process", [VP(), Flow(), EDM(), VP(SHORT[0], 20)], ids=str)
def test_sigma_data_must_be_1_for_normalized_images(process: Process) -> None:
    """data_std scales images to a standard deviation of 1, so any other sigma_data of edm parts is refused."""
    for option, prediction, weighting in (
        ("prediction", EDMPrediction(), "uniform"),
        ("prediction", EDMPrediction(0.9), EDMWeighting(1.0)),
        ("weighting", "sample", "edm"),
        ("weighting", EDMPrediction(1.0), EDMWeighting(0.5)),
    ):
        sigma_data = {"prediction": prediction, "weighting": weighting}[option]
        with refused(ValueError, f"'{option}'", "sigma_data", getattr(sigma_data, "sigma_data", 0.5), "data_std"):
            Diffusion(process, prediction, weighting, data_std=0.3)
        Diffusion(process, prediction, weighting, data_mean=0.2)  # data_mean alone keeps the deviation
    diffusion = Diffusion(process, EDMPrediction(1.0), "edm", data_mean=0.1, data_std=0.3)
    assert diffusion.weighting == EDMWeighting(1.0)  # taken from the prediction


def test_objectives_and_processes_are_frozen() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Diffusion().process = Flow()  # type: ignore[misc]
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        VP().timesteps = 50  # type: ignore[misc]
