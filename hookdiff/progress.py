"""The counts of a run, its length, and intervals at which something is due."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from typing import Any, Final, Literal, cast, get_args

from attrs import Attribute, asdict, define, field, setters, validators

from hookdiff.errors import UserError
from hookdiff.options import about
from hookdiff.ranks import first_rank_says, gathered, num_ranks, rank
from hookdiff.readonly import ReadOnly

_UNITS = {"step": 1, "steps": 1, "epoch": 1, "epochs": 1, "s": 1, "sec": 1, "min": 60, "h": 3600}
AUTO = "auto"  # in a config: a micro_batch that is measured when the run starts
_SUFFIXES = {"steps": "", "epochs": " epochs", "seconds": " s"}

Reason = Literal["done", "time", "signal", "plugin", "on_nan", "error"]  # why a run is over
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


_COUNT = [validators.ge(0), validators.lt(2**63)]


@define(on_setattr=setters.NO_OP)  # validated when made from a file; each step sets them
class Progress:
    """The counts of a run. All four are saved, so that a resumed run does not have to derive any."""

    step: int = field(validator=_COUNT)  # updates that changed the weights
    position: int = field(validator=_COUNT)  # batches consumed, void ones too; all randomness is keyed by it
    epoch: int = field(validator=_COUNT)  # epochs completed
    samples: int = field(validator=_COUNT)  # consumed in the current epoch, over all ranks

    def consume(self, samples: int, outcome: Outcome, loss: float = math.nan, grad_norm: float = math.nan) -> Step:
        """Count one batch of `samples` samples as consumed, and the update if there was one.

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


@define(frozen=True)
class Every:
    """An interval at which something is done; an amount of 0 means never. `parse_every` reads it from a config."""

    amount: float
    unit: str = "steps"  # steps, epochs or seconds

    def __str__(self) -> str:
        amount = int(self.amount) if float(self.amount).is_integer() else self.amount
        return f"{amount}{_SUFFIXES[self.unit]}"

    def after_step(self, step: int) -> bool:
        """Return whether it is due after update number `step` (1 is the first)."""
        return self.unit == "steps" and self.amount > 0 and step % int(self.amount) == 0

    def after_epoch(self, epoch: int) -> bool:
        """Whether it is due when `epoch` epochs are complete."""
        return self.unit == "epochs" and self.amount > 0 and epoch % int(self.amount) == 0


def parse_every(value: int | str | Every) -> Every:
    """Read `500`, `"500"`, `"2 epochs"` or `"15 min"`; units: step(s), epoch(s), s, sec, min, h.

    Raises ValueError for anything else.
    """
    if isinstance(value, Every):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e[-+]?\d+)?)\s*([a-z]*)\s*", str(value))
    unit = (match[2] or "steps") if match else ""
    if not match or isinstance(value, (bool, float)) or unit not in _UNITS:
        raise ValueError(f"expected steps (500), epochs ('2 epochs') or time ('15 min'), got {value!r}")
    kind = "steps" if unit.startswith("step") else "epochs" if unit.startswith("epoch") else "seconds"
    amount = float(match[1]) * _UNITS[unit]
    if not amount.is_integer() and (kind != "seconds" or math.isinf(amount)):
        raise ValueError(f"expected a whole number of {kind}, got {value!r}")
    return Every(amount, kind)


@define
class Due:
    """An `Every` with the clock that its time units need; with several ranks, the clock of the first one decides."""

    every: Every = field(converter=parse_every)
    _since: float = field(factory=time.monotonic)

    def after_step(self, step: int) -> bool:
        """Return whether it is due after update number `step`; the clock of a time unit then starts over.

        All ranks must call this: with a time unit they wait for the answer of the first.
        """
        if self.every.unit != "seconds" or not self.every.amount:
            return self.every.after_step(step)
        if not first_rank_says(time.monotonic() - self._since >= self.every.amount):
            return False
        self._since = time.monotonic()
        return True

    def after_epoch(self, epoch: int) -> bool:
        """Whether it is due when `epoch` epochs are complete."""
        return self.every.after_epoch(epoch)


def is_time(instance: object, attribute: Attribute[Every], value: Every) -> None:
    """Check that an `Every` is a time or 0, as an attrs validator; raises ValueError."""
    if value.amount and value.unit != "seconds":
        raise ValueError(f"{attribute.name} must be a time, as '30 min' or '3 h'")


def _is_size(instance: object, attribute: Attribute[Any], value: Any) -> None:
    if value == "auto":
        raise ValueError(
            f"{attribute.name} = 'auto' is for a config; in a script leave it out and add "
            "'micro_batch': FitMicroBatch() to the plugins"
        )
    validators.optional(validators.ge(1))(instance, attribute, value)


