"""The picture of a data set: its first batch, or a row of pictures of each size."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hookdiff import Feed
from hookdiff.authors import sheet
from hookdiff.data import Batch
from hookdiff.disk import writing
from hookdiff.images import size_name
from hookdiff.log import Panel, save_grid
from hookdiff_data.captions import captions_below

_DRAWN = 64  # the most images in the picture
_ROW = 8  # the most images of a size
_CAPTIONED = 160  # pixels of the width of an image with a caption below
_SEEN = 64  # width to which a smaller square is enlarged


def draw(feed: Feed, path: Path) -> dict[str, Any]:
    """Draw samples of epoch 0 in a PNG file, with augmentation, and return what the picture shows, ready for JSON.

    These are the first batch. If the samples have several sizes, they are a row of each size, evenly spread over its
    samples.
    """
    with writing(path):
        return {"path": str(path), **(_by_size(feed, path) if feed.by_shape else _first_batch(feed, path))}


def _first_batch(feed: Feed, path: Path) -> dict[str, Any]:
    batch = next(feed.batches(0))[:_DRAWN]
    columns = math.ceil(math.sqrt(len(batch)))
    below = captions_below(feed, batch)
    scale = -(-_CAPTIONED // batch.inputs.shape[-1]) if below else None
    save_grid(batch.inputs, path, columns, scale, below)
    names = _labels(feed, batch)
    rows = [names[start : start + columns] for start in range(0, len(names), columns)]
    return {"images": len(batch), "labels": rows, **({"captions": below} if below else {})}


def _by_size(feed: Feed, path: Path) -> dict[str, Any]:
    order, shapes = feed.by_shape, feed.shapes
    assert order is not None
    most = max(2, min(_ROW, _DRAWN // len(shapes)))
    spread = []
    for shape in shapes:
        rows = order.of_shape(shape)
        num = min(most, len(rows))
        spread.append(rows[torch.arange(num) * len(rows) // num])
    panels, labels, captions = list[Panel](), list[list[str]](), list[str]()
    for shape, (inputs, of_batch, indices, _) in zip(shapes, feed.reader.stacks(spread, 0), strict=True):
        batch = Batch(inputs, of_batch, indices)
        below = captions_below(feed, batch)
        panels.append(Panel(inputs, most, f"{size_name(shape)}: {order.counts[shape]:,}", captions=below))
        labels.append(_labels(feed, batch))
        captions += below
    scale = -(-_CAPTIONED // feed.shape[-1]) if captions else max(1, _SEEN // feed.shape[-1])
    sheet(panels, scale=scale, abreast=1).save(path)
    return {
        "images": sum(map(len, spread)),
        "sizes": [size_name(shape) for shape in shapes],
        "labels": labels if feed.labels is not None else [],
        **({"captions": captions} if captions else {}),
    }


def _labels(feed: Feed, batch: Batch) -> list[str]:
    """Return the names of the classes of a batch; none without labels."""
    labels: Sequence[int] = [] if batch.labels is None else batch.labels.tolist()
    return [feed.classes[label] if feed.classes and label >= 0 else str(label) for label in labels]
