"""How a learning rate falls: shares of the highest rate, as functions of how far a run is."""

from __future__ import annotations

import math
from collections.abc import Sequence


def linear(done: float) -> float:
    """Return 1 at 0 and 0 at 1, in a straight line."""
    return 1 - done


def cosine(done: float) -> float:
    """Return 1 at 0 and 0 at 1, in half a cosine (Loshchilov & Hutter 2017, arXiv 1608.03983, eq. 5)."""
    return (1 + math.cos(math.pi * done)) / 2


def one_minus_sqrt(done: float) -> float:
    """Return 1 at 0 and 0 at 1, fast first (Hägele et al. 2024, arXiv 2405.18392)."""
    return 1 - math.sqrt(done)


def inverse_sqrt(step: int, reference: int) -> float:
    """Return 1 up to the step `reference`, and sqrt(reference / step) beyond (Karras et al. 2024, EDM2, eq. 67)."""
    return 1 / math.sqrt(max(step / reference, 1))


def cycle_done(step: float, period: int, growth: float) -> float:
    """Return how much of the cycle under way is done: in [0, 1), 0 where a cycle starts.

    The first has `period` steps, each other `growth` >= 1 times those of the one before.
    """
    if growth == 1:
        return step % period / period
    length = float(period)
    while step >= length:
        step -= length
        length *= growth
    return step / length


def steps_of(amount: float, total: int) -> float:
    """Return `amount` in steps: a share of `total` below 1, or steps."""
    return amount * total if amount < 1 else amount


def drops(step: int, at: Sequence[float]) -> int:
    """Return how many of the steps `at` have been reached."""
    return sum(step >= each for each in at)
