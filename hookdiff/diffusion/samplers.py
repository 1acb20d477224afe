"""Samplers: from noise back to images, with a trained network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import sqrt
from typing import Any

import torch
from attrs import Attribute, define, field
from attrs.validators import and_, ge, le
from torch import Generator, Tensor

from hookdiff.diffusion.parametrization import noise_from_x0
from hookdiff.diffusion.process import Diffusion, Net, one_of, to_device

SPACINGS: dict[str, Callable[[int, int], list[int]]] = {
    "trailing": lambda timesteps, steps: [round(timesteps - i * timesteps / steps) - 1 for i in range(steps)],
    "leading": lambda timesteps, steps: [i * timesteps // steps for i in reversed(range(steps))],
}


def sampling_timesteps(timesteps: int, steps: int, spacing: str = "trailing") -> list[int]:
    """Return the `steps` timesteps to visit of a process that has `timesteps`, noisiest first.

    "trailing" is round(T - i T / N) - 1 for i = 0..N-1: it starts at the last timestep, where the images
    really are noise. "leading" is floor(i T / N): it ends at timestep 0 but starts up to T / N short of the
    last one, where the network expects traces of an image that pure noise has not (Lin et al. 2023, arXiv
    2305.08891, section 3.3).

    Raises:
        ValueError: if there are more steps than timesteps, or the spacing is unknown.
    """
    if spacing not in SPACINGS:
        raise ValueError(f"no spacing named {spacing!r}; known: {', '.join(SPACINGS)}")
    if steps > timesteps:
        numbers = f"sampling.steps = {steps} is more than diffusion.timesteps = {timesteps}"
        raise ValueError(f"{numbers}: lower the first or raise the second")
    return SPACINGS[spacing](timesteps, steps)


def ddim_step(
    x0: Tensor, noise: Tensor, alphas_cumprod: float, alphas_cumprod_prev: float, eta: float = 0.0
) -> tuple[Tensor, float]:
    """One step of Song et al. 2020 (arXiv 2010.02502), eq. 12, with the sigma of eq. 16.

    Args:
        x0: the image the network sees in x_t, n c h w.
        noise: the noise it sees there, n c h w.
        alphas_cumprod: of the timestep of x_t, between 0 and 1.
        alphas_cumprod_prev: of the next timestep to visit, which is less noisy; 1 for the image itself.
        eta: from 0, deterministic, to 1, which is `ddpm_step` with its small variance.

    Returns:
        The mean of x_{t_prev}, n c h w, and the standard deviation of the noise to add: 0 in the last step.
    """
    noise_prev = 1 - alphas_cumprod_prev
    fresh = eta**2 * (1 - alphas_cumprod / alphas_cumprod_prev) / (1 - alphas_cumprod)  # share of the noise
    mean = sqrt(alphas_cumprod_prev) * x0 + sqrt(noise_prev * max(0.0, 1 - fresh)) * noise
    return mean, sqrt(noise_prev * fresh)


def ddpm_step(
    x_t: Tensor, x0: Tensor, alphas_cumprod: float, alphas_cumprod_prev: float, variance: str = "fixed_small"
) -> tuple[Tensor, float]:
    """One step of ancestral sampling: Ho et al. 2020 (arXiv 2006.11239), algorithm 2, with the mean of eq. 7.

    Any less noisy timestep may follow: beta is then 1 - alphas_cumprod / alphas_cumprod_prev, that of the
    process which has only the visited timesteps (Nichol & Dhariwal 2021, arXiv 2102.09672, section 4).

    Args:
        x_t: n c h w.
        x0: the image the network sees in x_t, n c h w.
        alphas_cumprod: of the timestep of x_t, between 0 and 1.
        alphas_cumprod_prev: of the next timestep to visit, which is less noisy; 1 for the image itself.
        variance: "fixed_small", that of the posterior (eq. 7), or "fixed_large", beta.

    Returns:
        The mean of x_{t_prev}, n c h w, and the standard deviation of the noise to add: 0 in the last step.
    """
    alpha = alphas_cumprod / alphas_cumprod_prev
    noise_level, noise_prev = 1 - alphas_cumprod, 1 - alphas_cumprod_prev
    coef1 = sqrt(alphas_cumprod_prev) * (1 - alpha) / noise_level
    coef2 = sqrt(alpha) * noise_prev / noise_level
    # No noise is added to the image itself. The small variance is 0 there anyway.
    large = 1 - alpha if noise_prev else 0.0
    variances = {"fixed_small": (1 - alpha) * noise_prev / noise_level, "fixed_large": large}
    return coef1 * x0 + coef2 * x_t, sqrt(variances[variance])


def _standard_normal(shape: Sequence[int], generators: Sequence[Generator], device: torch.device) -> Tensor:
    drawn = [torch.randn(*shape, generator=g, device=g.device, dtype=torch.float32) for g in generators]
    return to_device(torch.stack(drawn), device)


def _only_for(sampler: str) -> Callable[[Sampling, Attribute[Any], Any], None]:
    """Validate that an option is left alone unless `sampler` is the one that runs."""

    def check(sampling: Sampling, option: Attribute[Any], value: object) -> None:
        if sampling.sampler != sampler and value != option.default:
            raise ValueError(f"'{option.name}' is an option of sampler {sampler!r}, not {sampling.sampler!r}")

    return check


@define(eq=False, frozen=True)  # frozen, so that no option can be set past the check of the others
class Sampling:
    """Makes images. Its arguments are the section `[sampling]`.

    Raises:
        ValueError: naming the argument that is out of its range or that the chosen sampler does not read.
    """

    sampler: str = field(default="ddim", validator=one_of(("ddim", "ddpm")))
    steps: int = field(default=50, validator=ge(1))  # calls of the network; at most diffusion.timesteps
    spacing: str = field(default="trailing", validator=one_of(SPACINGS))  # see sampling_timesteps
    # ddim only: how much of DDPM's noise is added back in each step, 0 to 1
    eta: float = field(default=0.0, validator=and_(ge(0), le(1), _only_for("ddim")))
    # ddpm only: the variance of that noise
    variance: str = field(
        default="fixed_small", validator=and_(one_of(("fixed_small", "fixed_large")), _only_for("ddpm"))
    )
    clip_sample: bool = True  # clamp every predicted image to [-1, 1]
    batch_size: int = field(default=256, validator=ge(1))  # images a call of the network

    def sample(
        self,
        net: Net,
        diffusion: Diffusion,
        shape: Sequence[int],
        generators: Sequence[Generator],
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
        noise: Tensor | None = None,
    ) -> Tensor:
        """Return one image for each generator.

        All noise of image k comes from `generators[k]`, so it does not matter which other images are made, or
        how many at a time: image k is the same to the bit wherever the network's result for it is. Matrix
        products and convolutions choose their algorithm by batch size; with them it is the same to rounding.

        With `clip_sample` the noise is recomputed from the clamped image, so that the two still make up x_t;
        without it, a step is an affine map of x_t and the network's output. Eval mode is the caller's to set.

        Args:
            net: called as net(x_t, timesteps) with x_t of `dtype` and int64 timesteps of shape n.
            diffusion: the objective that the network was trained with.
            shape: of one image, c h w.
            generators: one an image; on the CPU, so that the noise is the same on every device.
            device: where the network is.
            dtype: of x_t, float32 or float64. The noise is drawn in float32 whatever it is.
            noise: x_T to start from, n c h w; the generators then only give the noise of the steps.

        Returns:
            `dtype` of shape n c h w on `device`; in [-1, 1] with `clip_sample`.

        Raises:
            ValueError: if there are more steps than `diffusion` has timesteps, `dtype` is another one, or
                `noise` has another shape.
        """
        visited = sampling_timesteps(diffusion.timesteps, self.steps, self.spacing)
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{dtype} would round small steps away: use float32, and autocast in the net")
        images = torch.empty(len(generators), *shape, device=device, dtype=dtype)
        if noise is not None and noise.shape != images.shape:
            raise ValueError(f"noise has shape {tuple(noise.shape)}, expected {tuple(images.shape)}")
        # Not inference_mode: a tensor that the network makes in it and keeps, such as a table of positions,
        # could never take part in a backward pass.
        with torch.no_grad():
            for start in range(0, len(images), self.batch_size):
                rows = slice(start, start + self.batch_size)
                x = _standard_normal(shape, generators[rows], images.device) if noise is None else noise[rows]
                images[rows] = self._denoise(net, diffusion, x.to(images), visited, generators[rows])
        return images

    def _denoise(
        self, net: Net, diffusion: Diffusion, x: Tensor, visited: list[int], generators: Sequence[Generator]
    ) -> Tensor:
        # Floats from the float64 table: exact for every dtype, and nothing to fetch from a device.
        levels = [*diffusion.noise_schedule.alphas_cumprod[visited].tolist(), 1.0]
        for t, (level, level_prev) in zip(visited, pairwise(levels), strict=True):
            alpha, sigma = sqrt(level), sqrt(1 - level)
            output = net(x, torch.full((len(x),), t, device=x.device)).to(x.dtype)
            x0, noise = diffusion.parametrization.x0_and_noise(output, x, alpha, sigma)
            if self.clip_sample:
                x0 = x0.clamp(-1, 1)
                noise = noise_from_x0(x, x0, alpha, sigma)
            if self.sampler == "ddim":
                x_prev, std = ddim_step(x0, noise, level, level_prev, self.eta)
            else:
                x_prev, std = ddpm_step(x, x0, level, level_prev, self.variance)
            # Without noise to add none is drawn, so the chain is deterministic given x_T.
            x = x_prev + std * _standard_normal(x.shape[1:], generators, x.device) if std else x_prev
        return x
