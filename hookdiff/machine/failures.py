"""The errors that end a run on its ranks, shared so that the first rank can record which came first, and where."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count

from attrs import define, field
from torch import distributed

from hookdiff.errors import OnAnotherRank
from hookdiff.machine.joining import is_of_ranks
from hookdiff.machine.ranks import is_set_up, num_ranks, rank

_MOMENT = 3.0  # seconds in which the other ranks notice a lost rank
_runs = count()  # runs of this process


def is_from_elsewhere(error: BaseException) -> bool:
    """Return whether another rank's error caused `error`: a lost connection, or an error sent by that rank."""
    return any(is_of_ranks(cause) or isinstance(cause, OnAnotherRank) for cause in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


@define
class Failures:
    """The errors of one run on its ranks; a single process shares none."""

    _key: str = field(default="hookdiff/failed", init=False)  # of the first error, in the store that the ranks share

    def begin(self) -> None:
        """Forget an earlier run; all ranks must call this."""
        self._key = f"hookdiff/failed/{next(_runs)}"

    def add(self, error: BaseException) -> None:
        """Record that `error` has ended the run on this rank; the first error that no other rank has caused counts."""
        if not is_set_up():
            return
        with suppress(RuntimeError):  # the store has ended
            store = distributed.distributed_c10d._get_default_store()
            if not is_from_elsewhere(error):
                store.compare_set(self._key, "", f"rank {rank()}: {type(error).__name__}: {error}")
            store.set(f"{self._key}/{rank()}", "")

    def first(self, text: str) -> str:
        """Return the text of the first error, with its rank; `text` describes the error on this rank.

        If ranks have recorded lost connections only, the text names the ranks that have recorded nothing.
        """
        if not is_set_up():
            return text
        silent, until = list(range(num_ranks())), time.monotonic() + _MOMENT
        with suppress(RuntimeError):
            store = distributed.distributed_c10d._get_default_store()
            while silent and time.monotonic() < until:
                time.sleep(0.05)
                silent = [other for other in silent if not store.check([f"{self._key}/{other}"])]
                if store.check([self._key]):  # checked last: a rank records its error first, then its number
                    return str(store.get(self._key).decode(errors="replace"))
            if silent:
                return f"rank {rank()}: {text}; nothing was heard of rank {', '.join(map(str, silent))}"
        return f"rank {rank()}: {text}"
