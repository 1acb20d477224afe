"""The sampler `example_sampler`: a step of second order by two calls of the network."""

from typing import ClassVar

from attrs import define, field
from torch import Tensor

from hookdiff.diffusion import Chain, Point, Solver
from hookdiff.options import about, between


@define(frozen=True)
class ExampleSampler(Solver):
    """DPM-Solver++(2S), of second order: Lu et al. 2022 (arXiv 2211.01095), algorithm 1."""

    middle: float = field(
        default=0.5,
        validator=between(0, 1, open_ends=True),
        metadata=about("place of the second call within a step, in half the log-SNR"),
    )
    usual_steps: ClassVar[int] = 25

    def step(self, chain: Chain, x: Tensor, start: Point, end: Point) -> Tensor:
        x0, _ = chain.predict(x, start)
        if start.alpha and end.sigma:  # at pure noise and at the image the log-SNR is infinite: a step of first order
            inner = chain.diffusion.process.at(start.ratio ** (1 - self.middle) * end.ratio**self.middle)
            x0_inner, _ = chain.predict(_moved(x, x0, start, inner), inner)
            x0 = x0 + (x0_inner - x0) / (2 * self.middle)
        return _moved(x, x0, start, end)


def _moved(x: Tensor, x0: Tensor, start: Point, end: Point) -> Tensor:
    """Return x at `end`, for `x` at `start` and an image `x0` that stays the same between them."""
    return end.sigma / start.sigma * x + (end.alpha - start.alpha * end.sigma / start.sigma) * x0
