"""Guidance by a network that is worse."""

from attrs import define
from torch import Tensor

from hookdiff.diffusion import Ask, Given, Guidance, Net, Point


@define(frozen=True)
class AwayFrom(Guidance):
    """d + (scale - 1) (d - g), for the outputs d of the network and g of the `guide`.

    It is Karras et al. 2024 (arXiv 2406.02507), eq. 3. Outside of the `interval` of sigma / alpha it is d, and the
    guide is not called.
    """

    guide: Net
    scale: float
    interval: tuple[float, float]

    @property
    def use(self) -> str:
        return "autoguidance"

    def output(self, ask: Ask, x: Tensor, at: Point, given: Given) -> Tensor:
        own = ask(x, given)
        low, high = self.interval
        if not low <= at.ratio <= high:
            return own
        return own + (self.scale - 1) * (own - ask(x, given, net=self.guide))
