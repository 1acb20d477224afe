"""Checks that the samples of a sampler are right, and that its error falls with its order of convergence."""

import math
from itertools import pairwise

import torch
from torch import Generator, Tensor, nn

from hookdiff.authors.gaussian import gaussian_flow, gaussian_prediction, normal_quantiles
from hookdiff.diffusion.chain import Chain
from hookdiff.diffusion.clipping import NoClipping
from hookdiff.diffusion.diffusion import Diffusion
from hookdiff.diffusion.guidance import ClassifierFree
from hookdiff.diffusion.process import IMAGE, Point
from hookdiff.diffusion.sampling import Sampling
from hookdiff.diffusion.solvers import Solver

_MEAN, _STD = 0.3, 0.5  # of the pixels
_PROCESSES = ("flow", "vp", "edm")
_NOISIEST, _CLEAREST = 10.0, 0.1  # sigma / alpha between which the order is measured
_FEW, _MANY = 16, 128  # steps
_NUM, _SHAPE, _STEPS = 4096, (1, 2, 2), 1000  # number, shape and steps of the samples


class _Exact(Chain):
    """A chain with the best network for Gaussian pixels, in float64, and one generator for all noise."""

    def predict(self, x: Tensor, at: Point) -> tuple[Tensor, Tensor]:
        return gaussian_prediction(x, at.alpha, at.sigma, _MEAN, _STD)

    def noised(self, mean: Tensor, std: float) -> Tensor:
        return mean + std * torch.randn(mean.shape, generator=self.generators[0], dtype=mean.dtype)


def assert_converges(solver: Solver, order: float | None = None, *, tolerance: float = 0.3) -> None:
    """Raise AssertionError unless the error of a sampler falls with the number of steps to the power of `order`.

    The network is the best one for pixels from N(0.3, 0.5²), in float64, for the processes "flow", "vp" and "edm". The
    error is the distance to the exact probability flow, from sigma / alpha = 10 to 0.1 in steps of equal ratio. From 16
    to 128 steps, the error must fall as steps^-p, and p may differ from `order` by `tolerance`.

    A multistep method may begin with steps of a lower order, as long as their error is small at the start.

    Then 4,096 samples are drawn from pure noise, in 1,000 steps. Their mean and standard deviation must be those of the
    pixels, within 2 % of the deviation. For a sampler that adds noise, only this is checked.

    Args:
        solver: the sampler, such as `Heun()`.
        order: such as 2; None for a sampler that adds noise.
        tolerance: largest difference of p from `order`.
    """
    if not isinstance(solver, Solver):
        raise TypeError(f"expected a sampler, such as Heun(), not {solver!r}")
    for process in _PROCESSES:
        diffusion = Diffusion(process)
        slope = None if order is None else _wrong_slope(solver, diffusion, order, tolerance)
        if facts := slope or _wrong_samples(solver, diffusion):
            raise AssertionError(f"{type(solver).__name__}, process {process!r}: {facts}")


def _chain(diffusion: Diffusion, steps: int) -> Chain:
    unused = nn.Identity()
    return _Exact(unused, diffusion, NoClipping(), ClassifierFree(), steps, {}, [Generator().manual_seed(0)])


def _wrong_slope(solver: Solver, diffusion: Diffusion, order: float, tolerance: float) -> str | None:
    few, many = (_error(solver, diffusion, steps) for steps in (_FEW, _MANY))
    slope = math.log(few / many) / math.log(_MANY / _FEW) if few and many else math.inf
    if abs(slope - order) <= tolerance:
        return None
    return (
        f"the error falls as steps^-{slope:.2f}, expected steps^-{order:g}: {few:.2g} after {_FEW} steps, {many:.2g} "
        f"after {_MANY}"
    )


def _error(solver: Solver, diffusion: Diffusion, steps: int) -> float:
    """Return the largest difference from the exact flow."""
    fall = math.log(_CLEAREST / _NOISIEST) / steps
    points = [diffusion.process.at(_NOISIEST * math.exp(k * fall)) for k in range(steps + 1)]
    first, last = ((point.alpha, point.sigma) for point in (points[0], points[-1]))
    quantiles = normal_quantiles(8).view(8, 1, 1, 1)
    x = start = first[0] * _MEAN + math.hypot(first[0] * _STD, first[1]) * quantiles
    chain = _chain(diffusion, steps)
    for now, after in pairwise(points):
        x = solver.step(chain, x, now, after)
    return float((x - gaussian_flow(start, first, last, _MEAN, _STD)).abs().max())


def _wrong_samples(solver: Solver, diffusion: Diffusion) -> str | None:
    chain = _chain(diffusion, _STEPS)
    pixels = _NUM * math.prod(_SHAPE)
    order = torch.randperm(pixels, generator=chain.generators[0])
    x = normal_quantiles(pixels)[order].view(_NUM, *_SHAPE) * diffusion.process.initial_scale
    for now, after in pairwise((*Sampling(solver, _STEPS).points(diffusion), IMAGE)):
        x = solver.step(chain, x, now, after)
    mean, std = float(x.mean()), float(x.std())
    if max(abs(mean - _MEAN), abs(std - _STD)) <= 0.02 * _STD:
        return None
    return f"its samples have the mean {mean:.3f} and the deviation {std:.3f}, but the data has {_MEAN} and {_STD}"
