"""The report of a step that has a loss or gradients which are not finite, before any weight has moved."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from attrs import define, field
from torch import Tensor

from hookdiff.data import Batch, Feed
from hookdiff.errors import HookError
from hookdiff.gradients import Gradients
from hookdiff.objective import LossOutput
from hookdiff.progress import Progress, Verdict

log = logging.getLogger("hookdiff")

_SHOWN = 8  # samples
_STRENGTH: tuple[Verdict, ...] = ("skip", "rollback", "stop")
_NEXT: dict[Verdict, str] = {
    "stop": "; --resume meets this step again: add --skip-batches 1 to pass over it, --lr X to go on in smaller steps",
    "rollback": "; back to the last checkpoint, and on with the batches after this one",
    "skip": "; the batch is left out",
}


@define(frozen=True, eq=False)
class NonFinite:
    """A step in which the loss or a gradient is not finite."""

    step: int  # updates made before it
    position: int  # the batch, counted from the start of the run
    loss: float
    parameters: list[str]  # those that have a gradient which is not finite, in the model's order
    samples: list[int]  # positions in the `Batch` with a loss that is not finite, where the objective returns it
    batch: Batch  # with the draws of the step
    names: list[str] = field(factory=list)  # of the first of `samples`: their files, where the data knows them
    notes: dict[str, str] = field(factory=dict)  # what plugins add in on_nan, by title

    def __str__(self) -> str:
        lines = [f"step {self.step + 1} (batch {self.position}) is not finite: loss {self.loss}"]
        if self.parameters:
            lines.append(f"gradients not finite: {_some(self.parameters[:3], len(self.parameters))}")
        if self.names:
            lines.append(f"samples: {_some(self.names, len(self.samples))}")
        if self.samples and "timesteps" in self.batch.draws:
            times = _first(self.batch.draws["timesteps"], self.samples)
            lines.append(f"their timesteps: {_some([f'{time:g}' for time in times], len(self.samples))}")
        lines += [f"{title}: {text}".replace("\n", "\n    ") for title, text in self.notes.items()]
        return "\n  ".join(lines)


def _some(shown: Sequence[str], total: int) -> str:
    return ", ".join(shown) + (f" and {total - len(shown)} more" if total > len(shown) else "")


def _first(values: Tensor, rows: list[int]) -> list[float]:
    chosen: list[float] = values[rows[:_SHOWN]].tolist()
    return chosen


def examine(batch: Batch, output: LossOutput, gradients: Gradients, progress: Progress, feed: Feed) -> NonFinite | None:
    """Return what is not finite in the step, or None.

    A norm that is not finite asks for a second look: the square of a finite gradient may have overflowed float32.
    """
    if gradients.finite:
        return None
    names, loss = gradients.nonfinite(), gradients.loss
    if not names and math.isfinite(loss):
        return None
    rows = [] if output.per_sample is None else (~output.per_sample.isfinite()).nonzero().flatten().tolist()
    indices = [] if batch.indices is None else _first(batch.indices, rows)
    files = [feed.describe(int(index)) for index in indices]
    return NonFinite(progress.step, progress.position, loss, names, rows, batch, files)


def decide(report: NonFinite, verdicts: Any) -> Verdict:
    """Return the strongest of "stop" > "rollback" > "skip" and log it; no verdict at all is "stop"."""
    for verdict in verdicts:
        if verdict not in _STRENGTH:
            raise HookError(f"on_nan returned {verdict!r}; expected one of {', '.join(map(repr, _STRENGTH))}")
    strongest: Verdict = max(verdicts, key=_STRENGTH.index, default="stop")
    log.error("%s\n  on_nan: %s%s", report, strongest, _NEXT[strongest])
    return strongest
