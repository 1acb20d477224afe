"""Ranks as threads of one process, which take turns: a test of a plugin needs no other processes, and no network.

A thread runs until it waits for an exchange with other threads. Then the next thread runs, so that nothing happens at
random. If the ranks wait for different exchanges, or if a rank ends while another waits, the error names the place of
each rank: real processes would hang there.
"""

from __future__ import annotations

import random
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from hookdiff.machine import ranks

Result = TypeVar("Result")


class OutOfStep(AssertionError):
    """The ranks wait for different exchanges; as processes they would wait for ever."""


def on_ranks(num: int, work: Callable[[int], Result]) -> list[Result]:
    """Return the results of `work(rank)` on each of `num` ranks.

    The global generators begin with the same states on all ranks. The error of a rank is raised here.

    Raises:
        OutOfStep: if the ranks wait for different exchanges.
    """
    together, results = _Together(num), dict[int, Result]()
    begin = _generators()

    def run(rank: int) -> None:
        try:
            together.wait_for_turn(rank)
            _restore(begin)
            with ranks.standing_in(rank, num, lambda kind, value: together.gathered(rank, kind, value)):
                results[rank] = work(rank)
        except BaseException as error:  # raised by the main thread
            together.errors[rank] = error
        finally:
            together.leave(rank)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _restore(begin)
    # The error of a rank comes first: an OutOfStep of the other ranks follows from it.
    if error := min(together.errors.values(), key=lambda error: isinstance(error, OutOfStep), default=None):
        raise error
    return [results[rank] for rank in range(num)]


class _Together:
    """Gives the ranks their turns, and exchanges their values."""

    def __init__(self, num: int) -> None:
        self.errors: dict[int, BaseException] = {}
        self._num = num
        self._changed = threading.Condition()
        self._turn = 0
        self._running = set(range(num))
        self._asked: dict[int, tuple[str, str, Any]] = {}  # kind, place and value, by rank
        self._answers: dict[int, list[Any] | OutOfStep] = {}

    def wait_for_turn(self, rank: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == rank)

    def gathered(self, rank: int, kind: str, value: Any) -> list[Any]:
        """Return the values of all ranks, which must all wait for the same `kind` of exchange."""
        generators = _generators()
        with self._changed:
            self._asked[rank] = kind, _place(), value
            self._pass_on()
            self._changed.wait_for(lambda: self._turn == rank)
            answer = self._answers.pop(rank)
        _restore(generators)
        if isinstance(answer, OutOfStep):
            raise answer
        return answer

    def leave(self, rank: int) -> None:
        with self._changed:
            self._running.discard(rank)
            self._pass_on()

    def _pass_on(self) -> None:
        """Give the turn to a rank that does not wait; if all ranks wait, answer them first."""
        if not self._running - self._asked.keys():
            self._answer()
        self._turn = min(self._running - self._asked.keys(), default=-1)
        self._changed.notify_all()

    def _answer(self) -> None:
        asked, self._asked = dict(sorted(self._asked.items())), {}
        if len({kind for kind, _, _ in asked.values()}) == 1 and len(asked) == self._num:
            self._answers = {rank: [value for _, _, value in asked.values()] for rank in asked}
            return
        waiting = [f"rank {rank} waits in {place}, for {kind}" for rank, (kind, place, _) in asked.items()]
        gone = [f"rank {rank} has ended" for rank in range(self._num) if rank not in asked]
        self._answers = {rank: OutOfStep("; ".join([*waiting, *gone])) for rank in asked}


def _generators() -> tuple[Any, Any, Tensor]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _restore(states: tuple[Any, Any, Tensor]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def _place() -> str:
    """Return the innermost place outside of this package's `ranks`, as "plugin.py, line 12 (act)"."""
    inside = {Path(__file__), Path(str(ranks.__file__))}
    frame = next(frame for frame in reversed(traceback.extract_stack()) if Path(frame.filename) not in inside)
    return f"{Path(frame.filename).name}, line {frame.lineno} ({frame.name})"
