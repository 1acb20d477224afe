"""Whether and why a run is over, when it began, and requests to stop or to save it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, Literal, cast, get_args

from hookdiff.loop.counts import LoopConfig, Outcome, Progress
from hookdiff.loop.readonly import ReadOnly
from hookdiff.machine.ranks import gathered, num_ranks, rank

Reason = Literal["done", "time", "signal", "plugin", "on_nan", "error"]  # why a run is over
FOR_GOOD = ("done", "plugin")  # after another reason, a run is to be resumed


class End(ReadOnly):
    """Whether and why the part of a run in this process is over, and when it began.

    With several ranks, `stop` or `save` on one of them is a request, which the ranks exchange with the norms of the
    next step. A request to stop made between two steps ends the run before the second step changes a weight, as on one
    rank.
    """

    def __init__(self) -> None:
        self.reason: Final[Reason | None] = None  # None: the run goes on
        self.message: Final = ""  # for people
        self.start_time: Final = time.monotonic()
        self._asked: Final[tuple[Reason, str] | None] = None  # request that the ranks have not agreed on yet
        self._is_early: Final = False  # the request was made before the current step
        self._is_save_asked: Final = False  # by a request that the ranks have not agreed on yet
        self._is_save_due: Final = False  # at the end of this step
        self._set(_is_made=True)

    def begin(self) -> None:
        """Forget an earlier end, and start the clock."""
        self._set(start_time=time.monotonic(), reason=None, message="", _asked=None, _is_early=False)
        self._set(_is_save_asked=False, _is_save_due=False)

    def stop(self, reason: Reason | str = "plugin", message: str = "") -> None:
        """End the run after the current step, on all ranks. `message` stands in the summary of the run.

        Any other text as `reason`, as in `stop("good enough")`, begins the message, and the reason is "plugin". The
        first call counts, but "on_nan" replaces another reason: weights that are not finite may be found last.
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

    def save(self) -> None:
        """Save the run at the end of the current step, on all ranks; it goes on. See the hook `on_save_request`."""
        self._set(_is_save_asked=True, _is_save_due=self._is_save_due or num_ranks() == 1)

    def begin_save(self) -> bool:
        """Return whether a save is due now, and forget its request."""
        is_due = self._is_save_due
        if is_due:
            self._set(_is_save_asked=False, _is_save_due=False)
        return is_due

    def conclude(self, reason: Reason, message: str = "") -> None:
        """End the run for a reason that all ranks have."""
        if self.reason is None or (reason == "on_nan" and self.reason not in ("on_nan", "error")):
            self._set(reason=reason, message=message)

    def begin_step(self) -> bool:
        """Return whether the run is over; if not, note whether a request was made before this step."""
        self._set(_is_early=self._asked is not None)
        return self.reason is not None

    def votes(self) -> list[float]:
        """Return whether this rank asks to stop, asked it before the step, and asks to save (0 or 1), for a sum."""
        requests = (self._asked is not None, self._is_early, self._is_save_asked)
        return [] if num_ranks() == 1 else [*map(float, requests)]

    def count(self, is_void: bool, votes: Sequence[float]) -> Outcome | None:
        """Agree on a request, if the summed `votes` hold one; return the outcome of a step that ends here."""
        if any(votes[2:]):
            self._set(_is_save_due=True)
        if any(votes[:1]) and not self.reason:
            self._agree()
        return "stopped" if any(votes[1:2]) else "void" if is_void else None

    def _agree(self) -> None:
        requests = [asked for asked in gathered(self._asked) if asked]
        if requests:
            self.conclude(*max(requests, key=lambda asked: asked[0] == "on_nan"))  # else that of the lowest rank

    def is_agreed(self) -> bool:
        """Return whether the run is over on any rank. All ranks must call this."""
        if num_ranks() > 1 and not self.reason:
            self._agree()
        return self.reason is not None

    def is_reached(self, config: LoopConfig, progress: Progress) -> bool:
        """Return whether the run is over, by `stop` or by a limit of `config`; only the first rank reads the clock."""
        limit = config.max_time.amount
        if config.is_done(progress):
            if not self.is_agreed():
                self.conclude("done")
        elif limit and rank() == 0 and time.monotonic() - self.start_time >= limit:
            self.stop("time")
        return self.reason is not None

    def close(self, error: BaseException | None) -> Reason:
        """Return the final reason. After an `error` it is "error", and the message is the first error's text."""
        if error is not None and self.reason != "error":
            self._set(reason="error", message=f"{type(error).__name__}: {error}")
        reason = self.reason or "plugin"
        self._set(reason=reason)
        return reason
