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
from hookdiff.images.buckets import Buckets, Size
from hookdiff.images.decoding import decode
from hookdiff.options.fields import about, between

_LARGEST = 2**28  # pixels; only a picture that is very long and narrow becomes larger
_DECODING = 2  # raised when `decode` gives other pixels, so that caches are made anew
_ALPHA = (2, 4)  # channels of grey and of RGB pixels with transparency


def _sides(image_size: int | tuple[int, ...] | None) -> tuple[int, ...]:
    return image_size if isinstance(image_size, tuple) else () if image_size is None else (image_size,)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _check_image_size(transforms: Transforms, option: Any, image_size: int | tuple[int, ...] | None) -> None:
    for side in _sides(image_size):
        between(2, 2**15)(transforms, option, side)
    if image_size == ():
        raise ValueError("'image_size' has no side: give one, or several such as [512, 1024]")


def _check_resize(transforms: Transforms, option: Any, resize: int | None) -> None:
    between(2, 2**15)(transforms, option, resize)
    size = transforms.image_size
    if resize is not None and not (isinstance(size, int) and size <= resize):
        raise ValueError(f"'resize' needs one image_size that is not larger: {size} and {resize}")


def _check_buckets(transforms: Transforms, option: Any, buckets: bool | tuple[str, ...]) -> None:
    if not buckets:
        if buckets == ():
            raise ValueError('\'buckets\' has no size: set true, or sizes such as ["64x64", "80x48"]')
        return
    if not transforms.image_size:
        raise ValueError("'buckets' needs image_size, the side of a square with as many pixels as the pictures")
    if transforms.resize:
        raise ValueError("'buckets' cut at the centre: leave out resize, which is for random crops")
    if isinstance(buckets, tuple):
        Buckets.of(_sides(transforms.image_size), buckets, None, 1.0)


