"""All random numbers of a run are a pure function of (seed, stream, position); for dropout, also of the rank.

A stream names the purpose of the numbers. `position` counts consumed and skipped batches. If it counted only
updates, noise that causes a NaN would be drawn again for ever.
"""

import functools
import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch
from torch import Generator, Tensor

STREAMS = ("data", "augment", "noise", "model", "sample", "evaluate")

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def splitmix64(value: int) -> int:
    """Return one output of SplitMix64 for the state `value` (Steele, Lea & Flood 2014, fig. 17)."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def derive_seed(seed: int, stream: str, position: int = 0, rank: int = 0, part: int = 0) -> int:
    """Mix five numbers into a seed in [0, 2**64).

    `stream` is one of STREAMS, or a name of a plugin's own, such as "mixup". `part` is the micro-batch (stream
    "model") or the sample (stream "augment") of a position. Each number goes through SplitMix64 in turn, so
    neighbouring positions share nothing. torch's CPU generators use the low 32 bits.
    """
    return splitmix64(splitmix64(_prefix(seed, stream, rank) ^ position) ^ part)


@contextmanager
def default_generators_kept(device: torch.device | None = None) -> Iterator[None]:
    """Restore the default generators of Python, numpy, torch and a GPU `device` after the `with`."""
    python, arrays = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng([device] if device and device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(arrays)


@functools.lru_cache(maxsize=64)
def _prefix(seed: int, stream: str, rank: int) -> int:
    other = int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8])
    number = STREAMS.index(stream) if stream in STREAMS else other
    return splitmix64(splitmix64(splitmix64(seed & _MASK) ^ number) ^ rank)


def uniforms(seed: int, stream: str, position: int, parts: Tensor, count: int) -> Tensor:
    """Return `count` numbers in [0, 1) for each of `parts` (n, int64): n count, float64.

    Row k comes from a SplitMix64 generator with the seed `derive_seed(seed, stream, position, part=parts[k])`, 53 bits
    per number, so it does not depend on the other parts.
    """
    states = splitmix64_tensor(parts ^ _signed(splitmix64(_prefix(seed, stream, 0) ^ position)))
    steps = torch.tensor([_signed(step * _GAMMA) for step in range(count)], dtype=torch.int64)
    return _shifted(splitmix64_tensor(states[:, None] + steps), 11).double() * 2.0**-53


def splitmix64_tensor(values: Tensor) -> Tensor:
    """Return `splitmix64` of each of `values`: int64, read as unsigned."""
    values = values + _signed(_GAMMA)  # integers of torch wrap, as unsigned integers of C do
    values = (values ^ _shifted(values, 30)) * _signed(0xBF58476D1CE4E5B9)
    values = (values ^ _shifted(values, 27)) * _signed(0x94D049BB133111EB)
    return values ^ _shifted(values, 31)


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _shifted(values: Tensor, bits: int) -> Tensor:
    return (values >> bits) & (_MASK >> bits)  # torch's shift fills up with the sign bit


class Randomness:
    """The generators of a run. Each is kept, and seeded anew for each use, which takes about 1 us."""

    def __init__(self, seed: int, rank: int = 0) -> None:
        self.seed = seed
        self.rank = rank
        self._generators: dict[tuple[str, torch.device], Generator] = {}

    def generator(self, stream: str, position: int, device: torch.device) -> Generator:
        """Return the generator of `stream` at `position` on `device`; the next call for the stream seeds it anew.

        All ranks get the same generator: draw for the `total` samples of a batch, and keep `Batch.own` of the draws.
        """
        generator = self._generators.get((stream, device))
        if generator is None:
            generator = self._generators[stream, device] = Generator(device)
        return generator.manual_seed(derive_seed(self.seed, stream, position))

    def seed_dropout(self, position: int, part: int, device: torch.device, stream: str = "model") -> None:
        """Seed the default generators that dropout draws from, for micro-batch `part` of `position` on this rank.

        Dropout must use the default generators, the only ones that activation checkpointing replays.
        `torch.manual_seed` does the same, eighty times slower.
        """
        seed = derive_seed(self.seed, stream, position, self.rank, part)
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index or 0].manual_seed(seed)
