"""Features of the data, kept in a file for later runs with the same data, recipe, network and number of images."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from hookdiff.data.feed import Feed
from hookdiff.disk.files import cannot_write, new_file
from hookdiff.disk.tensors import open_tensors, write_tensors
from hookdiff.features.collected import ROWS, Collected
from hookdiff.features.space import Space
from hookdiff.images.store import Store
from hookdiff.log.pixels import to_uint8
from hookdiff.machine.ranks import first_rank_says, gathered_or_raised, num_ranks, rank
from hookdiff.terminal.pace import paced

logger = logging.getLogger("hookdiff")

_FORMAT = 1
_BATCH = 256  # images
_BLOCK = 1024  # images


def data_features(feed: Feed, indices: Tensor, space: Space, what: str, most: int = ROWS) -> Collected:
    """Return the features of the pictures `indices` (n, int64) of the data, without augmentation, in a random order.

    The rows of `most` pictures are kept, and no logits. Features are read from the file of an earlier run with the same
    samples and space. If there is no file, each rank computes a share, and the first rank writes the file. All ranks
    return the features of all pictures. `what` names the pictures in messages, such as "fid: the training images".

    Raises:
        UserError: for images that the space does not take.
        ValueError: for images or features that are not finite.
    """
    feed = feed.pictures
    for shape in feed.shapes:
        space.check(shape)
    # In a random order, since the first rows are kept, and data is often sorted by class.
    indices = indices[torch.randperm(len(indices), generator=torch.Generator().manual_seed(0))]
    # Of pictures of several sizes, each block is arranged by size, so that the first rows have all sizes.
    parts = [torch.split(indices[slice(*own)], _BLOCK) for own in shares(len(indices))]
    of_ranks = [torch.cat([indices[:0], *map(feed.arranged, part)]) for part in parts]
    indices = torch.cat(of_ranks)
    key = _key(feed, indices, space, min(most, len(indices)))
    folder = Store(cache_dir=feed.reader.cache_dir).folder / "features"
    path = folder / hashlib.sha256((key or "").encode()).hexdigest()
    stored = _read(path, key) if key and rank() == 0 else None
    if features := first_rank_says(stored):
        features.numbers = indices[: len(features.rows)]
        return features
    share = of_ranks[rank()]
    with closing(paced(_pixels(feed, share), len(share), what)) as images:
        features = Collected.merged(gathered_or_raised(lambda: Collected.of(space, images, most, logits=False)))
    if key and rank() == 0:
        _write(path, key, features)
    features.numbers = indices[: len(features.rows)]
    return features


def shares(num: int) -> list[tuple[int, int]]:
    """Return the first and the last (exclusive) image of each rank. The parts of `num` images differ by at most one."""
    ends = [num * part // num_ranks() for part in range(num_ranks() + 1)]
    return list(itertools.pairwise(ends))


def _pixels(feed: Feed, indices: Tensor) -> Iterator[Tensor]:
    blocks = (feed.unaugmented(block, _BATCH) for block in torch.split(indices, _BLOCK))
    for batch in itertools.chain.from_iterable(blocks):
        if bad := int((~batch.inputs.isfinite()).flatten(1).any(dim=1).sum()):
            raise ValueError(f"{bad} of {len(batch)} images of the data are not finite")
        yield to_uint8(batch.inputs)


def _key(feed: Feed, indices: Tensor, space: Space, rows: int) -> str | None:
    """Return a text that changes with the features; None if the data or the space has no key."""
    data = feed.fingerprint()
    if data is None or space.key is None:
        return None
    chosen = hashlib.sha256(indices.cpu().contiguous().numpy().tobytes()).hexdigest()
    numbers = {"format": _FORMAT, "num": len(indices), "rows": rows}
    return json.dumps({**numbers, "data": data, "indices": chosen, "space": space.key})


def _read(path: Path, key: str) -> Collected | None:
    """Return the features in a file; None if there is none, and with a warning if it is damaged or of other data."""
    if not path.is_file():
        return None
    try:
        with open_tensors(path) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            about = file.metadata() or {}
        if about.get("key") != key or about.get("digest") != _digest(tensors):
            raise ValueError("its content has changed since it was written")
        return Collected.from_tensors(tensors)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        logger.warning("%s is damaged and made again: %s", path, error)
        return None


def _write(path: Path, key: str, features: Collected) -> None:
    tensors = features.tensors()
    try:
        with new_file(path) as partial:
            write_tensors(partial, tensors, {"key": key, "digest": _digest(tensors)})
    except OSError as error:
        logger.warning("the features of the data are not kept for the next run: %s", cannot_write(path, error))


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tuple(tensors[name].shape)} {tensors[name].dtype}\0".encode())
        digest.update(tensors[name].contiguous().numpy().data)
    return digest.hexdigest()
