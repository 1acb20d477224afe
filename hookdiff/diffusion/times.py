"""Which noise levels a training step looks at."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from hookdiff.diffusion.process import Process

_MOST = 1 - 2.0**-24  # the largest float32 below 1


def uniforms(num: int, generator: Generator, *, stratified: bool = False) -> Tensor:
    """Return `num` numbers, uniform in [0, 1), float32, on the generator's device.

    `stratified`: one in each of `num` equal parts of the range, in random order, which makes the mean over a batch
    less noisy; each number alone is still uniform (Kingma et al. 2021, arXiv 2107.00630, have the
    variant with one random offset for all).
    """
    drawn = torch.rand(num, generator=generator, device=generator.device, dtype=torch.float32)
    if not stratified:
        return drawn
    part = torch.randperm(num, generator=generator, device=generator.device)
    return ((part + drawn) / num).clamp_(max=_MOST)  # the sum may have been rounded up


def _normal(fraction: Tensor, mean: float, std: float) -> Tensor:
    # By the inverse of the distribution function, so that stratified fractions become stratified times.
    normal: Tensor = torch.special.ndtri(fraction.clamp(2.0**-25, _MOST))
    return mean + std * normal


def uniform(process: Process, fraction: Tensor, mean: float, std: float) -> Tensor:
    """Equally often from everywhere on the way from image to noise."""
    return process.from_fraction(fraction)


def logit_normal(process: Process, fraction: Tensor, mean: float, std: float) -> Tensor:
    """More often from the middle of the way: its logit is N(mean, std²). Esser et al. 2024 (arXiv 2403.03206)."""
    return process.from_fraction(_normal(fraction, mean, std).sigmoid().clamp(max=_MOST))


def log_normal(process: Process, fraction: Tensor, mean: float, std: float) -> Tensor:
    """With ln(sigma / alpha) from N(mean, std²). Karras et al. 2022 (arXiv 2206.00364), table 1."""
    return process.from_log_ratio(_normal(fraction, mean, std))


TIMES: dict[str, Callable[[Process, Tensor, float, float], Tensor]] = {
    "uniform": uniform,
    "logit_normal": logit_normal,
    "log_normal": log_normal,
}
# Mean and standard deviation where the config gives none: those of the papers.
USUAL: dict[str, tuple[float, float]] = {
    "uniform": (0.0, 1.0),
    "logit_normal": (0.0, 1.0),
    "log_normal": (-1.2, 1.2),
}
