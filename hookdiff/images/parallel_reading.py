"""Goes through all pictures of a source once, in this process or, if that takes long, in workers."""

import multiprocessing
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any, TypeVar

from hookdiff.data.source import AnySource, Images
from hookdiff.images.decoding import Unreadable
from hookdiff.images.loader import Loader
from hookdiff.images.picture_reading import with_image
from hookdiff.machine.usage import num_cpus
from hookdiff.terminal.pace import paced

_CHUNK = 64  # pictures that a worker takes at a time
_PREFETCH = 2  # chunks of each worker that may wait
# Workers start if reading takes more seconds: a fork is quick, any other start of a process imports torch.
_WORTH = 1.0 if multiprocessing.get_all_start_methods()[0] == "fork" else 20.0

Result = TypeVar("Result")
Read = Callable[[Sequence[int]], list[Result]]


def with_images(
    source: AnySource | Images, indices: Sequence[int], function: Callable[[Any], Result], what: str | None = None
) -> Iterator[tuple[int, Result | Unreadable]]:
    """Yield each of `indices`, in order, with `function(picture)`, or with the error of an unreadable picture.

    Workers are processes, because threads that decode small pictures wait for each other. They get a pickle of
    `function`, and send back pickles of its results. `what` names the progress bar, such as "data: decoding"; None: no
    bar.

    Raises:
        StorageError: if the disk or the server of the pictures fails.
    """
    source = AnySource.of(source)
    read = partial(_read, source, function)
    with closing(_with_images(indices, read, may_share=not source.one_at_a_time)) as results:
        if what is None:
            yield from results
        else:
            with closing(paced(results, len(indices), what, size=lambda _: 1)) as shown:
                yield from shown


def _with_images(
    indices: Sequence[int], read: Read[Result], may_share: bool
) -> Generator[tuple[int, Result], None, None]:
    first, rest = indices[:_CHUNK], indices[_CHUNK:]
    results = read(first[:1])  # alone, since it imports the decoders
    begun = time.perf_counter()
    results += read(first[1:])
    seconds = (time.perf_counter() - begun) / (_CHUNK - 1) * len(rest)
    yield from zip(first, results, strict=True)
    chunks = [rest[start : start + _CHUNK] for start in range(0, len(rest), _CHUNK)]
    workers = num_cpus() if may_share and seconds > _WORTH else 0
    with closing(Loader(read, workers, _PREFETCH, pin_memory=False)) as loader:
        for chunk, results in zip(chunks, loader.load(chunks), strict=True):
            yield from zip(chunk, results, strict=True)


def _read(source: AnySource, function: Callable[[Any], Result], indices: Sequence[int]) -> list[Result | Unreadable]:
    results: list[Result | Unreadable] = []
    for index in indices:
        try:
            results.append(with_image(source, index, function))
        except Unreadable as error:
            results.append(error)
    return results
