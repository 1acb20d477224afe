"""The members of a sample in a shard: its picture, label, conditions and captions as the content of files."""

import io
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor

from hookdiff import Feed, UserError, shown
from hookdiff.disk import reason
from hookdiff.images import (
    Unreadable,
    lines_of,
    open_picture,
    parts_of,
    reader_of_source,
    seed_all,
    usual_suffix,
    with_images,
)

logger = logging.getLogger("hookdiff")

CAPTIONS = "txt"  # extension of the captions
_TEXT = "text"  # name of the captions in the source "shards"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,60}")  # of a condition, as part of the name of a file

Members = dict[str, bytes]  # by extension


def members(feed: Feed) -> Iterator[tuple[int, Members]]:
    """Yield each usable sample of `feed`, in order: its position and its members, the picture first.

    A picture keeps the bytes of its file. Without a file it becomes a PNG, or an .npy if no PNG can hold its pixels.
    Raises UserError for a sample that cannot be read or written; the config may skip unreadable pictures.
    """
    for index, parts in _parts(feed):
        if isinstance(parts, Unreadable):
            if reader_of_source(feed).store.unreadable == "stop":
                raise parts
            logger.warning("data: left out: %s", parts)
            continue
        (suffix, content), label, others = parts
        if label is None and feed.labels is not None:
            label = int(feed.labels[index])
        sample = {suffix: content} if label is None else {suffix: content, "cls": str(label).encode()}
        for name, value in others.items():
            suffix, content = written(feed, index, value, name)
            sample[f"{member_name(name)}.{suffix}"] = content
        if len(sample) < 1 + (label is not None) + len(others):
            raise UserError(f"conditions {', '.join(others)}: rename some, so that they differ not only by capitals")
        yield index, sample


def with_captions(feed: Feed, samples: Iterator[tuple[int, Members]]) -> Iterator[tuple[int, Members]]:
    """Yield `samples`, each with its captions from the source of `feed`, if it has any: a text of one caption a line.

    Raises UserError for captions that the source "shards" would not read as they are.
    """
    captions = feed.reader.captions
    if others := [name for name in captions if name != _TEXT]:
        about = f"rename them: shards hold only captions that are called {_TEXT!r}"
        raise UserError(f"captions {shown(others[0])!r}: {about}")
    for index, sample in samples:
        if captions:
            sample = {**sample, CAPTIONS: _lines(feed.describe(index), captions[_TEXT].originals[index])}
        yield index, sample


def _lines(name: str, captions: Sequence[str]) -> bytes:
    try:
        content = "\n".join(captions).encode()
        if lines_of(content) == tuple(captions):
            return content
        problem = "expected each caption on one line, without space around it"
    except ValueError as error:
        problem = str(error)
    raise UserError(f"{name}: captions {shown(repr([*captions])[:60])} cannot be written to a shard: {problem}")


def member_name(condition: str) -> str:
    """Return the name of a condition as part of an extension; raises UserError if no file can have it."""
    if not _NAME.fullmatch(condition):
        raise UserError(f"conditions {condition!r}: the name cannot be part of a file name in a shard; rename it")
    return condition.lower()


def conditions_of(feed: Feed, sample: Members) -> dict[str, str]:
    """Return the extension of each condition in a sample that `members` has yielded, by its name."""
    names = {name.lower(): name for name in feed.blank(1).conditions}
    return {names[extension.rpartition(".")[0]]: extension for extension in sample if "." in extension}


def _parts(feed: Feed) -> Iterator[tuple[int, Any]]:
    """Yield the position of each sample, and its written picture, its label and its conditions, or an Unreadable."""
    reader = reader_of_source(feed)
    source, memory = reader.source, reader.source.memory
    if source.is_images:
        for index, content in with_images(source, feed.usable.tolist(), partial(_content, is_condition=False)):
            yield index, content if isinstance(content, Unreadable) else (content, None, {})
        return
    if memory and memory.images.dtype == torch.uint8 and memory.images.shape[1] in (2, 4):
        channels = memory.images.shape[1]
        raise UserError(f"uint8 images in memory with {channels} channels would be transparent in a shard: use 1 or 3")
    for index in feed.usable.tolist():
        if memory:
            image, label = memory.images[index], None if memory.labels is None else int(memory.labels[index])
            others: Mapping[str, Any] = {name: column[index] for name, column in memory.conditions.items()}
        else:
            seed_all(feed.seed, 0, index)
            image, label, others = parts_of(source[index], index, reader.keys)
        yield index, (written(feed, index, image), label, others)


def written(feed: Feed, index: int, value: Any, name: str = "") -> tuple[str, bytes]:
    """Return the extension and the content of the file that holds a picture, or a condition called `name`."""
    try:
        return _content(value, bool(name))
    except (OSError, TypeError, ValueError, OverflowError) as error:
        place = feed.describe(index) + (f": {name!r}" if name else "")
        raise UserError(f"{place}: cannot be written to a shard: {reason(error)}") from error


def _content(value: Any, is_condition: bool) -> tuple[str, bytes]:
    from PIL import Image

    if hasattr(value, "convert"):  # an image of Pillow
        return _original(value) or ("png", _png(value))
    if is_condition and isinstance(value, (bool, int, float, list)):
        return "json", json.dumps(value).encode()
    array = value.detach().cpu().numpy() if isinstance(value, Tensor) else numpy.asarray(value)
    if array.dtype.kind not in "biufc":
        raise ValueError(f"holds {array.dtype}, expected numbers")
    is_picture = array.dtype == numpy.uint8 and (array.ndim == 2 or array.shape[:-2] in ((1,), (3,)))
    if is_picture and not is_condition:
        whole = array if array.ndim == 2 else array.transpose(1, 2, 0).squeeze()
        return "png", _png(Image.fromarray(numpy.ascontiguousarray(whole)))
    file = io.BytesIO()
    numpy.save(file, array, allow_pickle=False)
    return "npy", file.getvalue()


def _original(image: Any) -> tuple[str, bytes] | None:
    """Return the bytes of the file that a lazy image of Pillow is read from; None if it has no file of its own."""
    suffix, file = usual_suffix(image.format), getattr(image, "fp", None)
    if suffix is None or file is None:
        return None
    file.seek(0)
    content: bytes = file.read()
    try:
        with open_picture(io.BytesIO(content)) as again:
            is_it = (again.format, again.size) == (image.format, image.size)
    except (OSError, ValueError):  # it is a part of a file of another kind
        return None
    return (suffix.removeprefix("."), content) if is_it else None


def _png(image: Any) -> bytes:
    file, exif = io.BytesIO(), image.getexif()
    image.save(file, "PNG", **({"exif": exif} if exif else {}))  # the EXIF data may rotate the picture
    return file.getvalue()
