"""Which of several processes this one is, and what they have to agree about."""

from __future__ import annotations

from torch import distributed


def rank() -> int:
    """Return the number of this process: 0 unless torch.distributed is set up."""
    return distributed.get_rank() if _is_set_up() else 0


def num_ranks() -> int:
    """Return how many processes train together: 1 unless torch.distributed is set up."""
    return distributed.get_world_size() if _is_set_up() else 1


def _is_set_up() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def first_rank_says(value: bool) -> bool:
    """Return the `value` of the first rank; all ranks have to ask, and wait for one another.

    For what goes by the clock, which no two processes read at the same moment: those that disagree whether something
    is due wait for ever, one in a collective of the evaluation and the other in that of the next step.
    """
    if num_ranks() == 1:
        return value
    said = [value]
    distributed.broadcast_object_list(said, src=0)  # finds the device that the backend talks over
    return said[0]
