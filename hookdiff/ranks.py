"""Ranks: the number of this process among those that train together, and values that all of them agree on."""

from collections.abc import Callable
from typing import TypeVar

from torch import distributed

from hookdiff.errors import UserError

Value = TypeVar("Value")


def rank() -> int:
    """Return the number of this process: 0 unless torch.distributed is set up."""
    return distributed.get_rank() if _is_set_up() else 0


def num_ranks() -> int:
    """Return the number of processes that train together: 1 unless torch.distributed is set up."""
    return distributed.get_world_size() if _is_set_up() else 1


def _is_set_up() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def first_rank_says(value: Value) -> Value:
    """Return the `value` of the first rank; all ranks must call this, and wait for one another.

    Decisions that depend on the clock need it: if two processes disagree whether an evaluation is due, both wait for
    ever, one in a collective of the evaluation, the other in a collective of the next step.
    """
    if num_ranks() == 1:
        return value
    agreed = [value]
    distributed.broadcast_object_list(agreed, src=0)  # finds the device that the backend talks over
    return agreed[0]


def gathered(value: Value) -> list[Value]:
    """Return the `value` of each rank, in their order, on all of them; all ranks must call this."""
    if num_ranks() == 1:
        return [value]
    found: list[Value] = [value] * num_ranks()
    distributed.all_gather_object(found, value)
    return found


def gathered_or_raised(call: Callable[[], Value]) -> list[Value]:
    """Return what `call` returns on each rank, as `gathered` does; an error on one rank is raised on all of them.

    Else the others would wait for ever. They raise it with the same message, as a UserError, ValueError or
    RuntimeError.
    """
    if num_ranks() == 1:
        return [call()]
    try:
        found = call()
    except Exception as error:  # raised again, as soon as the other ranks know
        own = next((kind for kind in (UserError, ValueError) if isinstance(error, kind)), RuntimeError)
        gathered((own, str(error)))
        raise
    problems: list[tuple[type[Exception], str] | None] = gathered(None)
    for problem in filter(None, problems):
        kind, message = problem
        raise kind(f"on another rank: {message}")
    return gathered(found)