def _check_step(transforms: Transforms, option: Any, step: int | None) -> None:
    if step is not None and step < 1:
        raise ValueError(f"'bucket_step' must be at least 1: {step}")
    if step is not None and (wrong := [side for side in _sides(transforms.image_size) if side % step]):
        divisors = [of for of in range(1, wrong[0] + 1) if wrong[0] % of == 0]
        close = min(divisors, key=lambda of: abs(of - step))
        raise ValueError(f"'bucket_step' must divide image_size = {wrong[0]}, not {step}; nearest: {close}")


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
    """Options that turn pictures into samples, of one shape or of several, and that augment them in each epoch."""

    image_size: int | tuple[int, ...] | None = field(
        default=None,
        converter=_as_tuple,
        validator=_check_image_size,
        metadata=about(
            "side of the samples: a picture's shorter side is resized to this (bicubic, antialiased), its centre is "
            "cropped; of several sides, such as [512, 1024], a picture gets the largest one that it fills; default: "
            "pictures keep their size, which must be the same for all",
            "pixels",
        ),
    )
    resize: int | None = field(
        default=None,
        validator=_check_resize,
        metadata=about("side to resize to, before a random crop of `image_size`", "pixels"),
    )
    buckets: bool | tuple[str, ...] = field(
        default=False,
        converter=_as_tuple,
        validator=_check_buckets,
        metadata=about(
            "true: samples keep the shape of their pictures, about, with as many pixels as a square of `image_size`; a "
            'picture gets the size of the nearest shape, and each batch has one size; or sizes, such as ["64x64", '
            '"80x48"] (width x height)'
        ),
    )
    bucket_step: int | None = field(
        default=None,
        validator=_check_step,
        metadata=about(
            "the sides of buckets are multiples of this; default: the largest divisor of `image_size` up to an eighth "
            "of it and 64",
            "pixels",
        ),
    )
    bucket_ratio: float = field(
        default=2.0, validator=between(1, 16), metadata=about("long by short side of a bucket, at most")
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
    def sides(self) -> tuple[int, ...]:
        """The sides in `image_size`."""
        return _sides(self.image_size)

    @property
    def square(self) -> int | None:
        """The side of a square sample, the largest one; None where pictures keep their size."""
        return max(self.sides, default=None)

    @property
    def has_sizes(self) -> bool:
        """Whether samples may have several sizes."""
        return bool(self.buckets) or len(self.sides) > 1

    @property
    def sized(self) -> Buckets:
        """The sizes that samples may have; at least one side is given."""
        return Buckets.of(self.sides, self.buckets, self.bucket_step, self.bucket_ratio)

    @property
    def side(self) -> int | None:
        """The side of a square picture after the first stage; None where pictures keep their size."""
        return self.resize or self.square

    @property
    def first_stage(self) -> tuple[Any, ...]:
        """The facts on which the pixels after the first stage depend, beside the picture and its size in buckets."""
        return _DECODING, self.side if not self.has_sizes else None, self.upscale, self.channels, self.background

    @property
    def random(self) -> bool:
        """Whether there is a second, random stage."""
        return self.side != self.square or bool(self.flip) or any(self.color_jitter)

    def corner(self, height: int, width: int, size: Size | None = None) -> tuple[int, int]:
        """Return top and left of the first-stage crop of a picture of this height and width, after its resize.

        `size` is as in `fit`.
        """
        if (size := self._target(size)) is None:
            return 0, 0
        *_, left, top = _resized_box(width, height, size)
        return top, left

    def centre(self, pixels: Tensor) -> Tensor:
        """Return the centre of first-stage `pixels` (... h w), for samples that are not cropped at random."""
        if self.resize is None or self.square is None:
            return pixels
        start = centre_start(pixels.shape[-1] - self.square)
        return pixels[..., start : start + self.square, start : start + self.square]

    def fits(self, shape: Sequence[int], size: Size | None = None) -> bool:
        """Return whether pictures of `shape` (c h w) need no first stage. `size` is as in `fit`."""
        target = self._target(size)
        return target in (None, tuple(shape[1:])) and (self.channels is None or shape[0] == self.channels)

    def _target(self, size: Size | None) -> Size | None:
        """Return height and width after the first stage; None where pictures keep their size."""
        side = self.side
        return None if side is None else (side, side) if size is None else size

    def fit(self, image: Any, size: Size | None = None) -> Tensor:
        """Apply the first stage (size, channels) to a Pillow image or uint8 pixels, c h w or h w. Return uint8, c h w.

        `size` is height and width of the sample, if the samples have several sizes; default: a square. Pixels of the
        right shape, also floats, are returned unchanged.

        Raises:
            ValueError: for an image that is too small or cannot be converted, and any error of Pillow for a broken
                file.
        """
        from PIL import Image

        target = self._target(size)
        if isinstance(image, (Tensor, numpy.ndarray)):
            pixels = torch.as_tensor(image)
            pixels = pixels[None] if pixels.dim() == 2 and pixels.dtype == torch.uint8 else pixels
            if self.fits(pixels.shape, size) and not (pixels.dtype == torch.uint8 and pixels.shape[0] in _ALPHA):
                return pixels
            if pixels.dtype != torch.uint8 or pixels.dim() != 3 or pixels.shape[0] > 4:
                got = f"{size_text(pixels.shape)} of {pixels.dtype}"
                raise ValueError(f"{got}: only uint8 of 1 to 4 channels can be resized or converted")
            image = Image.fromarray(pixels.permute(1, 2, 0).squeeze(-1).numpy())
        if target is None:
            image = decode(image, self.channels, self.background)
        else:
            high_side, wide_side = target
            # A JPEG much larger than the sample is decoded at a half, a quarter or an eighth of its size. It may lie on
            # its side in the file.
            image.draft(None, (2 * max(target),) * 2)
            image = decode(image, self.channels, self.background)
            width, height = image.size
            if (height < high_side or width < wide_side) and not self.upscale:
                small = f"{width} x {height} is smaller than {wide_side} x {high_side}"
                raise ValueError(f"{small}; upscale = true enlarges it")
            wide, high, left, top = _resized_box(width, height, target)
            if wide * high > max(_LARGEST, width * height):
                raise ValueError(f"{width} x {height} becomes {wide} x {high}, more than {_LARGEST} pixels")
            image = image.resize((wide, high), Image.Resampling.BICUBIC)
            image = image.crop((left, top, left + wide_side, top + high_side))
        pixels = torch.from_numpy(numpy.array(image))
        return pixels[None] if pixels.dim() == 2 else pixels.permute(2, 0, 1).contiguous()

    def fit_to(self, image: Any, shape: tuple[int, ...]) -> Tensor:
        """Return `fit` of an image; raise ValueError unless it gets `shape` (c h w), as its header promises."""
        pixels = self.fit(image, (shape[-2], shape[-1]))
        if pixels.shape != shape:
            raise ValueError(f"{size_text(pixels.shape)}, but {size_text(shape)} according to its header")
        return pixels

    def fit_stack(self, images: Tensor) -> Tensor:
        """Return the first stage of `images` (n c h w, uint8, c 1 or 3) as one tensor, of square samples.

        The result differs from `fit` of each image only by rounding, and is many times faster.
        """
        channels, height, width = images.shape[1:]
        if self.channels == 1 and channels == 3:
            weights = torch.tensor([19595, 38470, 7471], device=images.device).view(1, 3, 1, 1)  # as in Pillow
            images = ((images * weights).sum(1, keepdim=True) + (1 << 15) >> 16).to(torch.uint8)
        if (target := self._target(None)) is not None and (height, width) != target:
            wide, high, left, top = _resized_box(width, height, target)
            images = images.float()
            for step in ((height, wide), (high, wide)):  # as Pillow rounds and clips after each direction
                images = functional.interpolate(images, step, mode="bicubic", antialias=True).round_().clamp_(0, 255)
            images = images[..., top : top + target[0], left : left + target[1]].to(torch.uint8)
        if self.channels == 3 and channels == 1:
            images = images.expand(-1, 3, -1, -1)
        return images.contiguous()


def centre_start(slack: int) -> int:
    """Return where a centre crop begins in a side that is `slack` pixels longer."""
    return round(slack / 2)


def size_text(shape: Sequence[int]) -> str:
    """Return a shape as messages give it, such as "3 x 32 x 32"."""
    return " x ".join(map(str, shape))


def _resized_box(width: int, height: int, target: Size) -> tuple[int, int, int, int]:
    """Return width and height after the resize, which covers the `target`, and left and top of its centre in them.

    Sides are rounded as in torchvision.
    """
    high, wide = target
    if wide * height >= high * width:  # the width decides
        high = int(wide * height / width)
    else:
        wide = int(high * width / height)
    return wide, high, round((wide - target[1]) / 2), round((high - target[0]) / 2)
