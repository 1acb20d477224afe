"""The sizes of the pictures of a source: known sizes, and the rest from one pass over the headers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, nullcontext

import torch
from torch import Tensor

from hookdiff.data.source import AnySource
from hookdiff.errors import UserError
from hookdiff.images.decoding import Unreadable
from hookdiff.images.items import ItemKeys, picture_in, sides_of
from hookdiff.images.parallel_reading import with_images
from hookdiff.images.survey import Survey
from hookdiff.images.transforms import size_text
from hookdiff.machine.randomness import default_generators_kept
from hookdiff.terminal.pace import paced


def common_size(seen: Survey, num: int) -> Tensor | None:
    """Return height and width of `num` pictures (n 2, int64); None unless the survey `seen` has one size for all."""
    sizes = {(kind.height, kind.width) for kind in seen.kinds}
    return torch.tensor([*sizes]).expand(num, 2) if len(sizes) == 1 else None


def sizes_of(source: AnySource, seen: Survey, keys: ItemKeys) -> Tensor:
    """Return height and width of the original pictures of `source` (n 2, int64); zeros for unreadable pictures.

    Sizes that are neither in the survey `seen` nor in `source.known_sizes()` are read from headers or items.

    Raises:
        UserError: for an item without a picture.
    """
    if (common := common_size(seen, len(source))) is not None:
        return common
    if source.memory is not None:  # its samples have more channels than a picture
        return torch.tensor(source.memory.images.shape[2:]).expand(len(source), 2)
    sizes = torch.zeros(len(source), 2, dtype=torch.int64) if seen.sizes is None else seen.sizes.clone()
    sizes = sizes.where(sizes > 0, source.known_sizes())
    unknown = [index for index in (sizes[:, 0] == 0).nonzero().flatten().tolist() if index not in seen.unreadable]
    read = (
        with_images(source, unknown, sides_of, "data: sizes") if source.is_images else _of_items(source, unknown, keys)
    )
    for index, size in read:
        if not isinstance(size, Unreadable):
            sizes[index] = torch.tensor(size)
    return sizes


def _of_items(source: AnySource, indices: list[int], keys: ItemKeys) -> Iterator[tuple[int, tuple[int, ...]]]:
    with default_generators_kept(), closing(paced(indices, len(indices), "data: sizes", size=lambda _: 1)) as shown:
        for index in shown:
            image, *_ = picture_in(source, keys, 0, 0, index)
            with image if hasattr(image, "fp") else nullcontext():
                shape = tuple(getattr(image, "shape", sides_of(image)))
                if len(shape) not in (2, 3) or 0 in shape:
                    got = size_text(shape) or "no sides"
                    raise UserError(f"sample {index} of the data has {got}; only pictures, c h w or h w, have a size")
                yield index, sides_of(image)
