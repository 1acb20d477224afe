"""What the networks refuse, each with the nearest that they take."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def check_counts(least: int = 1, **counts: int) -> None:
    """Raise ValueError unless each of `counts` is at least `least`."""
    for name, count in counts.items():
        if count < least:
            raise ValueError(f"{name}={count} is less than {least}; nearest: {least}")


def check_dropout(dropout: float) -> None:
    """Raise ValueError unless `dropout` is in [0, 1)."""
    if not 0 <= dropout < 1:  # a NaN fails this too
        raise ValueError(f"dropout={dropout} is not in [0, 1); nearest: {0.99 if dropout >= 1 else 0.0}")


def check_images(x: Tensor, in_channels: int, divisor: int, whose: str) -> None:
    """Raise ValueError unless `x` is n in_channels h w, h and w being multiples of the `divisor` of `whose`."""
    if x.ndim != 4 or x.shape[1] != in_channels:
        raise ValueError(
            f"x has shape {tuple(x.shape)}, expected (n, {in_channels}, h, w): "
            f"the model was built with in_channels={in_channels}"
        )
    height, width = x.shape[2:]
    if min(height, width) < 1 or height % divisor or width % divisor:
        heights, widths = (nearest_multiples(side, divisor) for side in (height, width))
        nearest = either(f"{h}x{w}" for h, w in zip(heights, widths, strict=True))
        raise ValueError(
            f"images of {height}x{width} do not fit, expected multiples of {divisor} for {whose}; nearest: {nearest}"
        )


def check_timesteps(timesteps: Tensor, num: int) -> None:
    """Raise ValueError unless `timesteps` has one number an image, none of them rounded."""
    if timesteps.shape != (num,):
        raise ValueError(f"timesteps has shape {tuple(timesteps.shape)}, expected ({num},): one an image")
    if timesteps.dtype in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"timesteps is {timesteps.dtype}, which has rounded them (bfloat16 turns 999 into 1000), "
            "expected integers or float32"
        )


def check_labels(labels: Tensor | None, num: int, num_classes: int) -> None:
    """Raise ValueError unless there are labels if and only if there are classes, one an image and each in range.

    The range is looked at on the CPU alone: on a GPU the host would wait for the answer at every step.
    """
    if labels is None:
        if num_classes:
            raise ValueError(
                f"the model was built with num_classes={num_classes} and got no labels: call it as "
                "model(x, timesteps, labels), with -1 where there is no class"
            )
        return
    if not num_classes:
        raise ValueError("the model got labels and was built without classes: set num_classes, or give no labels")
    if labels.shape != (num,) or labels.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"labels has shape {tuple(labels.shape)} of {labels.dtype}, expected ({num},) of int64: one an image"
        )
    if labels.device.type == "cpu" and num and not torch.compiler.is_compiling():
        low, high = (int(label) for label in labels.aminmax())
        if low < -1 or high >= num_classes:
            wrong = low if low < -1 else high
            raise ValueError(
                f"labels has {wrong}, expected -1 (no class) to {num_classes - 1}: "
                f"the model was built with num_classes={num_classes}"
            )


def nearest_multiples(size: int, divisor: int) -> tuple[int, int]:
    """Return the positive multiples of `divisor` around `size`, twice the same one if it is alone."""
    above = math.ceil(size / divisor) * divisor or divisor
    return size // divisor * divisor or above, above


def nearest_divisor(number: int, size: int) -> int:
    """Return the divisor of `number` that is nearest to `size`."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return min([*small, *(number // n for n in small)], key=lambda n: abs(n - size))


def either(choices: Iterable[object]) -> str:
    """Return the different `choices` as "a or b"."""
    return " or ".join(dict.fromkeys(map(str, choices)))
