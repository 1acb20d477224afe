"""What the keys of [data] do to every picture, whatever it comes from.

Two stages. The first is the same for a picture each time, so its result can be kept: decode, resize, cut the centre.
The second is random (see augment.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy
import torch
from attrs import define, field, validators
from torch import Tensor
from torch.nn import functional

from hookdiff.data.decode import decode
from hookdiff.errors import nearest

_ALPHA = (2, 4)  # channels of grey and of RGB pixels with transparency


def _resize_fits(instance: Transforms, _: Any, resize: int | None) -> None:
    if resize is not None and instance.image_size is None:
        raise ValueError("needs image_size, the side of what is cut out")
    if resize is not None and instance.image_size is not None and resize < instance.image_size:
        raise ValueError(f"must be >= image_size, {instance.image_size}: {resize}")


def _is_share(_: Any, __: Any, flip: bool | float) -> None:
    if not 0 <= flip <= 1:
        raise ValueError(f"must be from 0 to 1, or true for a half: {flip}")


def _are_strengths(_: Any, __: Any, jitter: Sequence[float]) -> None:
    if not all(0 <= strength < math.inf for strength in jitter) or jitter[3] > 0.5:
        raise ValueError(f"must be >= 0, and the fourth, of hue, <= 0.5: {list(jitter)}")


def _is_colour(_: Any, __: Any, colour: str) -> None:
    from PIL import ImageColor

    try:
        ImageColor.getrgb(colour)
    except ValueError:
        close = nearest(colour, ImageColor.colormap)
        raise ValueError(f"must be a colour's name or '#rrggbb', not {colour!r}{close}") from None


@define(frozen=True, kw_only=True)
class Transforms:
    """How pictures become samples of one shape, and how they vary from epoch to epoch."""

    image_size: int | None = field(default=None, validator=validators.optional(validators.ge(2)))  # pixels, square
    resize: int | None = field(default=None, validator=_resize_fits)  # of the shorter side, before a random crop
    upscale: bool = False  # allow to enlarge
    channels: Literal[1, 3] | None = None  # grey or RGB; None: as the files are
    background: str = field(default="white", validator=_is_colour)  # behind what is transparent
    flip: bool | float = field(default=0.0, validator=_is_share)  # share of samples that are mirrored
    color_jitter: tuple[float, float, float, float] = field(
        default=(0.0, 0.0, 0.0, 0.0), validator=_are_strengths
    )  # of brightness, contrast, saturation, hue

    @property
    def side(self) -> int | None:
        """The side of what the first stage makes; None leaves pictures in their size."""
        return self.resize or self.image_size

    @property
    def first_stage(self) -> tuple[Any, ...]:
        """All that decides the first stage."""
        return self.side, self.upscale, self.channels, self.background

    @property
    def random(self) -> bool:
        """Whether the second stage does anything at random."""
        return self.side != self.image_size or bool(self.flip) or any(self.color_jitter)

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether pictures of `shape` (c h w) are as the first stage leaves them."""
        square = self.side is None or tuple(shape[1:]) == (self.side, self.side)
        return square and (self.channels is None or shape[0] == self.channels)

    def fit(self, image: Any) -> Tensor:
        """Return the first stage of a Pillow image, or of uint8 pixels c h w or h w: uint8, c h w.

        Pixels that are so already, floats too, are returned as they are. Raises ValueError for what cannot be
        fitted, and whatever Pillow raises on a broken file.
        """
        if isinstance(image, (Tensor, numpy.ndarray)):
            pixels = torch.as_tensor(image)
            pixels = pixels[None] if pixels.dim() == 2 else pixels
            if self.fits(pixels.shape) and not (pixels.dtype == torch.uint8 and pixels.shape[0] in _ALPHA):
                return pixels
            image = _as_picture(pixels)
        if self.side is not None:
            # A JPEG much larger than what is wanted is decoded at a half, a quarter or an eighth of its size.
            image.draft(None, (2 * self.side, 2 * self.side))
        image = decode(image, self.channels, self.background)
        if self.side is not None:
            image = _resized(image, self.side, self.upscale)
        pixels = torch.from_numpy(numpy.array(image))
        return pixels[None] if pixels.dim() == 2 else pixels.permute(2, 0, 1).contiguous()

    def fit_stack(self, images: Tensor) -> Tensor:
        """Return the first stage of `images` (n c h w, uint8, c 1 or 3) as one tensor.

        The same as that of `fit` for each, but for roundings, and many times faster.
        """
        return torch.cat([self._fit_chunk(chunk) for chunk in torch.split(images, 1024)])

    def _fit_chunk(self, images: Tensor) -> Tensor:
        channels, height, width = images.shape[1:]
        if self.channels == 1 and channels == 3:
            weights = torch.tensor([19595, 38470, 7471], device=images.device).view(1, 3, 1, 1)  # of Pillow
            images = ((images * weights).sum(1, keepdim=True) + (1 << 15) >> 16).to(torch.uint8)
        if self.side is not None and (height, width) != (self.side, self.side):
            wide, high, left, top = _placed(width, height, self.side)
            images = images.float()
            for size in ((height, wide), (high, wide)):  # as Pillow rounds and clips after each direction
                images = functional.interpolate(images, size, mode="bicubic", antialias=True).round_().clamp_(0, 255)
            images = images[..., top : top + self.side, left : left + self.side].to(torch.uint8)
        if self.channels == 3 and channels == 1:
            images = images.expand(-1, 3, -1, -1)
        return images.contiguous()


def _as_picture(pixels: Tensor) -> Any:
    from PIL import Image

    if pixels.dtype != torch.uint8 or pixels.dim() != 3 or pixels.shape[0] > 4:
        got = " x ".join(map(str, pixels.shape))
        raise ValueError(f"{got} of {pixels.dtype}: only uint8 of 1 to 4 channels can be resized or converted")
    channels = pixels.shape[0]
    array = pixels[0].numpy() if channels == 1 else pixels.permute(1, 2, 0).contiguous().numpy()
    if channels != 2:
        return Image.fromarray(array)
    return Image.merge("LA", [Image.fromarray(numpy.ascontiguousarray(array[..., k])) for k in range(2)])


def _resized(image: Any, side: int, upscale: bool) -> Any:
    """Return the centre square of the picture whose shorter side is `side`: bicubic, antialiased."""
    from PIL import Image

    width, height = image.size
    if min(width, height) < side and not upscale:
        raise ValueError(f"{width} x {height} is smaller than {side} x {side}; upscale = true enlarges it")
    if width == height == side:
        return image
    wide, high, left, top = _placed(width, height, side)
    resized = image.resize((wide, high), Image.Resampling.BICUBIC)
    return resized.crop((left, top, left + side, top + side)) if wide != high else resized


def _placed(width: int, height: int, side: int) -> tuple[int, int, int, int]:
    """Return the resized width and height and the centre square's left and top, as torchvision rounds them."""
    short = min(width, height)
    wide, high = int(side * width / short), int(side * height / short)
    return wide, high, round((wide - side) / 2), round((high - side) / 2)
