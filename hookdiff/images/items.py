"""Turns the items of a map-style data set into samples of one form, and samples into a batch."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch
from attrs import define, evolve, field
from torch import Tensor

from hookdiff.data.memory import check_range
from hookdiff.data.memory_reader import is_paired
from hookdiff.data.reader import Stack
from hookdiff.data.source import AnySource
from hookdiff.disk.reading import reason
from hookdiff.errors import UserError, nearest
from hookdiff.images.decoding import upright_size
from hookdiff.images.texts import is_text
from hookdiff.images.transforms import Transforms, size_text
from hookdiff.machine.randomness import derive_seed
from hookdiff.options.fields import about

# After the first stage: pixels, c h w; label; index; conditions by name.
LoadedSample = tuple[Tensor, int | None, int, dict[str, Tensor]]


@define(frozen=True, kw_only=True)
class ItemKeys:
    """The keys of the picture and of the label in items that are dicts."""

    image_key: str | None = field(
        default=None, metadata=about('key of the image in items that are dicts; default: "image" or "inputs"')
    )
    label_key: str | None = field(
        default=None, metadata=about('key of the label in items that are dicts; default: "label", if present')
    )

    def split(self, item: Mapping[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
        """Return the picture, the label, and the other values in `item`. Raises ValueError if such keys are missing."""
        image_key = self.image_key or ("image" if "image" in item else "inputs")
        label_key = self.label_key or "label"
        if image_key not in item:
            if self.image_key:
                raise ValueError(_no_key("image_key", image_key, item))
            likely = next((key for key, value in item.items() if _is_picture(value)), next(iter(item), "pixels"))
            way_out = f"feed_of(data, image_key={likely!r}), or image_key in [data], names another key"
            raise ValueError(f"has {_keys(item)}, expected 'image' or 'inputs' among them; {way_out}")
        if self.label_key and label_key not in item:
            raise ValueError(_no_key("label_key", label_key, item))
        others = {key: value for key, value in item.items() if key not in (image_key, label_key)}
        return item[image_key], item.get(label_key), others


def _no_key(name: str, key: str, item: Mapping[str, Any]) -> str:
    return f"has {_keys(item)}, and no {key!r}, which is the {name}{nearest(key, item)}"


def _keys(item: Mapping[str, Any]) -> str:
    return f"the keys {', '.join(map(repr, item))}" if item else "no keys"


def _is_picture(value: Any) -> bool:
    return hasattr(value, "convert") or getattr(value, "ndim", 0) > 1


def read_item(
    source: AnySource, keys: ItemKeys, transforms: Transforms, shape_of: Any, seed: int, epoch: int, index: int
) -> LoadedSample:
    """Return an item of a map-style data set, after seeding all default generators by (seed, epoch, index).

    `shape_of` is the `ShapeOf` of samples of several sizes, or None.

    Raises UserError for an item that cannot be used.
    """
    image, label, others = picture_in(source, keys, seed, epoch, index)
    place, conditions = f"sample {index} of the data", {}
    try:
        # Before `fit`, which may reduce or turn an image of Pillow.
        sides = sides_of(image) if others or shape_of else ()
        size = None
        if shape_of:
            shape_of.check(index, sides)
            _, *size = shape_of(index)
        pixels = transforms.fit(image, size and (size[0], size[1]))
        for name, value in others.items():
            place = f"sample {index} of the data: {name!r}"
            conditions[name] = _condition(value, (*pixels.shape[:-2], *sides), transforms, tuple(pixels.shape[-2:]))
    except (OSError, ValueError) as error:
        raise UserError(f"{place}: {reason(error)}") from error
    return pixels, label, index, conditions


def picture_in(
    source: AnySource, keys: ItemKeys, seed: int, epoch: int, index: int
) -> tuple[Any, int | None, dict[str, Any]]:
    """Return the picture, the label and the other values of an item of a map-style data set, seeded as in `read_item`.

    Raises UserError for an item without a picture.
    """
    seed_all(seed, epoch, index)
    image, label, others = parts_of(source[index], index, keys)
    if not isinstance(image, Tensor) and not hasattr(image, "convert"):  # as an image of Pillow has
        kind = type(image).__name__
        raise UserError(f"sample {index} of the data is a {kind}, expected a tensor c h w or a Pillow image")
    return image, label, others


def seed_all(seed: int, epoch: int, index: int) -> None:
    """Seed the default generators of Python, numpy and torch for the item at `index`, which may augment itself."""
    own_seed = derive_seed(seed, "augment", epoch, part=index)
    random.seed(own_seed)
    numpy.random.seed(own_seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(own_seed)


def parts_of(item: Any, index: int, keys: ItemKeys) -> tuple[Any, int | None, dict[str, Any]]:
    """Return the picture, the label and the other values, by name, of the `item` at `index` of a map-style data set.

    Raises:
        UserError: for an item without a picture, and for a label that is no integer.
    """
    if isinstance(item, Mapping):
        try:
            image, label, others = keys.split(item)
        except ValueError as error:
            raise UserError(f"sample {index} of the data {error}") from None
        if label is not None and not _is_integer(label):
            key = keys.label_key or "label"
            raise UserError(f"sample {index} of the data: {key!r} is {_text(label)}, expected an integer or None")
    elif isinstance(item, (tuple, list)) and item:
        image, *rest = item
        others = {f"item{place}": value for place, value in enumerate(rest, 1)}
        label = others.pop("item1") if rest and (rest[0] is None or _is_integer(rest[0])) else None
    else:
        image, label, others = item, None, {}
    if label is None:
        return image, None, others
    try:
        check_range(int(label), int(label))
    except ValueError as error:
        raise UserError(f"sample {index} of the data: {error}") from None
    return image, int(label), others


def _is_integer(value: Any) -> bool:
    if isinstance(value, (Tensor, numpy.ndarray)):  # of one number, as some data sets have it
        return value.shape in ((), (1,)) and "int" in str(value.dtype)
    return isinstance(value, (int, numpy.integer))


def sides_of(image: Any) -> tuple[int, ...]:
    """Return height and width of pixels ... h w, or of a Pillow image; only its header is read."""
    return tuple(image.shape[-2:]) if hasattr(image, "shape") else upright_size(image)[::-1]


def _condition(value: Any, picture: Sequence[int], transforms: Transforms, size: tuple[int, ...]) -> Tensor:
    """Return `value` as a tensor. An image of the size of `picture` (c h w) gets the `size` of the sample.

    Raises ValueError for an image that does not fit, and for a value of another type.
    """
    if hasattr(value, "convert"):
        if not is_paired(sides_of(value), picture):
            got, expected = size_text(sides_of(value)), size_text(picture[1:])
            raise ValueError(f"an image of {got}, expected {expected}, as the picture")
        return evolve(transforms, channels=None).fit(value, (size[0], size[1]))
    try:
        tensor = value if isinstance(value, Tensor) else torch.tensor(value)
    except (TypeError, ValueError, RuntimeError):
        way_out = "; an encoder in [data.encode] of a config turns texts into tensors" if is_text(value) else ""
        raise ValueError(f"{_text(value)}, expected a tensor, an array, a number or an image{way_out}") from None
    *channels, height, width = tensor.shape if tensor.dim() > 1 else (0, 0)
    if not is_paired(tensor.shape, picture) or transforms.side is None or (height, width) == size:
        return tensor
    single = evolve(transforms, channels=None)
    fitted = torch.cat([single.fit(layer, (size[0], size[1])) for layer in tensor.reshape(-1, 1, height, width)])
    return fitted.reshape(*channels, *fitted.shape[1:])


def collate(samples: Sequence[LoadedSample]) -> Stack:
    """Return `samples` as one batch. Raises UserError unless all have the same conditions, of the same shapes."""
    images, labels, indices, conditions = zip(*samples, strict=True)
    for index, row in zip(indices, conditions, strict=True):
        if row.keys() != conditions[0].keys():
            first, other = (", ".join(map(repr, names)) or "nothing" for names in (conditions[0], row))
            raise UserError(
                f"beside its image, sample {indices[0]} of the data has {first}, sample {index} has {other}: expected "
                "the same in all samples"
            )
    return (
        _column(images, indices, "", ": set image_size"),
        None if None in labels else torch.tensor(labels),
        torch.tensor(indices),
        {name: _column([row[name] for row in conditions], indices, f": {name!r}", "") for name in conditions[0]},
    )


def _column(values: Sequence[Tensor], indices: Sequence[int], name: str, way_out: str) -> Tensor:
    for value, index in zip(values, indices, strict=True):
        if (value.shape, value.dtype) != (values[0].shape, values[0].dtype):
            text = (
                f"sample {indices[0]} of the data{name} is {_text(values[0])}, sample {index}{name} is {_text(value)}"
            )
            raise UserError(text + way_out)
    return torch.stack(list(values))


def _text(value: Any) -> str:
    """Return shape and dtype of a tensor or an array for a message, or the type of another value."""
    if isinstance(value, (Tensor, numpy.ndarray)):
        return f"{size_text(value.shape) or 'one number'} of {value.dtype}"
    return f"a {type(value).__name__}"
