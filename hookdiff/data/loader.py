"""Samples that are read when they are due, in this process or by workers that live on from epoch to epoch."""

from __future__ import annotations

import atexit
import random
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import numpy
import torch
from torch import Generator, Tensor
from torch.utils.data import DataLoader, Dataset

from hookdiff.data.decode import Unreadable
from hookdiff.data.source import Images, Source, read, told
from hookdiff.data.transforms import Transforms
from hookdiff.errors import UserError
from hookdiff.randomness import derive_seed

Address = tuple[int, int]  # epoch, index
Sample = tuple[Tensor, int | None, int]  # first stage, c h w; label; index
Stack = tuple[Tensor, Tensor | None, Tensor]  # the same for a batch


class Loader:
    """Reads the samples of `source`; keep it for the next epoch only once its iterator has come to an end."""

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
            worker_init_fn=_begin_work,
            generator=Generator(),  # of its own: it would draw from the default one
        )
        if workers:
            _with_workers.add(self)

    def load(self, epoch: int, parts: Iterable[Tensor]) -> Iterator[Stack]:
        """Yield the samples of each of `parts` (n, int64).

        Raises UserError for one that cannot be used.
        """
        self.addresses.epoch, self.addresses.parts = epoch, parts
        with _signals_wait():
            stacks = iter(self.loader)  # this starts the workers
        for stack in stacks:
            if isinstance(stack, UserError):
                raise stack
            yield stack

    def close(self) -> None:
        """End the workers. When garbage is collected they can no longer be told to, and are waited for in vain."""
        iterator = getattr(self.loader, "_iterator", None)
        if iterator is not None:  # not its truth, which is its length
            iterator._shutdown_workers()


_with_workers: WeakSet[Loader] = WeakSet()


@atexit.register
def _end_workers() -> None:
    """End the workers of all loaders that are still held.

    multiprocessing would send each a single SIGTERM, which none heeds, and wait for it for ever.
    """
    for loader in _with_workers:
        loader.close()


# What Ctrl-C and schedulers send to all processes of a run at once.
_FOR_ALL = {signal.SIGINT, signal.SIGTERM, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else [])}


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Let the signals wait, here and in processes that are started here until they `_begin_work`."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_ALL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_work(worker: int) -> None:
    """Leave it to the training process to stop: it may need more samples before it has, and ends its workers itself.

    It does so with SIGTERM where a worker is stuck, and once more when it exits, so the second one is heeded.
    """

    def first(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    for number in _FOR_ALL:
        signal.signal(number, first if number == signal.SIGTERM else signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_ALL)


class _Addresses:
    """The addresses of an epoch's samples, batch by batch; a DataLoader keeps this one and asks it again."""

    epoch: int = 0
    parts: Iterable[Tensor] = ()

    def __iter__(self) -> Iterator[list[Address]]:
        for part in self.parts:
            yield [(self.epoch, index) for index in part.tolist()]


class ImageReader(Dataset[Sample | UserError]):
    """The first stage of pictures; for one that cannot be read its `following` stand in, or the error is the sample.

    An error is returned, because raised in a worker it would come with a traceback in its message.
    """

    def __init__(
        self, source: Images, transforms: Transforms, shape: tuple[int, ...] | None, following: Tensor | None
    ) -> None:
        self.source, self.transforms, self.shape = source, transforms, shape
        self.following = None if following is None else following.numpy()  # numpy's cost no file descriptor to send

    def __getitem__(self, address: Address) -> Sample | UserError:
        _, index = address
        begun = index
        while True:
            try:
                return read(self.source, index, self.transforms, self.shape), None, index
            except Unreadable as error:
                if self.following is None:
                    return error
                index = int(self.following[index])
                if index == begun:
                    return error


class ItemReader(Dataset[Sample | UserError]):
    """Items of a map-style data set, with all that they may draw from seeded by (seed, epoch, sample).

    So who loads a sample does not matter.
    """

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
        if not isinstance(image, Tensor) and not hasattr(image, "convert"):  # of Pillow, which need not be imported
            return UserError(
                f"sample {index} of the data is a {type(image).__name__}, expected a tensor c h w or a Pillow image"
            )
        try:
            return self.transforms.fit(image), None if label is None else int(label), index
        except (OSError, ValueError) as error:
            return UserError(f"sample {index} of the data: {told(error)}")


def _collate(samples: Sequence[Sample | UserError]) -> Stack | UserError:
    good = [sample for sample in samples if not isinstance(sample, UserError)]
    if len(good) < len(samples):
        return next(sample for sample in samples if isinstance(sample, UserError))
    images, labels, indices = zip(*good, strict=True)
    if len({(image.shape, image.dtype) for image in images}) > 1:
        odd = next(
            k for k, image in enumerate(images) if (image.shape, image.dtype) != (images[0].shape, images[0].dtype)
        )
        one, other = (f"{' x '.join(map(str, images[k].shape))} of {images[k].dtype}" for k in (0, odd))
        return UserError(f"sample {indices[0]} of the data is {one}, sample {indices[odd]} is {other}: say image_size")
    known = [label for label in labels if label is not None]
    return (
        torch.stack(images),
        torch.tensor(known) if len(known) == len(labels) else None,
        torch.tensor(indices),
    )
