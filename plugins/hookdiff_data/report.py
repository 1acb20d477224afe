"""Statistics of a data set that are worth knowing before training on it."""

import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import Container
from itertools import chain, count
from typing import Any

import torch

from hookdiff import Feed
from hookdiff.authors import wait_for
from hookdiff.images import profile_fault, reader_of_source, with_images
from hookdiff_data.buckets import buckets

_GROUPS = 5  # of duplicates that are listed


def report(feed: Feed, seconds: float) -> dict[str, Any]:
    """Read every sample of a bound `feed`, then batches for about `seconds`; return statistics, ready for JSON.

    Raises UserError for a sample that cannot be used.
    """
    sizes, modes = Counter[tuple[int, int]](), Counter[str]()
    reader = reader_of_source(feed)
    prepared, survey = reader.prepared, reader.prepared.survey
    for kind in survey.kinds:
        sizes[kind.width, kind.height] += kind.count
        modes[kind.mode] += kind.count
    unreadable = survey.unreadable | survey.undecodable
    kept = [part.images for part in reader.kept]
    statistics = _pixels(feed, unreadable)  # this adds to `unreadable`
    return {
        "samples": len(prepared.samples),
        "training": len(feed.training),
        "held_out": len(feed.held_out_indices),
        "shape": list(feed.shape),
        "sizes": [[width, height, num] for (width, height), num in sizes.most_common()],
        "modes": dict(modes.most_common()),
        "classes": _classes(feed, unreadable),
        "store": {
            "place": prepared.place,
            "bytes": sum(images.nbytes for images in kept),
            "device": str(kept[0].device) if kept else None,
            "path": str(prepared.cache) if prepared.cache else None,
            "workers": 0 if kept else reader.workers.workers,
        },
        **({"buckets": of_sizes} if (of_sizes := buckets(feed)) else {}),
        **statistics,
        "unreadable": {"count": len(unreadable), "files": [unreadable[index] for index in sorted(unreadable)]},
        "profile_faults": _profile_faults(feed),
        "passed_over": {
            kind: {"count": num, "first": first} for kind, (num, first) in reader.source.passed_over.items()
        },
        "images_per_second": _speed(feed, seconds),
    }


def _profile_faults(feed: Feed) -> list[str]:
    """Return the names of the pictures whose colour profile is ignored, each with the reason."""
    source = reader_of_source(feed).source
    if not source.is_images:
        return []
    faults = with_images(source, range(len(source)), profile_fault, "data: colour profiles")
    return [f"{source.name_of(index)}: {fault}" for index, fault in faults if isinstance(fault, str)]


def _classes(feed: Feed, unreadable: Container[int]) -> dict[str, int] | None:
    """Return the number of readable samples of each class, and of "unknown" if some have no label."""
    if feed.labels is None:
        return None
    readable = [index for index in feed.usable.tolist() if index not in unreadable]
    counts = Counter(feed.labels[readable].tolist())
    names = list(feed.classes or map(str, range(feed.num_classes or 0)))
    twice = {name for name, number in Counter(names).items() if number > 1}
    by_name = {f"{label} {name}" if name in twice else name: counts[label] for label, name in enumerate(names)}
    return {**by_name, "unknown": counts[-1]} if counts[-1] else by_name


def _pixels(feed: Feed, unreadable: dict[int, str]) -> dict[str, Any]:
    """Return statistics of the inputs, bad samples and duplicates; add samples that cannot be read to `unreadable`."""
    groups: defaultdict[bytes, list[int]] = defaultdict(list)  # samples by the hash of their pixels
    low, high, total = float("inf"), float("-inf"), 0
    not_finite: list[str] = []
    sums = squares = torch.zeros(feed.shape[0], dtype=torch.float64)
    asked = iter(feed.arranged(feed.usable).tolist())
    for batch in feed.unaugmented(feed.usable, 256):
        inputs = batch.inputs.cpu()
        assert batch.indices is not None
        for loaded, image in zip(batch.indices.tolist(), inputs, strict=True):
            index = next(asked)
            if index != loaded:  # another sample stands in for one that cannot be decoded
                unreadable.setdefault(index, feed.describe(index))
                continue
            content = repr(image.shape).encode() + image.numpy().tobytes()
            groups[hashlib.blake2b(content, digest_size=16).digest()].append(index)
            if not image.isfinite().all():
                not_finite.append(feed.describe(index))
        low, high = min(low, float(inputs.min())), max(high, float(inputs.max()))
        by_channel = inputs.double().transpose(0, 1).flatten(1)
        total += by_channel.shape[1]
        sums, squares = sums + by_channel.sum(1), squares + by_channel.square().sum(1)
    mean = sums / total
    std = (squares / total - mean.square()).clamp(min=0).sqrt()
    duplicates = [[feed.describe(index) for index in group] for group in groups.values() if len(group) > 1]
    return {
        "values": {"min": low, "max": high, "mean": mean.tolist(), "std": std.tolist()},
        "not_finite": {"count": len(not_finite), "files": not_finite},
        "duplicates": {"count": sum(len(group) - 1 for group in duplicates), "groups": duplicates[:_GROUPS]},
    }


def _speed(feed: Feed, seconds: float) -> float:
    """Return the images of this rank per second, without the first batch."""
    batches = chain.from_iterable(feed.batches(epoch) for epoch in count())
    next(batches)  # starts the workers, and reads the pages of a file into memory
    images, start = 0, time.perf_counter()
    for batch in batches:
        images += len(batch)
        if time.perf_counter() - start > seconds:
            break
    wait_for(feed.device)
    return images / (time.perf_counter() - start)
