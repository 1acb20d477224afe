"""A sampling chain: the calls of the network and the random draws that solvers need."""

from collections.abc import Sequence

import torch
from attrs import define, field
from torch import Generator, Tensor

from hookdiff.data.memory import to_device
from hookdiff.diffusion.clipping import Clipping
from hookdiff.diffusion.diffusion import Diffusion, Given, Net
from hookdiff.diffusion.guidance import Guidance
from hookdiff.diffusion.prediction import noise_from_x0
from hookdiff.diffusion.process import Point


def standard_normal(shape: Sequence[int], generators: Sequence[Generator], device: torch.device) -> Tensor:
    """Return noise of `shape` from each of `generators`, stacked: float32 on `device`."""
    drawn = [torch.randn(*shape, generator=g, device=g.device, dtype=torch.float32) for g in generators]
    return to_device(torch.stack(drawn), device)


@define(eq=False)
class _Network:
    """The network of a chain at one point; a guidance calls it."""

    net: Net
    diffusion: Diffusion
    at: Point

    def __call__(self, noisy: Tensor, given: Given, net: Net | None = None) -> Tensor:
        at = self.at
        dtype = torch.int64 if isinstance(at.time, int) else noisy.dtype
        times = torch.full((len(noisy),), at.time, device=noisy.device, dtype=dtype)
        return self.diffusion.predict(self.net if net is None else net, noisy, times, given, at.alpha, at.sigma)

    def without(self, given: Given) -> dict[str, Tensor]:
        return self.diffusion.without(given)


@define(eq=False)
class Chain:
    """The context of one batch of images during sampling, which a solver gets in each step."""

    net: Net
    diffusion: Diffusion
    clipping: Clipping
    guidance: Guidance
    steps: int  # from noise to image
    given: Given  # labels and conditions
    generators: Sequence[Generator]
    # The image that each earlier step predicted, and the point of the step, for solvers that need them.
    earlier: list[tuple[Tensor, Point]] = field(factory=list)

    def predict(self, x: Tensor, at: Point) -> tuple[Tensor, Tensor]:
        """Return the clipped image (x0) and the noise that the network predicts for `x` at the point `at`."""
        diffusion = self.diffusion
        output = self.guidance.output(_Network(self.net, diffusion, at), x, at, self.given).to(x.dtype)
        x0, noise = diffusion.prediction.x0_and_noise(output, x, at.alpha, at.sigma)
        if not self.clipping.clips:
            return x0, noise
        x0 = diffusion.normalize(self.clipping.clip(diffusion.denormalize(x0)))
        return x0, noise_from_x0(x, x0, at.alpha, at.sigma)

    def noised(self, mean: Tensor, std: float) -> Tensor:
        """Return `mean` plus fresh noise. A `std` of 0 draws no noise: a deterministic chain depends only on x_T."""
        return mean + std * standard_normal(mean.shape[1:], self.generators, mean.device) if std else mean
