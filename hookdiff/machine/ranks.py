"""Ranks: the number of this process among those that train together, and the values that they exchange.

A single process is rank 0 of 1, and nothing here costs anything. `joining` makes several processes ranks of one run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed

from hookdiff.errors import OnAnotherRank, UserError

Value = TypeVar("Value")

PATIENCE = timedelta(hours=4)  # of a rank that waits between steps for another
# The group with this patience, by the default group; if it outlived that group, its threads would abort Python.
_patient: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


class _StandIn(threading.local):
    """A stand-in for torch.distributed in this thread: its rank, the number of ranks, a function that gathers."""

    world: tuple[int, int, Callable[[str, Any], list[Any]]] | None = None


_stand_in = _StandIn()


@contextmanager
def standing_in(number: int, num: int, gather: Callable[[str, Any], list[Any]]) -> Iterator[None]:
    """Let this thread be a rank during the `with`, for tests in one process.

    `gather(kind, value)` returns the values of all ranks, which must all ask for the same kind.
    """
    _stand_in.world = number, num, gather
    try:
        yield
    finally:
        _stand_in.world = None


def rank() -> int:
    """Return the number of this process: 0 unless torch.distributed is set up."""
    if _stand_in.world:
        return _stand_in.world[0]
    return distributed.get_rank() if is_set_up() else 0


def num_ranks() -> int:
    """Return the number of processes that train together: 1 unless torch.distributed is set up."""
    if _stand_in.world:
        return _stand_in.world[1]
    return distributed.get_world_size() if is_set_up() else 1


def is_set_up() -> bool:
    """Return whether this process has joined others."""
    return distributed.is_available() and distributed.is_initialized()


def _between_steps() -> Any:
    """Return the group for exchanges between steps; all ranks must call this at its first use."""
    default = distributed.group.WORLD
    if default not in _patient:
        _patient.clear()
        _patient[default] = distributed.new_group(timeout=PATIENCE)
    return _patient[default]


def forget_groups() -> None:
    """Drop the groups, because this process leaves them."""
    _patient.clear()


def first_rank_says(value: Value) -> Value:
    """Return the `value` of the first rank; all ranks must call this, and wait for one another.

    Decisions by the clock need this. If two ranks disagree whether an evaluation is due, both wait for ever,
    one in a collective of the evaluation, the other in a collective of the next step.
    """
    if num_ranks() == 1:
        return value
    if _stand_in.world:
        said: list[Value] = _stand_in.world[2]("the value of the first rank", value)
        return said[0]
    agreed = [value]
    distributed.broadcast_object_list(agreed, src=0, group=_between_steps())
    return agreed[0]


def gathered(value: Value) -> list[Value]:
    """Return the values of all ranks, in the order of the ranks; all ranks must call this."""
    if num_ranks() == 1:
        return [value]
    if _stand_in.world:
        return _stand_in.world[2]("the values of all ranks", value)
    values: list[Value] = [value] * num_ranks()
    distributed.all_gather_object(values, value, group=_between_steps())
    return values


def gathered_or_raised(call: Callable[[], Value]) -> list[Value]:
    """Return the results of `call` of all ranks, as `gathered` does. An error on one rank is raised on all ranks.

    Otherwise the other ranks would wait for ever. They raise an OnAnotherRank, ValueError or RuntimeError with the same
    message.
    """
    if num_ranks() == 1:
        return [call()]
    try:
        value = call()
    except Exception as error:  # raised again, as soon as the other ranks know
        message = f"on rank {rank()}: {error}"
        if isinstance(error, UserError | OSError):
            gathered(OnAnotherRank(message, getattr(error, "exit_code", 1)))
        else:
            gathered((ValueError if isinstance(error, ValueError) else RuntimeError)(message))
        raise
    problems: list[Exception | None] = gathered(None)
    for problem in filter(None, problems):
        raise problem from OnAnotherRank(str(problem))
    return gathered(value)


def first_rank_does(call: Callable[[], Value]) -> Value:
    """Call `call` on the first rank only, and return its result, or raise its error, on all ranks."""
    results: list[Any] = gathered_or_raised(lambda: call() if rank() == 0 else None)
    value: Value = results[0]
    return value


def agree(flag: bool) -> bool:
    """Return whether `flag` is true on any rank; all ranks must call this."""
    return any(gathered(flag))


def summed(values: Tensor) -> Tensor:
    """Return the sum of `values` over the ranks, on the same device; all ranks must call this."""
    if num_ranks() == 1:
        return values
    total = values.detach().clone()
    if _stand_in.world:
        return torch.stack(_stand_in.world[2](f"a sum of {tuple(total.shape)} {total.dtype}", total)).sum(0)
    distributed.all_reduce(total)
    return total


class Exchange:
    """Sums the numbers of a step over the ranks, and copies them to the host, each in one call.

    The same messages carry the numbers that `vote` returns on each rank. `votes` are the sums of these numbers; a
    single rank has none.
    """

    def __init__(self, vote: Callable[[], list[float]] = list) -> None:
        self._vote = vote
        self._sums: Sequence[Tensor] = ()  # of the votes, until they are on the host
        self.votes: list[float] = []

    def anew(self) -> Exchange:
        """Return an Exchange with the same votes, for passes outside of the step."""
        return Exchange(self._vote)

    def summed(self, *parts: Tensor) -> Sequence[Tensor]:
        """Return the sums of `parts` (n each, of one dtype and device) over the ranks; all ranks must call this."""
        votes = torch.tensor(self._vote(), dtype=torch.float64).to(parts[0])
        *sums, votes = torch.split(summed(torch.cat([*parts, votes])), [*map(len, parts), len(votes)])
        self._sums = votes.unbind()
        return sums

    def to_host(self, values: Sequence[Tensor]) -> list[float]:
        """Return `values` (scalars of one dtype and device) as numbers on the host."""
        numbers = torch.stack([*values, *self._sums]).tolist()
        self._sums, self.votes = (), numbers[len(values) :]
        return numbers[: len(values)]


def reduced(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mean of each of `values` over the ranks, and the sums of each pair (sum, count), as `loop.log` takes.

    Values are numbers or scalar tensors, with the same names on all ranks. All ranks must call this. A single process
    gets the values unchanged.
    """
    if num_ranks() == 1:
        return dict(values)
    numbers = [number for value in values.values() for number in (value if isinstance(value, tuple) else (value,))]
    device = next((number.device for number in numbers if isinstance(number, Tensor)), torch.device("cpu"))
    tensors = [torch.as_tensor(number, dtype=torch.float64, device=device) for number in numbers]
    sums = iter(summed(torch.stack(tensors)).unbind()) if tensors else iter(())
    return {
        name: (next(sums), next(sums)) if isinstance(value, tuple) else next(sums) / num_ranks()
        for name, value in values.items()
    }


def stacked(values: Tensor) -> Tensor:
    """Return the `values` (n) of each rank: ranks n, on the same device; all ranks must call this."""
    rows = values.new_zeros(num_ranks(), len(values))
    rows[rank()] = values
    return summed(rows)
