from __future__ import annotations

import attrs
import pytest
import torch
from torch import Tensor, nn

from hookdiff.data.batch import Batch
from hookdiff.diffusion import PREDICTION_TYPES, SCHEDULES, Diffusion


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(num: int = 8) -> Batch:
    return Batch(torch.rand(num, 3, 4, 4, generator=seeded(1)) * 2 - 1)


class Net(nn.Module):
    """A convolution that remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor, timesteps: Tensor) -> Tensor:
        self.seen = x.detach(), timesteps
        output: Tensor = self.conv(x)
        return output


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("prediction_type", sorted(PREDICTION_TYPES))
def test_loss_is_that_of_a_few_lines_of_torch(schedule: str, prediction_type: str) -> None:
    diffusion = Diffusion(schedule=schedule, timesteps=100, prediction_type=prediction_type)
    net, batch = Net(), diffusion.draw(images(), seeded())
    noise, timesteps = batch.draws["noise"], batch.draws["timesteps"]

    remaining = diffusion.noise_schedule.alphas_cumprod[timesteps].view(8, 1, 1, 1)
    alpha, sigma = remaining.sqrt().float(), (1 - remaining).sqrt().float()
    x_t = alpha * batch.inputs + sigma * noise
    target = noise if prediction_type == "epsilon" else alpha * noise - sigma * batch.inputs
    expected = nn.functional.mse_loss(net(x_t, timesteps), target)

    output = diffusion(net, batch)
    torch.testing.assert_close(output.loss, expected)
    assert output.per_sample is not None
    assert output.log_snr is not None
    assert output.loss.requires_grad
    assert not output.per_sample.requires_grad
    assert output.per_sample.shape == output.log_snr.shape == (8,)
    torch.testing.assert_close(output.per_sample.mean(), expected.detach())
    torch.testing.assert_close(output.log_snr, (remaining / (1 - remaining)).log().flatten().float())
    assert output.timesteps is timesteps


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


def test_draw_depends_on_the_generator_alone() -> None:
    diffusion = Diffusion()
    torch.manual_seed(1)
    first = diffusion.draw(images(), seeded(3)).draws
    torch.manual_seed(2)
    torch.set_default_dtype(torch.float64)
    try:
        second = diffusion.draw(images(), seeded(3)).draws
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(first["noise"], second["noise"])
    assert torch.equal(first["timesteps"], second["timesteps"])


def test_micro_batches_add_up_to_the_batch() -> None:
    diffusion, net = Diffusion(), Net()
    batch = diffusion.draw(images(), seeded())
    diffusion(net, batch).loss.backward()
    assert net.conv.weight.grad is not None
    whole, net.conv.weight.grad = net.conv.weight.grad, None
    for rows in (slice(0, 5), slice(5, 8)):
        part = batch[rows]
        (diffusion(net, part).loss * len(part) / part.total).backward()
    torch.testing.assert_close(net.conv.weight.grad, whole)


def test_autocast_touches_only_the_network() -> None:
    diffusion, net = Diffusion(), Net()
    batch = diffusion.draw(images(), seeded())
    batch = attrs.evolve(batch, draws={**batch.draws, "timesteps": torch.full((8,), 999)})
    plain = diffusion(net, batch)
    x_t, _ = net.seen
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = diffusion(net, batch)
        assert net(*net.seen).dtype == torch.bfloat16
    seen, timesteps = net.seen
    assert torch.equal(seen, x_t)  # float32, to the bit
    assert seen.dtype == output.loss.dtype == torch.float32
    assert timesteps.dtype == torch.int64
    assert timesteps.tolist() == [999] * 8
    assert timesteps.bfloat16().tolist() == [1000] * 8  # the trap
    torch.testing.assert_close(output.loss, plain.loss, rtol=1e-2, atol=0)


@pytest.mark.parametrize(
    ("prediction_type", "s", "floor"),
    [
        ("epsilon", 1.0, 0.275513233397),
        ("epsilon", 0.5, 0.173053406084),
        ("v_prediction", 0.5, 0.379790054563),
    ],
)
def test_loss_floor_of_gaussian_data(prediction_type: str, s: float, floor: float) -> None:
    """The best possible network on N(2, s²) data reaches the floor and no less."""
    diffusion = Diffusion(prediction_type=prediction_type)
    inputs = 2 + s * torch.randn(16_000, 1, 4, 4, generator=seeded(1))
    batch = diffusion.draw(Batch(inputs), seeded())
    # every timestep equally often, so that only the noise is left to chance
    batch = attrs.evolve(batch, draws={**batch.draws, "timesteps": torch.arange(16_000) % 1000})

    def net(x: Tensor, timesteps: Tensor) -> Tensor:
        remaining = diffusion.noise_schedule.gather(("alphas_cumprod",), timesteps, x.ndim)[0]
        alpha, sigma = remaining.sqrt(), (1 - remaining).sqrt()
        y = (x - alpha * 2) / (remaining * s**2 + 1 - remaining)
        return diffusion.parametrization.target(2 + alpha * s**2 * y, sigma * y, alpha, sigma)

    output = diffusion(net, batch)
    assert float(output.loss) == pytest.approx(floor, rel=0.02)


def test_no_value_is_read_on_the_host() -> None:
    """Tensors of the meta device have none: reading one, or a shape that depends on one, is an error."""
    diffusion, net = Diffusion(), Net().to("meta")
    batch = Batch(torch.empty(8, 3, 4, 4, device="meta"))
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
        ({"schedule": "sigmoid"}, "'schedule' must be one of linear, cosine, not 'sigmoid'"),
        ({"timesteps": 0}, "'timesteps' must be >= 1: 0"),
        ({"prediction_type": "eps"}, "'prediction_type' must be one of epsilon, v_prediction, not 'eps'"),
    ],
)
def test_bad_options_name_the_key(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Diffusion(**options)  # type: ignore[arg-type]


def test_options_and_tables_stay_together() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Diffusion().schedule = "cosine"  # type: ignore[misc]
