"""The keys of [data] that change pixels.

There are two stages. The first decodes, resizes and crops the centre. It is deterministic, so its pixels can be stored.
The second is random (see augment.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy
import torch
from attrs import define, field
from attrs.validators import in_
from torch import Tensor
from torch.nn import functional

from hookdiff.errors import nearest
from hookdiff.images.decoding import decode
from hookdiff.options.fields import about, between

_LARGEST = 2**28  # pixels; only a picture that is very long and narrow becomes larger
_DECODING = 2  # raised when `decode` gives other pixels, so that caches are made anew
_ALPHA = (2, 4)  # channels of grey and of RGB pixels with transparency


def _check_resize(transforms: Transforms, option: Any, resize: int | None) -> None:
    between(2, 2**15)(transforms, option, resize)
    if resize is not None and not (transforms.image_size and transforms.image_size <= resize):
        raise ValueError(f"'resize' needs an image_size that is not larger: {transforms.image_size} and {resize}")


def _check_color_jitter(_: Any, __: Any, strengths: Sequence[float]) -> None:
    if not all(0 <= strength < math.inf for strength in strengths) or strengths[3] > 0.5:
        raise ValueError(f"'color_jitter' must be >= 0, and its fourth number, of hue, <= 0.5: {list(strengths)}")


def _check_background(_: Any, __: Any, colour: str) -> None:
    from PIL import ImageColor

    try:
        ImageColor.getrgb(colour)
    except ValueError:
        close = nearest(colour, ImageColor.colormap)
        raise ValueError(f"'background' must be a colour's name or '#rrggbb', not {colour!r}{close}") from None


@define(frozen=True, kw_only=True)
class Transforms:
    """Options that turn pictures into samples of one shape, and that augment them in each epoch."""

    image_size: int | None = field(
        default=None,
        validator=between(2, 2**15),
        metadata=about(
            "side of the samples: a picture's shorter side is resized to this (bicubic, antialiased), its centre is "
            "cropped; default: pictures keep their size, which must be the same for all",
            "pixels",
        ),
    )
    resize: int | None = field(
        default=None,
        validator=_check_resize,
        metadata=about("side to resize to, before a random crop of `image_size`", "pixels"),
    )
    upscale: bool = field(default=False, metadata=about("enlarge pictures that are too small instead of refusing them"))
    channels: Literal[1, 3] | None = field(
        default=None,
        validator=in_((None, 1, 3)),
        metadata=about("1 (grey) or 3 (RGB); default: as in the files, which must all have the same"),
    )
    background: str = field(
        default="white",
        validator=_check_background,
        metadata=about('colour behind transparent pixels: a name or "#rrggbb"'),
    )
    flip: bool | float = field(
        default=0.0, validator=between(0, 1), metadata=about("probability of a horizontal flip; true is 0.5")
    )
    color_jitter: tuple[float, float, float, float] = field(
        default=(0.0, 0.0, 0.0, 0.0),
        validator=_check_color_jitter,
        metadata=about("strengths of random brightness, contrast, saturation and hue, as in torchvision's ColorJitter"),
    )

    @property
    def side(self) -> int | None:
        """The side of a picture after the first stage; None where pictures keep their size."""
        return self.resize or self.image_size

    @property
    def first_stage(self) -> tuple[Any, ...]:
        """The facts on which the pixels after the first stage depend, beside the picture."""
        return _DECODING, self.side, self.upscale, self.channels, self.background

    @property
    def random(self) -> bool:
        """Whether there is a second, random stage."""
        return self.side != self.image_size or bool(self.flip) or any(self.color_jitter)

    def corner(self, height: int, width: int) -> tuple[int, int]:
        """Return top and left of the first-stage crop of a picture of this size, in pixels after its resize."""
        if self.side is None:
            return 0, 0
        *_, left, top = _resized_box(width, height, self.side)
        return top, left

    def centre(self, pixels: Tensor) -> Tensor:
        """Return the centre of first-stage `pixels` (... h w), for samples that are not cropped at random."""
        if self.image_size is None:
            return pixels
        start = centre_start(pixels.shape[-1] - self.image_size)
        return pixels[..., start : start + self.image_size, start : start + self.image_size]

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether pictures of `shape` (c h w) need no first stage."""
        square = self.side is None or tuple(shape[1:]) == (self.side, self.side)
        return square and (self.channels is None or shape[0] == self.channels)

    def fit(self, image: Any, shape: tuple[int, ...] | None = None) -> Tensor:
        """Apply the first stage (size, channels) to a Pillow image or uint8 pixels, c h w or h w. Return uint8, c h w.

        Pixels of the right shape, also floats, are returned unchanged.

        Raises:
            ValueError: for an image that is too small, cannot be converted, or does not get `shape`, and any error of
                Pillow for a broken file.
        """
        pixels = self._fit(image)
        if shape is not None and pixels.shape != shape:
            raise ValueError(f"{size_text(pixels.shape)}, but {size_text(shape)} according to its header")
        return pixels

    def _fit(self, image: Any) -> Tensor:
        from PIL import Image

        if isinstance(image, (Tensor, numpy.ndarray)):
            pixels = torch.as_tensor(image)
            pixels = pixels[None] if pixels.dim() == 2 and pixels.dtype == torch.uint8 else pixels
            if self.fits(pixels.shape) and not (pixels.dtype == torch.uint8 and pixels.shape[0] in _ALPHA):
                return pixels
            if pixels.dtype != torch.uint8 or pixels.dim() != 3 or pixels.shape[0] > 4:
                got = f"{size_text(pixels.shape)} of {pixels.dtype}"
                raise ValueError(f"{got}: only uint8 of 1 to 4 channels can be resized or converted")
            image = Image.fromarray(pixels.permute(1, 2, 0).squeeze(-1).numpy())
        if (side := self.side) is None:
            image = decode(image, self.channels, self.background)
        else:
            # A JPEG much larger than the sample is decoded at a half, a quarter or an eighth of its size.
            image.draft(None, (2 * side, 2 * side))
            image = decode(image, self.channels, self.background)
            width, height = image.size
            if min(width, height) < side and not self.upscale:
                raise ValueError(f"{width} x {height} is smaller than {side} x {side}; upscale = true enlarges it")
            wide, high, left, top = _resized_box(width, height, side)
            if wide * high > max(_LARGEST, width * height):
                raise ValueError(f"{width} x {height} becomes {wide} x {high}, more than {_LARGEST} pixels")
            image = image.resize((wide, high), Image.Resampling.BICUBIC).crop((left, top, left + side, top + side))
        pixels = torch.from_numpy(numpy.array(image))
        return pixels[None] if pixels.dim() == 2 else pixels.permute(2, 0, 1).contiguous()

    def fit_stack(self, images: Tensor) -> Tensor:
        """Return the first stage of `images` (n c h w, uint8, c 1 or 3) as one tensor.

        The result differs from `fit` of each image only by rounding, and is many times faster.
        """
        channels, height, width = images.shape[1:]
        if self.channels == 1 and channels == 3:
            weights = torch.tensor([19595, 38470, 7471], device=images.device).view(1, 3, 1, 1)  # as in Pillow
            images = ((images * weights).sum(1, keepdim=True) + (1 << 15) >> 16).to(torch.uint8)
        if self.side is not None and (height, width) != (self.side, self.side):
            wide, high, left, top = _resized_box(width, height, self.side)
            images = images.float()
            for size in ((height, wide), (high, wide)):  # as Pillow rounds and clips after each direction
                images = functional.interpolate(images, size, mode="bicubic", antialias=True).round_().clamp_(0, 255)
            images = images[..., top : top + self.side, left : left + self.side].to(torch.uint8)
        if self.channels == 3 and channels == 1:
            images = images.expand(-1, 3, -1, -1)
        return images.contiguous()


def centre_start(slack: int) -> int:
    """Return where a centre crop begins in a side that is `slack` pixels longer."""
    return round(slack / 2)


def size_text(shape: Sequence[int]) -> str:
    """Return a shape as messages give it, such as "3 x 32 x 32"."""
    return " x ".join(map(str, shape))


def _resized_box(width: int, height: int, side: int) -> tuple[int, int, int, int]:
    """Return width and height after the resize, and left and top of the centre square, rounded as in torchvision."""
    short = min(width, height)
    wide, high = int(side * width / short), int(side * height / short)
    return wide, high, round((wide - side) / 2), round((high - side) / 2)
