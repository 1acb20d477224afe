"""Which of several processes this one is, and what they have to agree about."""

from __future__ import annotations


def this_rank() -> tuple[int, int, bool]:
    """Return (rank, number of ranks, whether it is the first): (0, 1, True) unless torch.distributed is set up."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        rank = distributed.get_rank()
        return rank, distributed.get_world_size(), rank == 0
    return 0, 1, True


def first_rank_says(value: bool) -> bool:
    """Return the `value` of the first rank; all ranks have to ask, and wait for one another.

    For what goes by the clock, which no two processes read at the same moment: those that disagree whether something
    is due wait for ever, one in a collective of the evaluation and the other in that of the next step.
    """
    if this_rank()[1] == 1:
        return value
    from torch import distributed

    told = [value]
    distributed.broadcast_object_list(told, src=0)  # finds the device that the backend talks over
    return told[0]
