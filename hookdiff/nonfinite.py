"""What is known about a step whose loss or gradients are not finite, before any weight has moved."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from attrs import define, field

from hookdiff import state
from hookdiff.dispatch import HookError
from hookdiff.hookspecs import Verdict
from hookdiff.progress import Step

if TYPE_CHECKING:
    from torch import Tensor

    from hookdiff.data.batch import Batch
    from hookdiff.loop import Loop

log = logging.getLogger("hookdiff")


@define(frozen=True, eq=False)
class NonFinite:
    """Where a run met a value that is not finite."""

    step: int  # updates made before it
    position: int  # the batch, counted from the start of the run
    loss: float
    parameters: list[str]  # whose gradients are not finite, in the model's order
    samples: list[int]  # positions in the `Batch` with a loss that is not finite, where the objective tells
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


_SHOWN = 8  # samples
_NEXT: dict[Verdict, str] = {
    "stop": "; --resume meets this step again: add --skip-batches 1 to pass over it, --lr X to go on in smaller steps",
    "rollback": "; back to the last checkpoint, and on with the batches after this one",
    "skip": "; the batch is left out",
}


def _some(told: Sequence[str], total: int) -> str:
    return ", ".join(told) + (f" and {total - len(told)} more" if total > len(told) else "")


def _first(values: Tensor, rows: list[int]) -> list[float]:
    chosen: list[float] = values[rows[:_SHOWN]].tolist()
    return chosen


def examine(loop: Loop, batch: Batch) -> NonFinite | None:
    """Take the second look; None when loss and gradients are finite and only the float32 norm was not."""
    names, loss = loop.gradients.nonfinite(), loop.gradients.loss
    if not names and math.isfinite(loss):
        return None
    per_sample = loop.output.per_sample
    rows = [] if per_sample is None else (~per_sample.isfinite()).nonzero().flatten().tolist()
    indices = [] if batch.indices is None else _first(batch.indices, rows)
    files = [loop.feed.describe(int(index)) for index in indices]
    return NonFinite(loop.progress.step, loop.progress.position, loss, names, rows, batch, files)


def decide(loop: Loop, batch: Batch, report: NonFinite) -> Step:
    """Ask the plugins what to do about `report`, and do it: no weight has moved."""
    verdict = strongest(cast(Sequence[Verdict], loop.hook.on_nan(loop=loop, report=report)))
    log.error("%s\n  on_nan: %s%s", report, verdict, _NEXT[verdict])
    loss, norm = loop.gradients.loss, loop.gradients.total_norm
    if verdict == "stop":
        # The batch is not counted as consumed: who resumes meets it again, on purpose.
        loop.stop("on_nan")
        return Step(loop.progress.step, "stopped", loss, norm)
    if verdict == "rollback":
        state.roll_back(loop)
    return loop.progress.consume(batch.total, "skipped", loss, norm)


def strongest(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the strongest of "stop" > "rollback" > "skip"; nobody's verdict is "stop"."""
    order: tuple[Verdict, ...] = ("skip", "rollback", "stop")
    for verdict in verdicts:
        if verdict not in order:
            raise HookError(f"on_nan returned {verdict!r}; expected one of {', '.join(map(repr, order))}")
    return max(verdicts, key=order.index, default="stop")
