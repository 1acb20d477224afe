"""Reads samples and pictures when they are needed, in this process or in workers, which may persist over epochs."""

import atexit
import errno
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any
from weakref import WeakSet

from attrs import define, evolve, field
from torch import Generator, Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from hookdiff.data.reader import Stack
from hookdiff.data.source import AnySource
from hookdiff.errors import StorageError, UserError
from hookdiff.images.decoding import Unreadable
from hookdiff.images.items import LoadedSample, collate
from hookdiff.images.picture_reading import with_image
from hookdiff.images.shape_of import ShapeOf
from hookdiff.images.transforms import Transforms
from hookdiff.machine.safe_path import safe_path
from hookdiff.options.fields import about, between
from hookdiff.terminal.words import byte_size

_SHM = "/dev/shm"


@define(frozen=True, kw_only=True)
class Workers:
    """The processes that load samples."""

    workers: int = field(
        default=0,
        validator=between(0, 1024),
        metadata=about("processes that load samples, unless the samples are in memory or on disk"),
    )
    prefetch: int = field(default=2, validator=between(1, 1024), metadata=about("batches that each worker loads ahead"))


class Loader:
    """Calls `read` for addresses, in this process or in workers. Exhaust one `load` before the next begins.

    Addresses and results go to workers and back as pickles. The pickle of a tensor takes a file descriptor.
    """

    def __init__(self, read: Callable[[Any], Any], workers: int, prefetch: int, pin_memory: bool) -> None:
        self.addresses: list[Any] = []
        self.loader: DataLoader[Any] = DataLoader(
            _Reader(read),
            batch_size=None,  # an address may be that of a batch
            collate_fn=_as_it_is,
            sampler=self.addresses,
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            persistent_workers=workers > 0,
            pin_memory=pin_memory,
            worker_init_fn=_begin_worker,
            generator=Generator(),  # else the loader would draw from the default one
        )
        _loaders.add(self)

    def load(self, addresses: Iterable[Any]) -> Iterator[Any]:
        """Yield the result of `read` for each of the addresses. Raises the UserError that `read` raises."""
        self.addresses[:] = addresses
        with _signals_blocked(), safe_path(), _shared_memory():
            results = iter(self.loader)  # this starts the workers
        for result in results:
            if isinstance(result, UserError):
                raise result
            yield result

    def close(self) -> None:
        """End the workers. Else torch would wait for them in vain when the loader is garbage-collected."""
        iterator = getattr(self.loader, "_iterator", None)
        if iterator is not None:  # `if iterator` would ask for its length
            iterator._shutdown_workers()


_loaders: WeakSet[Loader] = WeakSet()


@atexit.register
def _end_workers() -> None:
    # multiprocessing would send each worker one SIGTERM, which the worker ignores, and then wait for it for ever.
    for loader in _loaders:
        loader.close()


# The signals that Ctrl-C and schedulers send to all processes of a run at once.
_FOR_ALL = {signal.SIGINT, signal.SIGTERM, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else [])}


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block the signals in this process, and in the workers that it starts, until these call `_begin_worker`."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_ALL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_worker(worker: int) -> None:
    """Make a worker ignore the signals, but end at its second SIGTERM, and not report that the training is gone.

    The training process may need more samples before it stops, and ends its workers itself: it sends SIGTERM to a
    worker that hangs, and again when it exits.
    """

    def end_at_the_next(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    for number in _FOR_ALL:
        signal.signal(number, end_at_the_next if number == signal.SIGTERM else signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_ALL)
    sys.excepthook = _report_all_but_a_closed_connection


def _report_all_but_a_closed_connection(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    # The thread that hands over samples raises these errors if the training is killed. The worker then ends itself.
    if not issubclass(kind, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, traceback)


def _as_it_is(result: Any) -> Any:
    return result


class _Reader(Dataset[Any]):
    def __init__(self, read: Callable[[Any], Any]) -> None:
        self.read = read

    def __getitem__(self, address: Any) -> Any:
        try:
            result = self.read(address)
            if get_worker_info():
                _share(result)
        except UserError as error:
            return error  # torch would add a traceback to the message of an error in a worker
        return result


def _share(result: Any) -> None:
    """Move the tensors of a result to shared memory. If torch did so on its own thread, an error would hang the run."""
    if isinstance(result, Tensor) and result.numel():
        with _shared_memory():
            result.share_memory_()  # type: ignore[no-untyped-call]
    elif isinstance(result, (tuple, list, Mapping)):
        for value in result.values() if isinstance(result, Mapping) else result:
            _share(value)


@contextmanager
def _shared_memory() -> Iterator[None]:
    """Turn an error of the shared memory, through which workers send samples, into a StorageError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENOSPC:
            raise
        size = f" ({_SHM} has {byte_size(shutil.disk_usage(_SHM).total)})" if os.path.isdir(_SHM) else ""
        raise StorageError(
            f"data.workers: the workers cannot share their samples{size}: {str(error).splitlines()[0]}; give the "
            "container more shared memory (docker run --shm-size=8g), set data.workers = 0, or keep decoded pictures "
            'with data.store = "memory" or "disk"'
        ) from None


def read_batch(read: Callable[[int, int], LoadedSample], address: tuple[int, Any]) -> Stack:
    """Return the samples at `address`: an epoch, and indices (n, int64, numpy)."""
    epoch, indices = address
    return collate([read(epoch, index) for index in indices.tolist()])


def read_image(
    source: AnySource, transforms: Transforms, shape_of: ShapeOf, orders: Sequence[Any], epoch: int, index: int
) -> LoadedSample:
    """Return a picture, decoded and resized. Its first readable successor replaces an unreadable picture.

    Each of `orders` has the next sample for each sample, in circles. A circle of the next order is tried if all samples
    of the circle before cannot be read; its pictures may have other shapes.

    Raises:
        Unreadable: if no sample of these circles can be read.
    """
    shape, unreadable = shape_of(index), list[Unreadable]()
    for candidate, fitting in _candidates(index, transforms, orders):
        try:
            return with_image(source, candidate, partial(fitting.fit_to, shape=shape)), None, candidate, {}
        except Unreadable as error:
            unreadable.append(error)
    raise unreadable[0]


def _candidates(first: int, transforms: Transforms, orders: Sequence[Any]) -> Iterator[tuple[int, Transforms]]:
    """Yield the sample and those that may replace it, with their transforms."""
    yield first, transforms
    for order in orders:
        index = int(order[first])
        while index != first:
            yield index, transforms
            index = int(order[index])
        transforms = evolve(transforms, upscale=True)  # a picture for another shape may be too small for this one
