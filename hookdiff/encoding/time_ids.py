"""Sizes and crop of a picture as a condition of the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attrs import define
from torch import Tensor

from hookdiff.encoding.encoder import TextEncoder
from hookdiff.images.augment import corners
from hookdiff.images.transforms import Transforms

TIME_IDS = "time_ids"  # the condition; NAME_time_ids for an encoder of texts that asks for it


def names_of(encoders: Mapping[str, TextEncoder], alone: bool) -> list[str]:
    """Return the names of the conditions that `encoders` ask for; with `alone`, also that without an encoder."""
    return [*[f"{name}_{TIME_IDS}" for name, part in encoders.items() if part.time_ids], *[TIME_IDS] * alone]


@define(eq=False)
class TimeIds:
    """Six numbers of a sample, as SDXL takes them: Podell et al. 2023 (arXiv 2307.01952), section 2.2.

    The numbers are height and width of the picture before its resize, top and left of the crop in the resized picture,
    and height and width of the sample, all in pixels. A flip does not change them.
    """

    sizes: Tensor  # of all pictures, height and width: n 2, int64
    transforms: Transforms
    targets: Tensor  # height and width of the picture of each sample: n 2, int64

    def of(self, indices: Tensor, seed: int, epoch: int | None) -> Tensor:
        """Return the numbers (n 6, float32) of the samples `indices` in `epoch`; None: without augmentation."""
        sizes, targets = self.sizes[indices], self.targets[indices]
        several = self.transforms.has_sizes  # one size may be that of larger squares first, for random crops
        cut = [
            self.transforms.corner(height, width, (high, wide) if several else None)
            for (height, width), (high, wide) in zip(sizes.tolist(), targets.tolist(), strict=True)
        ]
        places = torch.tensor(cut).view(-1, 2) + corners(self.transforms, indices, seed, epoch)
        return torch.cat([sizes, places, targets], 1).float()


def of_prompt(target: Sequence[int]) -> Tensor:
    """Return the six numbers (float32) of a generated picture, which is neither resized nor cropped."""
    return torch.tensor([*target, 0, 0, *target], dtype=torch.float32)
