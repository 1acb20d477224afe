"""The samples to train on, and their order: pure functions of the data, the seed and the epoch."""

import torch
from torch import Generator, Tensor

from hookdiff.errors import UserError
from hookdiff.machine.randomness import derive_seed

_SPLIT_SEED = 0  # not the run's seed: every run on the same data holds out the same samples


def split(usable: Tensor, labels: Tensor | None, held_out: int | float) -> tuple[Tensor, Tensor]:
    """Split `usable` (n, int64, sorted) into samples to train on and samples held out, both sorted.

    `held_out` is a count, or a share below 1. With labels, the same share of each class is held out, up to rounding.
    Raises UserError if one side would be empty.
    """
    if not held_out:
        return usable, usable[:0]
    count = held_out if isinstance(held_out, int) else round(held_out * len(usable))
    if not 0 < count < len(usable):
        raise UserError(f"held_out = {held_out} of {len(usable):,} samples is {count}: hold out some, not all of them")
    generator = Generator().manual_seed(derive_seed(_SPLIT_SEED, "data"))
    shuffled = usable[torch.randperm(len(usable), generator=generator)]
    names = torch.zeros_like(shuffled) if labels is None else labels[shuffled]
    _, classes, sizes = torch.unique(names, return_inverse=True, return_counts=True)
    exact = sizes.double() * count / len(usable)
    quota = exact.floor().long()
    by_remainder = (exact - quota).argsort(descending=True, stable=True)
    quota[by_remainder[: count - int(quota.sum())]] += 1
    held = torch.zeros(len(shuffled), dtype=torch.bool)
    for members, wanted in zip(classes.argsort(stable=True).split(sizes.tolist()), quota.tolist(), strict=True):
        held[members[:wanted]] = True
    return shuffled[~held].sort().values, shuffled[held].sort().values


def balanced(labels: Tensor, generator: Generator) -> Tensor:
    """Return n positions in `labels` (n), shuffled, with each class equally often; random classes get the remainder.

    No sample of a class is drawn again before all samples of the class have been drawn.
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