@define(frozen=True, kw_only=True)
class LoopConfig:
    """The loop's own options."""

    steps: int | None = field(
        default=None,
        validator=validators.optional(validators.ge(1)),
        metadata=about("length of the run; required unless `epochs` is set", "updates"),
    )
    epochs: int | None = field(
        default=None,
        validator=validators.optional(validators.ge(1)),
        metadata=about("length of the run; required unless `steps` is set", "passes over the data"),
    )
    seed: int = field(
        default=0, validator=[validators.ge(0), validators.lt(2**63)], metadata=about("seed of all randomness")
    )
    batch_size: int = field(
        default=128,
        validator=validators.ge(1),
        metadata=about("samples of an update, over all micro-batches and ranks"),
    )
    micro_batch: int | None = field(default=None, validator=_is_size)
    log_every: int = field(
        default=50, validator=validators.ge(1), metadata=about("interval between two log entries", "steps")
    )
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

    def planned_steps(self, num_batches: int) -> int | None:
        """Return the step at which a run whose batches all change the weights ends, or None without a limit.

        num_batches: batches of an epoch.
        """
        return self.expected_steps(Progress(0, 0, 0, 0), num_batches)

    def expected_steps(self, progress: Progress, num_batches: int) -> int | None:
        """Return the step at which the run ends if all further batches change the weights, or None without a limit.

        num_batches: batches of an epoch.
        """
        totals = [] if self.steps is None else [self.steps]
        if self.epochs is not None:
            made = -(-progress.samples // self.batch_size)  # batches of the current epoch
            totals.append(progress.step + (self.epochs - progress.epoch) * num_batches - made)
        return min(totals, default=None)

    def is_done(self, progress: Progress) -> bool:
        """Return whether a run at `progress` has the length that is asked for."""
        steps = self.steps is not None and progress.step >= self.steps
        return steps or (self.epochs is not None and progress.epoch >= self.epochs)


class End(ReadOnly):
    """Whether, why and since when the part of a run in this process is over.

    With several ranks, `stop` on one of them is a request. It travels with what the ranks exchange in the next step
    anyway. A request from between two steps ends the run before that step, as it would on one rank: the step has begun,
    but no weight has changed yet.
    """

    def __init__(self) -> None:
        self.reason: Final[Reason | None] = None  # None: it goes on
        self.message: Final = ""  # for people
        self.start_time: Final = time.monotonic()
        self._asked: Final[tuple[Reason, str] | None] = None  # request that the ranks have not agreed on yet
        self._is_early: Final = False  # it is from before the current step
        self._set(_is_made=True)

    def begin(self) -> None:
        """Forget an earlier end, and start the clock."""
        self._set(start_time=time.monotonic(), reason=None, message="", _asked=None, _is_early=False)

    def stop(self, reason: Reason | str = "plugin", message: str = "") -> None:
        """End the run after the current step, on all ranks. `message` stands in the summary of the run.

        A `reason` that is none of `Reason` is, or begins, the message of the reason "plugin": `stop("good enough")`.
        The first call counts, but "on_nan" replaces another reason: weights that are not finite may be found last.
        """
        if not (isinstance(reason, str) and isinstance(message, str)):
            raise TypeError(f"loop.stop takes a reason and a message, two strings, got {reason!r} and {message!r}")
        if reason not in get_args(Reason):
            reason, message = "plugin", ": ".join(filter(None, (reason, message)))
        reason = cast(Reason, reason)
        if num_ranks() == 1 or self.reason:
            self.conclude(reason, message)
        elif self._asked is None or reason == "on_nan":
            self._set(_asked=(reason, message))

    def conclude(self, reason: Reason, message: str = "") -> None:
        """End the run for a reason that all ranks have."""
        if self.reason is None or (reason == "on_nan" and self.reason not in ("on_nan", "error")):
            self._set(reason=reason, message=message)

    def begin_step(self) -> bool:
        """Return whether the run is over; if not, a request up to now is from before this step."""
        self._set(_is_early=self._asked is not None)
        return self.reason is not None

    def votes(self) -> list[float]:
        """Return what the ranks add up in a step: the number of requests, and of those from before the step."""
        return [] if num_ranks() == 1 else [float(self._asked is not None), float(self._is_early)]

    def count(self, is_void: bool, votes: Sequence[float]) -> Outcome | None:
        """Agree on a request, if the sums of the `votes` hold one; return the outcome of a step that ends here."""
        if any(votes) and not self.reason:
            self._agree()
        return "stopped" if any(votes[1:]) else "void" if is_void else None

    def _agree(self) -> None:
        requests = [asked for asked in gathered(self._asked) if asked]
        if requests:
            self.conclude(*max(requests, key=lambda asked: asked[0] == "on_nan"))  # else that of the lowest rank

    def is_agreed(self) -> bool:
        """Return whether the run is over, after all ranks have said so; all of them must call this."""
        if num_ranks() > 1 and not self.reason:
            self._agree()
        return self.reason is not None

    def is_reached(self, config: LoopConfig, progress: Progress) -> bool:
        """Return whether the run is over, by `stop` or by a limit of `config`; the clock is that of the first rank."""
        limit = config.max_time.amount
        if config.is_done(progress):
            if not self.is_agreed():
                self.conclude("done")
        elif limit and rank() == 0 and time.monotonic() - self.start_time >= limit:
            self.stop("time")
        return self.reason is not None

    def close(self, error: BaseException | None) -> Reason:
        """Return the final reason. After an `error` it is "error", and the message is the text of the first one."""
        if error is not None and self.reason != "error":
            self._set(reason="error", message=f"{type(error).__name__}: {error}")
        reason = self.reason or "plugin"
        self._set(reason=reason)
        return reason
