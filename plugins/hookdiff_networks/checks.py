"""Checks of the networks' options and inputs; a message names the nearest value that fits."""

import math

import torch
from torch import Tensor


def check_counts(least: int = 1, most: int = 2**40, **counts: int) -> None:
    """Raise ValueError unless each of `counts` is between `least` and `most`."""
    for name, count in counts.items():
        if not least <= count <= most:
            nearest = least if count < least else most
            raise ValueError(
                f"{name}={count} is {'less' if count < least else 'more'} than {nearest}; nearest: {nearest}"
            )


def check_dropout(dropout: float) -> None:
    """Raise ValueError unless `dropout` is in [0, 1)."""
    if not 0 <= dropout < 1:  # a NaN fails this too
        raise ValueError(f"dropout={dropout} is not in [0, 1); nearest: {0.99 if dropout >= 1 else 0.0}")


def check_images(x: Tensor, in_channels: int, divisor: int, reason: str) -> None:
    """Raise ValueError, with the `reason` for `divisor`, unless `x` is n in_channels h w in multiples of `divisor`."""
    if x.ndim != 4 or x.shape[1] != in_channels:
        raise ValueError(
            f"x has shape {tuple(x.shape)}, expected (n, {in_channels}, h, w) for in_channels={in_channels}"
        )
    height, width = x.shape[2:]
    if min(height, width) < 1 or height % divisor or width % divisor:
        raise ValueError(
            f"images of {width}x{height} do not fit, expected multiples of {divisor} for {reason}; "
            f"nearest width: {nearest_multiples(width, divisor)}, height: {nearest_multiples(height, divisor)}"
        )


def check_timesteps(timesteps: Tensor, num: int) -> None:
    """Raise ValueError unless `timesteps` has one number per image, in a dtype that does not round."""
    if timesteps.shape != (num,):
        raise ValueError(f"timesteps has shape {tuple(timesteps.shape)}, expected ({num},): one per image")
    if timesteps.dtype in (torch.bfloat16, torch.float16):
        raise ValueError(f"timesteps is {timesteps.dtype}, which rounds large times, expected integers or float32")


def check_text(text: Tensor | None, mask: Tensor | None, num: int, text_dim: int) -> None:
    """Raise ValueError unless `text` fits `num` images and `text_dim` (0: no text), and `mask` fits the text.

    The values of the mask are checked only on the CPU, as are those of labels.
    """
    if not text_dim:
        if names := [name for name, tensor in (("text", text), ("text_mask", mask)) if tensor is not None]:
            raise ValueError(
                f"the model got {' and '.join(names)} and was built without text: set text_dim, or give no text"
            )
        return
    if text is None:
        raise ValueError(
            f"the model was built with text_dim={text_dim} and got no text: call it as "
            'model(x, timesteps, text=text), in a config by diffusion.conditions = ["text"]'
        )
    if text.ndim != 3 or text.shape[::2] != (num, text_dim) or not text.is_floating_point():
        raise ValueError(
            f"text has shape {tuple(text.shape)} of {text.dtype}, expected ({num}, tokens, {text_dim}) of floats: one "
            f"per image, for text_dim={text_dim}"
        )
    if mask is None:
        return
    if mask.shape != text.shape[:2]:
        raise ValueError(f"text_mask has shape {tuple(mask.shape)}, expected {tuple(text.shape[:2])}: one per token")
    is_read = mask.dtype != torch.bool and mask.device.type == "cpu" and not torch.compiler.is_compiling()
    if is_read and not ((mask == 0) | (mask == 1)).all():
        raise ValueError(f"text_mask has values of {mask.dtype} other than 0 and 1, expected 1 for tokens that count")


def nearest_multiples(size: int, divisor: int) -> str:
    """Return the positive multiples of `divisor` around `size`, as "28 or 32"; or `size` alone, if it is a multiple."""
    below, above = size // divisor * divisor, -(-size // divisor) * divisor
    return f"{below} or {above}" if 0 < below < above else str(above or divisor)


def nearest_divisor(number: int, size: int) -> int:
    """Return the divisor of `number` that is nearest to `size`."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return min([*small, *(number // n for n in small)], key=lambda n: abs(n - size))
