"""The samples to train on, and their order: pure functions of the data, the seed and the epoch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from hookdiff.errors import UserError
from hookdiff.randomness import derive_seed

_SPLIT_SEED = 0  # not the run's seed: every run on the same data holds out the same samples


def split(usable: Tensor, labels: Tensor | None, held_out: int | float) -> tuple[Tensor, Tensor]:
    """Split `usable` (n, int64, sorted) into samples to train on and samples held out, both sorted.

    `held_out` is a count, or a share below 1. With labels each class gives its share, as near as whole samples allow.
    Raises UserError if one side would be empty.
    """
    count = held_out if isinstance(held_out, int) else round(held_out * len(usable))
    if not held_out:
        return usable, usable[:0]
    if not 0 < count < len(usable):
        raise UserError(f"held_out = {held_out} of {len(usable)} samples is {count}: some must be left on either side")
    generator = Generator().manual_seed(derive_seed(_SPLIT_SEED, "data"))
    shuffled = usable[torch.randperm(len(usable), generator=generator)]
    if labels is not None:
        _, classes, sizes = torch.unique(labels[shuffled], return_inverse=True, return_counts=True)
        exact = sizes.double() * count / len(usable)
        quota = exact.floor().long()
        by_remainder = (exact - quota).argsort(descending=True, stable=True)
        quota[by_remainder[: count - int(quota.sum())]] += 1
        by_class = classes.argsort(stable=True)
        rank = torch.empty_like(classes)  # of each sample within its class
        starts = sizes.cumsum(0) - sizes
        rank[by_class] = torch.arange(len(classes)) - starts.repeat_interleave(sizes)
        shuffled = torch.cat((shuffled[rank < quota[classes]], shuffled[rank >= quota[classes]]))
    return shuffled[count:].sort().values, shuffled[:count].sort().values


def balanced(labels: Tensor, generator: Generator) -> Tensor:
    """Return as many positions as there are `labels` (n), shuffled; the counts of the classes differ by at most one.

    A class gives all of its samples before it gives one again. The classes that give one more are drawn at random.
    """
    names, classes, sizes = torch.unique(labels, return_inverse=True, return_counts=True)
    quota = torch.full((len(names),), len(labels) // len(names))
    quota[torch.randperm(len(names), generator=generator)[: len(labels) % len(names)]] += 1
    picked = []
    for members, wanted in zip(classes.argsort(stable=True).split(sizes.tolist()), quota.tolist(), strict=True):
        rounds = [members[torch.randperm(len(members), generator=generator)] for _ in range(-(-wanted // len(members)))]
        picked += [torch.cat(rounds)[:wanted]] if rounds else []
    positions = torch.cat(picked)
    return positions[torch.randperm(len(positions), generator=generator)]


def successors(parts: Sequence[Tensor], total: int) -> Tensor:
    """Return for each of `total` samples the next one of its own part, which replaces it if it cannot be read."""
    following = torch.arange(total)
    for part in parts:
        following[part] = part.roll(-1)
    return following


def replacements(parts: Sequence[Tensor], unreadable: Tensor) -> Tensor:
    """Return for each sample itself, or if it is `unreadable` (bool) its first readable successor.

    Raises UserError if a part, which is sorted, has no readable sample.
    """
    found = torch.arange(len(unreadable))
    for part in parts:
        broken, readable = part[unreadable[part]], part[~unreadable[part]]
        if len(broken) and not len(readable):
            raise UserError("none of the samples of the data, or of those held out, can be read")
        found[broken] = readable[torch.searchsorted(readable, broken) % max(1, len(readable))]
    return found
