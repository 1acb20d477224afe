"""What one wants to know of a data set before training on it."""

from __future__ import annotations

import hashlib
import time
from collections import Counter, defaultdict
from typing import Any

import torch
from torch import Tensor

from hookdiff.data.feed import Feed
from hookdiff.data.memory import InMemory
from hookdiff.data.survey import kind_of

_GROUPS = 5  # of duplicates that are told


def report(feed: Feed, seconds: float) -> dict[str, Any]:
    """Read every sample of a bound `feed` once, and epochs of it for about so many `seconds`.

    The answer is made of what JSON knows. Raises UserError when a sample cannot be used.
    """
    found = feed.prepared.survey
    kinds = {} if found is None else found.kinds
    given = feed.prepared.source
    if isinstance(given, InMemory) and given.images.dim() == 4 and given.images.shape[1] <= 4:  # no latents
        kinds = {kind_of(given.images[0]): len(given)}
    sizes, modes = Counter[tuple[int, int]](), Counter[str]()
    for (mode, width, height), count in kinds.items():
        sizes[width, height] += count
        modes[mode] += count
    unreadable = {} if found is None else dict(found.unreadable)
    unreadable |= feed.prepared.torn or {}
    pixels = _pixels(feed, unreadable)
    return {
        "samples": len(feed.prepared),
        "training": len(feed.training),
        "held_out": len(feed.held),
        "shape": list(feed.shape),
        "sizes": [[width, height, count] for (width, height), count in sizes.most_common()],
        "modes": dict(modes.most_common()),
        "classes": _classes(feed),
        "store": _store(feed),
        **pixels,
        "unreadable": {"count": len(unreadable), "files": [unreadable[index] for index in sorted(unreadable)]},
        "images_per_second": _speed(feed, seconds),
    }


def _classes(feed: Feed) -> dict[str, int] | None:
    """Return how many samples each class has; those without one count as "unknown"."""
    if feed.labels is None:
        return None
    counts = Counter(feed.labels[feed.prepared.usable].tolist())
    names = feed.classes or [str(label) for label in range(feed.num_classes or 0)]
    told = {name: counts[label] for label, name in enumerate(names)}
    return {**told, "unknown": counts[-1]} if counts[-1] else told


def _store(feed: Feed) -> dict[str, Any]:
    samples, cache = feed.prepared.samples, feed.prepared.cache
    num_bytes = samples.images.nbytes if isinstance(samples, InMemory) else 0
    device = str(feed.samples.images.device) if isinstance(feed.samples, InMemory) else None
    return {
        "place": feed.prepared.place,
        "bytes": num_bytes,
        "device": device,
        "path": str(cache.path) if cache else None,
        "workers": 0 if isinstance(samples, InMemory) else feed.workers,
    }


def _pixels(feed: Feed, unreadable: dict[int, str]) -> dict[str, Any]:
    """Return range, mean and deviation of what the model sees, not augmented, and what is not finite or there twice."""
    same: defaultdict[bytes, list[int]] = defaultdict(list)
    low, high, count = float("inf"), float("-inf"), 0
    spoiled: list[str] = []
    sums = squares = torch.zeros(feed.shape[0], dtype=torch.float64)
    wanted = feed.prepared.usable
    start = 0
    for batch in feed.plain(wanted):
        asked, start = wanted[start : start + len(batch)], start + len(batch)
        inputs = batch.inputs.cpu()
        assert batch.indices is not None
        bad = ~inputs.flatten(1).isfinite().all(1)
        spoiled += [feed.describe(index) for index in batch.indices[bad].tolist()]
        for index, stands_in, image in zip(asked.tolist(), (asked != batch.indices).tolist(), inputs, strict=True):
            if stands_in:
                unreadable.setdefault(index, feed.describe(index))
            else:
                same[hashlib.blake2b(image.numpy().tobytes(), digest_size=16).digest()].append(index)
        low, high = min(low, float(inputs.min())), max(high, float(inputs.max()))
        by_channel = inputs.double().transpose(0, 1).flatten(1)
        count += by_channel.shape[1]
        sums, squares = sums + by_channel.sum(1), squares + by_channel.square().sum(1)
    mean = sums / count
    std = (squares / count - mean.square()).clamp(min=0).sqrt()
    groups = [[feed.describe(index) for index in group] for group in same.values() if len(group) > 1]
    return {
        "values": {"min": low, "max": high, "mean": mean.tolist(), "std": std.tolist()},
        "not_finite": {"count": len(spoiled), "files": spoiled},
        "duplicates": {"count": sum(len(group) - 1 for group in groups), "groups": groups[:_GROUPS]},
    }


def _speed(feed: Feed, seconds: float) -> float:
    """Return images of this rank a second, over as many epochs as fit into `seconds`, but for the first batch."""
    epoch, images = 0, 0
    began: float | None = None
    while True:
        for batch in feed.batches(epoch):
            if began is None:
                began = time.perf_counter()  # workers have started, and pages are there
                continue
            images += len(batch)
            if time.perf_counter() - began > seconds:
                _wait(batch.inputs)
                return images / (time.perf_counter() - began)
        epoch += 1


def _wait(inputs: Tensor) -> None:
    if inputs.is_cuda:
        torch.cuda.synchronize(inputs.device)
