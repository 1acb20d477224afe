"""The report of a step with a loss or gradients that are not finite, made before any weight has moved."""

import logging
import math
from collections.abc import Callable
from typing import Any

from attrs import define, field

from hookdiff.data.batch import Batch
from hookdiff.data.feed import Feed
from hookdiff.errors import HookError, listed
from hookdiff.loop.counts import Outcome, Progress, Verdict
from hookdiff.loop.end import End
from hookdiff.loop.gradients import Gradients
from hookdiff.machine.ranks import gathered, rank
from hookdiff.models.objective import LossOutput

logger = logging.getLogger("hookdiff")

_SHOWN = 8  # samples in a message
_STRENGTH: tuple[Verdict, ...] = ("skip", "rollback", "stop")
_NEXT: dict[Verdict, str] = {
    "stop": "; the weights are those before this step, which a resumed run repeats",
    "rollback": "; the run returns to the last checkpoint, if any, and continues with the batches after this one",
    "skip": "; the run continues with the next batch",
}


@define(frozen=True, eq=False)
class NonFinite:
    """A step in which the loss or a gradient is not finite."""

    step: int  # updates made before it
    position: int  # the batch, counted from the start of the run
    loss: float
    parameters: list[str]  # with a gradient that is not finite, by name, in the model's order
    samples: list[int]  # positions in `batch` with a loss that is not finite, if losses per sample are known
    batch: Batch  # with the draws of the step; this rank's share
    names: list[str] = field(factory=list)  # files of the `samples` of all ranks, if the data knows them
    times: list[float] = field(factory=list)  # timesteps of these samples, if the objective draws them
    notes: dict[str, str] = field(factory=dict)  # texts that plugins add in on_nan, by title

    def __str__(self) -> str:
        lines = [f"step {self.step + 1:,} (batch {self.position:,}) is not finite: loss {self.loss}"]
        if self.parameters:
            lines.append(f"gradients not finite: {listed(self.parameters, 3)}")
        if self.names:
            lines.append(f"samples: {listed(self.names, _SHOWN)}")
        if self.times:
            lines.append(f"their timesteps: {listed([f'{time:g}' for time in self.times], _SHOWN)}")
        lines += [f"{title}: {text}".replace("\n", "\n    ") for title, text in self.notes.items()]
        return "\n  ".join(lines)


def examine(batch: Batch, output: LossOutput, gradients: Gradients, progress: Progress, feed: Feed) -> NonFinite | None:
    """Return the report of a step with a loss or a norm that is not finite.

    None if the loss and all gradients are finite, and only the square of a gradient overflows float32.
    """
    names, loss = gradients.nonfinite(), gradients.loss
    if not names and math.isfinite(loss):
        return None
    rows = [] if output.per_sample is None else (~output.per_sample.isfinite()).nonzero().flatten().tolist()
    indices = [] if batch.indices is None else batch.indices[rows].tolist()
    times = batch.draws["timesteps"][rows].tolist() if "timesteps" in batch.draws else []
    of_ranks = gathered(([feed.describe(index) for index in indices], times))
    described, times = ([value for part in column for value in part] for column in zip(*of_ranks, strict=True))
    return NonFinite(progress.step, progress.position, loss, names, rows, batch, described, times)


def apply_verdicts(report: NonFinite, verdicts: Any, roll_back: Callable[[], bool], end: End) -> Outcome:
    """Carry out the `verdicts` of on_nan, and return the outcome; `roll_back` returns False without a checkpoint."""
    verdict = decide(report, verdicts)
    if verdict == "skip" or (verdict == "rollback" and roll_back()):
        return "skipped"
    end.conclude("on_nan", "" if verdict == "stop" else "there is no checkpoint to go back to")
    return "stopped"


def decide(report: NonFinite, verdicts: Any) -> Verdict:
    """Return the strongest verdict of all ranks, and log it: "stop" > "rollback" > "skip". Default: "stop"."""
    for verdict in verdicts:
        if verdict not in _STRENGTH:
            raise HookError(f"on_nan returned {verdict!r}; return one of {', '.join(map(repr, _STRENGTH))}")
    of_ranks: list[Verdict] = [verdict for part in gathered(list(verdicts)) for verdict in part]
    strongest: Verdict = max(of_ranks, key=_STRENGTH.index, default="stop")
    if rank() == 0:
        logger.error("%s\n  on_nan: %s%s", report, strongest, _NEXT[strongest])
    return strongest
