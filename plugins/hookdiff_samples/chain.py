"""What the sampler of a picture was, and the denoising of some images, recorded while they are made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from hookdiff import Loop, SampleRequest
from hookdiff.diffusion import Chain, ClassifierFree, Diffusion, Point, Sampling, Solver
from hookdiff.log import Panel, to_uint8
from hookdiff.options import as_toml


def about(loop: Loop, weights: str) -> dict[str, Any]:
    """Return what a picture of `weights` says about the sampler that plugins leave, with the options of each part.

    It is nothing if the sampler is not hookdiff's.
    """
    sampler, objective = loop.sample(SampleRequest(0, weights=weights)).sampler or loop.sampler, loop.objective
    if not (isinstance(sampler, Sampling) and isinstance(objective, Diffusion)):
        return {}
    fitted = sampler.fit(objective)
    parts = {name: as_toml(getattr(fitted, name)) for name in ("sampler", "spacing", "clipping", "guidance")}
    used = {name: part.pop("use") for name, part in parts.items()}
    scale = {"guidance_scale": parts["guidance"].pop("scale")} if isinstance(fitted.guidance, ClassifierFree) else {}
    precision = {"precision": fitted.precision} if fitted.precision != "float32" else {}
    options = {name: part for name, part in parts.items() if part}
    return {**used, "steps": fitted.steps, **scale, **precision, "options": options}


@define(eq=False)
class Recorded(Solver):
    """Makes the steps of `solver`, and keeps x_t of the first `num` images of the first chain that comes to its end."""

    solver: Solver
    num: int
    points: list[Point] = field(init=False, factory=list)  # from noise to image
    frames: list[Tensor] = field(init=False, factory=list)  # uint8, num c h w, one for each point
    _chain: Chain | None = field(init=False, default=None)

    def step(self, chain: Chain, x: Tensor, start: Point, end: Point) -> Tensor:
        after = self.solver.step(chain, x, start, end)
        if not self.is_complete:
            if chain is not self._chain:  # also when an earlier chain did not fit in memory
                self._chain, self.points, self.frames = chain, [], []
                self._keep(chain, x, start)
            self._keep(chain, after, end)
        return after

    @property
    def is_complete(self) -> bool:
        """Whether a chain has come to its end."""
        return bool(self.points) and not self.points[-1].sigma

    def _keep(self, chain: Chain, x: Tensor, at: Point) -> None:
        # A process that adds noise to a full image has larger values than one that mixes them.
        shown = x[: self.num] / max(1.0, math.hypot(at.alpha, at.sigma))
        self.points.append(at)
        self.frames.append(to_uint8(chain.diffusion.denormalize(shown)))

    def strip(self, shares: Sequence[float], num: int) -> Panel:
        """Return a row for each of `num` images; its columns show x_t after these shares of the steps, 0 to 1.

        Shares that lead to the same step have one column.
        """
        chosen = list(dict.fromkeys(round(share * (len(self.frames) - 1)) for share in shares))
        images = torch.stack([self.frames[k][:num] for k in chosen], dim=1).flatten(0, 1)
        return Panel(images, len(chosen), column_names=[_name(self.points[k]) for k in chosen])


def _name(at: Point) -> str:
    if not at.sigma:
        return "image"
    return f"t {at.time}" if isinstance(at.time, int) else f"sigma {at.sigma:.2g}"
