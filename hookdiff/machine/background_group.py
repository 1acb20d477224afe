"""A group in which ranks communicate from a thread that runs beside the training."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

from torch import distributed

from hookdiff.errors import OnAnotherRank
from hookdiff.machine.ranks import PATIENCE, is_set_up, num_ranks, rank

Value = TypeVar("Value")


class BackgroundGroup:
    """A group in which ranks communicate from a thread beside the training, such as one that writes checkpoints.

    The group keeps collective operations of these threads apart from the training. All ranks must make and close the
    group, and one thread of each rank may use it.
    """

    def __init__(self) -> None:
        self._group: Any = None if num_ranks() == 1 else distributed.new_group(backend="gloo", timeout=PATIENCE)

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None and is_set_up():
            distributed.destroy_process_group(self._group)
        self._group = None

    def gathered_or_raised(self, call: Callable[[], Value]) -> list[Value]:
        """Return the results of `call` of all ranks, in the order of the ranks, on every rank.

        If `call` fails on a rank, all ranks raise the error of the lowest such rank, so that they all decide alike.

        Raises:
            ConnectionError: an OSError, if a rank has ended.
        """
        if self._group is None:
            return [call()]
        value, failure = None, None
        try:
            value = call()
        except Exception as error:  # raised below, as soon as the other ranks know
            failure = error
        results: list[Any] = [None] * num_ranks()
        try:
            distributed.all_gather_object(results, (value, failure and _portable(failure)), group=self._group)
        except RuntimeError as error:
            here = f"; here: {failure}" if failure else ""
            raise ConnectionError(f"another rank has ended; its own message says why{here}") from (failure or error)
        for other, (_, problem) in enumerate(results):
            if problem:
                raise problem from (failure if other == rank() else OnAnotherRank(f"on rank {other}: {problem}"))
        return [value for value, _ in results]


def _portable(error: Exception) -> Exception:
    """Return `error`, or a RuntimeError with its text if another process could not unpickle it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
