"""Seeds the global random generators temporarily, such as to initialize a module."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch

from hookdiff.machine.randomness import default_generators_kept


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the global generators of Python, numpy and torch during the `with`; then restore them.

    A module made in the `with`, such as `nn.Linear(2, 1)`, gets weights of this seed, and the training does not change.
    """
    with default_generators_kept(device):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index or 0].manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        yield
