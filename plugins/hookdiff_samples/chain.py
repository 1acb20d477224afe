"""Records the denoising of some images."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from attrs import define, field
from torch import Tensor

from hookdiff.diffusion import Chain, Point, Solver
from hookdiff.log import Panel, to_uint8

_VISIBLE = 5.0  # x_t looks like noise where log-SNR is below -5, and like the image above 5


@define(eq=False)
class Recorded(Solver):
    """Makes the steps of `solver`, and keeps x_t of the first `num` images of the first chain that reaches its end.

    `decode` turns values of the network into pictures, at each step or, with `decodes_late`, when `frames` is read.
    """

    solver: Solver
    num: int
    decode: Callable[[Tensor], Tensor]
    decodes_late: bool = False
    points: list[Point] = field(init=False, factory=list)  # the recorded points, from noise to image
    _kept: list[Tensor] = field(init=False, factory=list)  # num c h w, one for each point: uint8, or not yet decoded
    _chain: Chain | None = field(init=False, default=None)

    def step(self, chain: Chain, x: Tensor, start: Point, end: Point) -> Tensor:
        after = self.solver.step(chain, x, start, end)
        if not self.is_complete:
            if chain is not self._chain:  # a new chain, for example after one that did not fit in memory
                self._chain, self.points, self._kept = chain, [], []
                self._keep(chain, x, start)
            self._keep(chain, after, end)
        return after

    @property
    def is_complete(self) -> bool:
        """Whether a chain has come to its end."""
        return bool(self.points) and not self.points[-1].sigma

    def _keep(self, chain: Chain, x: Tensor, at: Point) -> None:
        # A process that adds noise to an image has larger values than a process that mixes image and noise.
        shown = x[: self.num] / max(1.0, math.hypot(at.alpha, at.sigma))
        self.points.append(at)
        shown = chain.diffusion.denormalize(shown)
        self._kept.append(shown if self.decodes_late else to_uint8(self.decode(shown)))

    @property
    def frames(self) -> list[Tensor]:
        """The pictures of x_t at each point: uint8, num c h w."""
        if self.decodes_late:
            self._kept, self.decodes_late = [to_uint8(self.decode(inputs)) for inputs in self._kept], False
        return self._kept

    def evenly(self, most: int) -> list[int]:
        """Return the indices of at most `most` points: the noise, x_t at equal steps of log-SNR, and the image.

        Points at equal distances would show little: most samplers make most steps where the noise hides the image. If
        two levels have the same nearest point, its number repeats.
        """
        levels = torch.linspace(-_VISIBLE, _VISIBLE, most).tolist()[1:-1]
        inner = range(1, len(self.points) - 1)
        near = [min(inner, key=lambda k: abs(self.points[k].log_snr - level)) for level in levels if inner]
        return [0, *near, len(self.points) - 1]

    def strip(self, columns: int, num: int) -> Panel:
        """Return a panel with a row for each of `num` images and a column for each point of `evenly(columns)`, once."""
        chosen = list(dict.fromkeys(self.evenly(columns)))
        images = torch.stack([self.frames[k][:num] for k in chosen], dim=1).flatten(0, 1)
        return Panel(images, len(chosen), column_names=[self.points[k].label for k in chosen])
