"""The counts of a run, its length, and intervals at which something is due."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from attrs import Attribute, asdict, define, field, setters
from attrs.validators import ge, lt, optional

from hookdiff.errors import UserError
from hookdiff.options.every import Every, is_time, parse_every
from hookdiff.options.fields import about

if TYPE_CHECKING:
    from hookdiff.data.feed import Feed

AUTO = "auto"  # in a config: a micro_batch that is measured when the run starts
Verdict = Literal["skip", "rollback", "stop"]  # the decision of on_nan
Outcome = Literal["updated", "void", "skipped", "stopped", "held"]


@define(frozen=True)
class Step:
    """The outcome of one batch."""

    step: int  # updates so far, this one included if there was one
    # void: the loss scale was too high; skipped: by on_nan or make_batch; stopped: by on_nan; held: by optimizer_step
    outcome: Outcome
    loss: float
    grad_norm: float  # L2 over all gradients at true scale, before any clipping


_COUNT = [ge(0), lt(2**63)]


@define(on_setattr=setters.NO_OP)  # validated when made from a file; each step sets them
class Progress:
    """The counts of a run. All four are saved, so a resumed run need not derive them."""

    step: int = field(validator=_COUNT)  # updates that changed the weights
    position: int = field(validator=_COUNT)  # batches consumed, void ones too; all randomness is keyed by it
    epoch: int = field(validator=_COUNT)  # epochs completed
    samples: int = field(validator=_COUNT)  # consumed in the current epoch, over all ranks

    def consume(self, samples: int, outcome: Outcome, loss: float = math.nan, grad_norm: float = math.nan) -> Step:
        """Count a batch of `samples` samples as consumed, and its update, if any.

        A batch that stopped the run is not counted, so that a resumed run begins with it.
        """
        if outcome != "stopped":
            self.position += 1
            self.samples += samples
            self.step += outcome == "updated"
        return Step(self.step, outcome, loss, grad_norm)

    def end_epoch(self) -> None:
        """Begin the next epoch."""
        self.epoch += 1
        self.samples = 0

    def state_dict(self) -> dict[str, int]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


def _is_size(instance: object, attribute: Attribute[Any], value: Any) -> None:
    if value == "auto":
        raise ValueError(
            f"{attribute.name} = 'auto' is for a config; in a script leave it out and add "
            "'micro_batch': FitMicroBatch() to the plugins"
        )
    optional(ge(1))(instance, attribute, value)


@define(frozen=True, kw_only=True)
class LoopConfig:
    """The loop's own options."""

    steps: int | None = field(
        default=None,
        validator=optional(ge(1)),
        metadata=about("length of the run; required unless `epochs` is set", "updates"),
    )
    epochs: int | None = field(
        default=None,
        validator=optional(ge(1)),
        metadata=about("length of the run; required unless `steps` is set", "passes over the data"),
    )
    seed: int = field(default=0, validator=_COUNT, metadata=about("seed of all randomness"))
    batch_size: int = field(
        default=128, validator=ge(1), metadata=about("samples of an update, over all micro-batches and ranks")
    )
    micro_batch: int | None = field(default=None, validator=_is_size)
    log_every: int = field(default=50, validator=ge(1), metadata=about("interval between two log entries", "steps"))
    max_time: Every = field(
        default=Every(0),
        converter=parse_every,
        validator=is_time,
        metadata=about('time after which the run saves, stops and exits with 75 ("3 h"); 0 is no limit'),
    )

    def check_length(self) -> None:
        """Raise UserError if nothing limits the run."""
        if self.steps is None and self.epochs is None and not self.max_time.amount:
            raise UserError(
                "nothing ends this run: give LoopConfig steps, epochs or max_time, as LoopConfig(steps=1000)"
            )

    def planned_steps(self, feed: Feed) -> int | None:
        """Return the step at which a run on `feed` ends if all batches change the weights; None if it has no limit."""
        return self.expected_steps(Progress(0, 0, 0, 0), feed)

    def expected_steps(self, progress: Progress, feed: Feed) -> int | None:
        """Return the planned steps of a run that is at `progress`."""
        totals = [] if self.steps is None else [self.steps]
        if self.epochs is not None:
            totals.append(progress.step + feed.num_batches(self.epochs, progress.epoch, progress.samples))
        return min(totals, default=None)

    def is_done(self, progress: Progress) -> bool:
        """Return whether a run at `progress` has reached its length."""
        steps = self.steps is not None and progress.step >= self.steps
        return steps or (self.epochs is not None and progress.epoch >= self.epochs)
