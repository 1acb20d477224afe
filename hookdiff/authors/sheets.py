"""Grids of images, with names beside, above and below them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch
from PIL import Image
from torch import Tensor

from hookdiff.log.panel import Drawn, Panel
from hookdiff.log.picture import Picture
from hookdiff.log.pixels import as_pictures, to_uint8

_APART = 12  # pixels between two panels


def sheet(
    panels: Sequence[Panel],
    *,
    scale: int | None = None,
    abreast: int | None = None,
    info: Mapping[str, Any] | None = None,
) -> Picture:
    """Return a picture of all panels, with `abreast` panels in a row (None: all panels).

    `scale` enlarges both sides of the images with smooth interpolation; None enlarges small images to a width of about
    64 pixels. The metadata of the picture has the places of the images; `panel_layouts` reads them.
    """
    drawn = [Drawn.of(panel, scale) for panel in panels]
    abreast = abreast or len(drawn)
    bands = [drawn[start : start + abreast] for start in range(0, len(drawn), abreast)]
    widths = [max(band[column].width for band in bands if column < len(band)) for column in range(len(bands[0]))]
    heights = [max(panel.height for panel in band) for band in bands]
    size = sum(widths) + _APART * (len(widths) - 1), sum(heights) + _APART * (len(heights) - 1)
    is_grey = all(panel.mode == "L" for panel in drawn)
    canvas, places, top = Image.new("L" if is_grey else "RGB", size, "white"), [], 0
    for band, height in zip(bands, heights, strict=True):
        left = 0
        for panel, width in zip(band, widths, strict=False):
            places.append(panel.draw_on(canvas, left, top).to_info())
            left += width + _APART
        top += height + _APART
    return Picture(numpy.array(canvas), {**(info or {}), "panels": places})


def by_class(images: Tensor, labels: Sequence[int], names: Sequence[str], columns: int | None = None) -> Panel:
    """Return a panel in which the images of each class have rows of their own, with the name of the class beside them.

    `labels` are the classes of the images, and `names` the names of the classes; the label -1 means no class. The
    classes are in the order of their first images. By default (`columns=None`) the panel is as square as possible. The
    last row of a class is padded with white.
    """
    pixels = as_pictures(images if images.dtype == torch.uint8 else to_uint8(images))
    labels = [label for label in labels for _ in range(len(pixels) // len(images))]  # an image may be several pictures
    groups = {label: [k for k, other in enumerate(labels) if other == label] for label in dict.fromkeys(labels)}
    largest = max(map(len, groups.values()))
    columns = min(columns or math.ceil(math.sqrt(len(labels))), largest)
    columns = math.ceil(largest / math.ceil(largest / columns))  # as few as give the same number of rows
    white = torch.full_like(pixels[:1], 255)
    rows, beside = [], []
    for label, numbers in groups.items():
        missing = -len(numbers) % columns
        rows += [pixels[numbers], white.expand(missing, *white.shape[1:])]
        beside += [names[label] if label >= 0 else "-", *[""] * ((len(numbers) + missing) // columns - 1)]
    return Panel(torch.cat(rows), columns, row_names=beside)
