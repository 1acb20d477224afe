"""Recognises a training that had diverged before the step that is not finite.

Losses alone cannot show a divergence: with one sample in a batch, the losses of a healthy run may differ by a factor of
a million. But the weights of a healthy run hardly grow within a few updates.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from attrs import define, evolve
from torch import Tensor

from hookdiff import Loop
from hookdiff.machine import norms

REMEMBERED = 10  # updates that are remembered
GROWN = 100.0  # a loss or gradient norm that grew by this factor is a divergence ...
MOVED = 1.5  # ... if the weights grew by this factor
RUINED = 10.0  # weights that grew by this factor are a divergence, whatever the losses
_JUMP, _CALM, _NUM_CALM = 1000.0, 10.0, 3  # a jump of the loss after calm updates comes from the batch
_HIGHEST = 0.01  # learning rate that is suggested


@define(frozen=True)
class Update:
    """An update, with the largest of its learning rates, and the loss and gradient norm that led to it."""

    step: int
    loss: float
    grad_norm: float
    rate: Any  # a float; before `on_host` a scalar tensor, if the optimizer keeps its rate on the device


def rate_of(loop: Loop) -> float | Tensor:
    """Return the largest learning rate of the next update, without waiting for the device."""
    rates = [group["lr"] for optimizer in loop.optimizers for group in optimizer.param_groups]
    on_device = [rate for rate in rates if isinstance(rate, Tensor)]
    if not on_device:
        return max(map(float, rates), default=0.0)
    return torch.stack([torch.as_tensor(rate, device=on_device[0].device).float() for rate in rates]).max()


def on_host(updates: Sequence[Update]) -> list[Update]:
    """Return `updates` with their rates as floats."""
    return [evolve(update, rate=float(update.rate)) for update in updates]


@torch.no_grad()
def size_of(loop: Loop) -> Tensor:
    """Return the L2 norm of the weights that are trained, as a scalar on the device."""
    size: Tensor = torch.linalg.vector_norm(norms(loop.gradients.parameters, loop.gradients.dtype))
    return size


def divergence(loop: Loop, updates: Sequence[Update], sizes: Sequence[float], size: float, loss: float) -> str | None:
    """Return a text about the divergence that the last `updates` show; None if they show none.

    sizes: the norms of the weights at one or two earlier updates. size: their norm now. loss: the loss of the step that
    is not finite when it is computed without autocast, if that loss is finite; else NaN.
    """
    if not updates:
        return None
    losses = [update.loss for update in updates] + ([loss] if math.isfinite(loss) else [])
    begin, end, growth = _rise(losses)
    rise = _rise([update.grad_norm for update in updates])
    before = min(sizes)
    num_weights = sum(weight.numel() for weight in loop.gradients.parameters)
    # Weights that began at zero may grow by any factor.
    is_ruined = size >= RUINED * before and size > math.sqrt(num_weights)
    has_grown = size >= MOVED * before and max(growth, rise[2]) >= GROWN
    if not (is_ruined or has_grown) or _is_of_one_batch(losses, updates):
        return None
    seen = growth >= _CALM
    rate = max(update.rate for update in (updates[begin:end] if seen else updates))
    shown = sorted({begin, (begin + end + 1) // 2, end})
    numbers = ", ".join(_short(losses[index]) for index in shown)
    why = f"loss {numbers}" if seen else f"the norm of the weights grew from {_short(before)} to {_short(size)}"
    calm = [update for update in updates[begin:end] if update.loss < _CALM * losses[begin]] if seen else updates[:1]
    sound = calm[-1].step - 1  # the loss of an update is that of the weights before it
    start = f"from a checkpoint of step {sound:,} or earlier" if sound else "from the start"
    lower = f"try {min(rate / 100, _HIGHEST):.1g} {start}"
    return f"the learning rate {rate:g} is too high: {why}; {lower}, as later weights are ruined"


def _rise(values: Sequence[float]) -> tuple[int, int, float]:
    """Return the two positions between which positive `values` grew most, and the factor."""
    best, low = (0, 0, 1.0), 0
    for place, value in enumerate(values):
        if values[low] > 0 and value / values[low] > best[2]:
            best = low, place, value / values[low]
        if 0 < value < values[low] or values[low] <= 0:
            low = place
    return best


def _is_of_one_batch(losses: Sequence[float], updates: Sequence[Update]) -> bool:
    """Return whether the loss jumped in one update, after calm updates at the same or a higher learning rate."""
    for end in range(_NUM_CALM, len(losses)):
        before = losses[:end]
        if losses[end] > _JUMP * max(before):
            rates = [update.rate for update in updates[:end]]
            return _rise(before)[2] < _CALM and max(rates) < 2 * min(rates)
    return False


def _short(value: float) -> str:
    """Return a number with two digits, such as 0.98, 25 or 2.5e4."""
    return f"{value:.2g}".replace("e+0", "e").replace("e+", "e")
