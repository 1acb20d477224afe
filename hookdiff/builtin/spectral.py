"""Spectral norm in training: the singular vectors follow the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field
from torch import Tensor

from hookdiff.hookspecs import hookimpl
from hookdiff.models.spectral import SETTLING, DividedBySigma, normalised

if TYPE_CHECKING:
    from hookdiff.loop import Loop


@define(eq=False)
class SpectralNorm:
    """Takes one iteration of the power method an update, for the layers that [model] spectral_norm has chosen."""

    _layers: list[tuple[DividedBySigma, Tensor]] = field(init=False)

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        """Find the vectors of given weights, which a file need not have; a run that resumes has its own."""
        self._layers = normalised(loop.model)
        if loop.progress.position == 0:
            self._follow(SETTLING)

    @hookimpl(trylast=True)
    def before_step(self) -> None:
        """Follow the weights; last, so that who keeps what a step began with has the vectors of before it."""
        self._follow(1)

    def _follow(self, times: int) -> None:
        for divided, weight in self._layers:
            divided.iterate(weight, times)
