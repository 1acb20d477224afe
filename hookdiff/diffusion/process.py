"""The diffusion objective: noise the images, let the network predict, compare."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cached_property
from typing import Any

import torch
from attrs import Attribute, define, field
from attrs.validators import ge, le
from torch import Generator, Tensor
from torch.nn import functional

from hookdiff.data.batch import Batch
from hookdiff.diffusion.parametrization import PREDICTION_TYPES, Parametrization, q_sample
from hookdiff.diffusion.schedules import SCHEDULES, NoiseSchedule, make_schedule
from hookdiff.errors import nearest
from hookdiff.objective import LossOutput

_TABLES = "sqrt_alphas_cumprod", "sqrt_one_minus_alphas_cumprod", "log_snr"

Net = Callable[[Tensor, Tensor], Tensor]  # (x_t: n c h w, timesteps: n, int64) -> n c h w


def one_of(names: Collection[str]) -> Callable[[Any, Attribute[str], str], None]:
    """Validate that an option is one of `names`, which are looked up late: a dict may still get more."""

    def check(instance: Any, option: Attribute[str], value: str) -> None:
        if value not in names:
            raise ValueError(f"'{option.name}' must be one of {', '.join(names)}, not {value!r}{nearest(value, names)}")

    return check


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move `tensor` to `device` without making the host wait for a GPU."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        # The host stages a copy from pageable memory and waits for it; one from pinned memory runs by itself.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@define(eq=False, frozen=True)  # frozen, so that the tables always belong to the options
class Diffusion:
    """Trains a network to undo a discrete diffusion. Its arguments are the section `[diffusion]`.

    The loss is the simple one of Ho et al. 2020 (arXiv 2006.11239), eq. 14, or its counterpart for another
    prediction type.

    Raises:
        ValueError: naming the argument that is out of its range.
    """

    schedule: str = field(default="linear", validator=one_of(SCHEDULES))
    timesteps: int = field(default=1000, validator=[ge(1), le(1_000_000)])
    prediction_type: str = field(default="epsilon", validator=one_of(PREDICTION_TYPES))

    @cached_property
    def noise_schedule(self) -> NoiseSchedule:
        """The tables of the chosen schedule."""
        return make_schedule(self.schedule, self.timesteps)

    @property
    def parametrization(self) -> Parametrization:
        """The meaning of the network's output."""
        return PREDICTION_TYPES[self.prediction_type]

    def draw(self, batch: Batch, generator: Generator) -> Batch:
        """Return `batch` with the randomness of this step in its draws.

        `noise` is standard normal, float32, of the shape of the inputs; `timesteps` is uniform in 0..T-1,
        int64, of shape n. Both are drawn on the generator's device and moved to that of the inputs, so a CPU
        generator gives the same numbers whatever the inputs live on.
        """
        shape, device, where = batch.inputs.shape, batch.inputs.device, generator.device
        noise = torch.randn(shape, generator=generator, device=where, dtype=torch.float32)
        timesteps = torch.randint(self.timesteps, (len(batch),), generator=generator, device=where)
        drawn = {"noise": to_device(noise, device), "timesteps": to_device(timesteps, device)}
        return Batch(batch.inputs, batch.labels, batch.indices, {**batch.draws, **drawn}, batch.total)

    def __call__(self, net: Net, batch: Batch) -> LossOutput:
        """Return the mean squared error of `net` on a batch that went through `draw`.

        `net(x_t, timesteps)` gets float32 images and int64 timesteps, under autocast too, and must return the
        shape of x_t. The error is taken in float32; its mean is over c h w, then over the samples.

        Raises:
            ValueError: if the network's output has another shape than its input.
        """
        noise, timesteps = batch.draws["noise"], batch.draws["timesteps"]
        alpha, sigma, log_snr = self.noise_schedule.gather(_TABLES, timesteps, noise.ndim)
        # Autocast leaves additions and multiplications alone, so x_t and the target stay float32. Timesteps
        # stay integers, because bfloat16 takes 999 for 1000.
        output = net(q_sample(batch.inputs, noise, alpha, sigma), timesteps)
        target = self.parametrization.target(batch.inputs, noise, alpha, sigma)
        if output.shape != target.shape:  # it might broadcast, and train on nonsense
            shapes = f"{tuple(output.shape)} for images of shape {tuple(target.shape)}"
            raise ValueError(f"the network returned shape {shapes}")
        error = functional.mse_loss(output.float(), target, reduction="none")
        return LossOutput(error.mean(), error.detach().flatten(1).mean(1), timesteps, log_snr.flatten())
