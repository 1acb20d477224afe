"""Samples that are read when they are needed, in this process or by workers that live on from epoch to epoch."""

from __future__ import annotations

import atexit
import random
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

import numpy
import torch
from torch import Generator, Tensor
from torch.utils.data import DataLoader, Dataset

from hookdiff.data.decode import Unreadable
from hookdiff.data.source import Images, Source, reason, with_image
from hookdiff.data.transforms import Transforms
from hookdiff.errors import UserError
from hookdiff.randomness import derive_seed

Address = tuple[int, int]  # epoch, index
Sample = tuple[Tensor, int | None, int]  # first stage, c h w; label; index
Stack = tuple[Tensor, Tensor | None, Tensor]  # the same of a batch


class Loader:
    """Reads the samples of a source. It can load another epoch only if the iterator of the last one is exhausted."""

    def __init__(self, reader: Dataset[Any], workers: int, prefetch: int, pin_memory: bool) -> None:
        self.addresses = _Addresses()
        self.loader: DataLoader[Any] = DataLoader(
            reader,
            batch_sampler=self.addresses,
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            persistent_workers=workers > 0,
            pin_memory=pin_memory,
            collate_fn=_collate,
            worker_init_fn=_handle_signals,
            generator=Generator(),  # else the loader would draw from the default one
        )
        if workers:
            _with_workers.add(self)

    def load(self, epoch: int, parts: Iterable[Tensor]) -> Iterator[Stack]:
        """Yield the samples of each of `parts` (n, int64).

        Raises UserError for a sample that cannot be used.
        """
        self.addresses.epoch, self.addresses.parts = epoch, parts
        with _signals_blocked():
            stacks = iter(self.loader)  # this starts the workers
        for stack in stacks:
            if isinstance(stack, UserError):
                raise stack
            yield stack

    def close(self) -> None:
        """End the workers. torch cannot end them once garbage is collected, and would wait for them in vain."""
        iterator = getattr(self.loader, "_iterator", None)
        if iterator is not None:  # its truth value would be its length
            iterator._shutdown_workers()


_with_workers: WeakSet[Loader] = WeakSet()


@atexit.register
def _end_workers() -> None:
    """End the workers of all loaders.

    multiprocessing would send each a single SIGTERM, which a worker ignores, and wait for it for ever.
    """
    for loader in _with_workers:
        loader.close()


# The signals that Ctrl-C and schedulers send to all processes of a run at once.
_FOR_ALL = {signal.SIGINT, signal.SIGTERM, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else [])}


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block the signals here, and in processes that are started here until they call `_handle_signals`."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_ALL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _handle_signals(worker: int) -> None:
    """Make a worker ignore the signals, but end at its second SIGTERM.

    The training process may need more samples before it stops, and ends its workers itself: with SIGTERM if one hangs,
    and with another when it exits.
    """

    def end_at_the_next(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    for number in _FOR_ALL:
        signal.signal(number, end_at_the_next if number == signal.SIGTERM else signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_ALL)


class _Addresses:
    """The addresses of an epoch's samples, batch by batch; a DataLoader iterates the same object in each epoch."""

    epoch: int = 0
    parts: Iterable[Tensor] = ()

    def __iter__(self) -> Iterator[list[Address]]:
        for part in self.parts:
            yield [(self.epoch, index) for index in part.tolist()]


class ImageReader(Dataset[Sample | UserError]):
    """The first stage of pictures. With `successors` the next readable picture replaces one that cannot be read.

    An error is returned instead of raised: raised in a worker, it would have a traceback in its message.
    """

    def __init__(
        self, source: Images, transforms: Transforms, shape: tuple[int, ...] | None, successors: Tensor | None
    ) -> None:
        self.source, self.fit = source, partial(transforms.fit, shape=shape)
        # As a numpy array, which needs no file descriptor to be sent to a worker.
        self.successors = None if successors is None else successors.numpy()

    def __getitem__(self, address: Address) -> Sample | UserError:
        _, first = address
        index = first
        while True:
            try:
                return with_image(self.source, index, self.fit), None, index
            except Unreadable as error:
                if self.successors is None or (index := int(self.successors[index])) == first:
                    return error


class ItemReader(Dataset[Sample | UserError]):
    """The items of a map-style data set. The default generators are seeded by (seed, epoch, sample) for each item."""

    def __init__(self, source: Source, transforms: Transforms, seed: int) -> None:
        self.source, self.transforms, self.seed = source, transforms, seed

    def __getitem__(self, address: Address) -> Sample | UserError:
        epoch, index = address
        seed = derive_seed(self.seed, "augment", epoch, part=index)
        random.seed(seed)
        numpy.random.seed(seed & 0xFFFFFFFF)
        torch.default_generator.manual_seed(seed)
        item = self.source[index]
        image, label = item if isinstance(item, (tuple, list)) and len(item) == 2 else (item, None)
        if not isinstance(image, Tensor) and not hasattr(image, "convert"):  # as an image of Pillow has
            return UserError(
                f"sample {index} of the data is a {type(image).__name__}, expected a tensor c h w or a Pillow image"
            )
        try:
            return self.transforms.fit(image), None if label is None else int(label), index
        except (OSError, ValueError) as error:
            return UserError(f"sample {index} of the data: {reason(error)}")


def _collate(samples: Sequence[Sample | UserError]) -> Stack | UserError:
    good = []
    for sample in samples:
        if isinstance(sample, UserError):
            return sample
        good.append(sample)
    images, labels, indices = zip(*good, strict=True)
    for image, index in zip(images, indices, strict=True):
        if (image.shape, image.dtype) != (images[0].shape, images[0].dtype):
            one, other = (f"{' x '.join(map(str, each.shape))} of {each.dtype}" for each in (images[0], image))
            return UserError(f"sample {indices[0]} of the data is {one}, sample {index} is {other}: set image_size")
    known = None if None in labels else torch.tensor(labels)
    return torch.stack(images), known, torch.tensor(indices)
