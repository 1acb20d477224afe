"""Files that are made for each shard, such as its index: once, and again when the shard changes."""

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from attrs import define

from hookdiff.data import locked
from hookdiff.disk import cannot_write, make_folder, reason
from hookdiff.images import as_lines
from hookdiff.terminal import paced
from hookdiff_shards.files import THREADS, Files, Shard
from hookdiff_shards.index import Index, load, make, save
from hookdiff_shards.remote import is_url

logger = logging.getLogger("hookdiff")

_NEAR, _FAR = 1 << 16, 1 << 20  # bytes that are read at a time: from a file, and by URL

Made = TypeVar("Made")


@define(frozen=True)
class Kind(Generic[Made]):
    """A kind of files, one for each shard. The functions get the number of the shard, or the shard itself."""

    name: str  # name of the content in messages
    suffix: str
    make: Callable[[int], Made]  # raises OSError, ValueError
    save: Callable[[Made, Shard, Path], None]
    load: Callable[[Path, int], Made | None]  # None if the shard has changed since the file was made


def indices_of(files: Files, folder: Path) -> list[Index]:
    """Return the index of each shard: see `kept_of`."""

    def make_one(number: int) -> Index:
        return make(partial(files.read, number), files.shards[number].size, block_of(files.shards[number]))

    kind = Kind("index", ".index", make_one, save, lambda path, number: load(path, files.shards[number]))
    return kept_of(files, folder, kind)


def block_of(shard: Shard) -> int:
    """Return the number of bytes to read at a time."""
    return _FAR if is_url(shard.name) else _NEAR


def kept_of(files: Files, folder: Path, kind: Kind[Made]) -> list[Made]:
    """Return the content of the file of each shard in `folder`; files that are missing are made and written.

    A damaged file is reported and made again. Raises ValueError that names the shards that cannot be read, and
    UserError if the folder cannot be written.
    """
    paths = [folder / f"{_hash(shard.place)}{kind.suffix}" for shard in files.shards]
    try:
        make_folder(folder)
        loaded = [_load(files, path, number, kind) for number, path in enumerate(paths)]
        if None in loaded:
            with locked(folder / _hash("\n".join(path.name for path in paths)), shared=False):  # one rank makes them
                return _with_others(files, paths, loaded, kind)
    except OSError as error:
        raise cannot_write(Path(error.filename or folder), error) from None
    return [kept for kept in loaded if kept is not None]


def _hash(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:32]


def _load(files: Files, path: Path, number: int, kind: Kind[Made], report: bool = False) -> Made | None:
    """Return the content of a file; None if the file is missing or damaged, or if the shard has changed since then.

    A damaged file is logged if `report`. A shard without a mark cannot show a change, so no file is used for it.
    """
    shard = files.shards[number]
    if not shard.mark or not os.path.lexists(path):
        return None
    try:
        return kind.load(path, number)
    except Exception as error:  # safetensors, json and Pillow may raise errors of any type on broken bytes
        if report:
            where = f"{path}, with the {kind.name} of {shard.name},"
            logger.warning("data: %s is damaged and made again: %s", where, reason(error))
        return None


def _with_others(files: Files, paths: Sequence[Path], loaded: list[Made | None], kind: Kind[Made]) -> list[Made]:
    """Return the content of all files: from `loaded`, from a file that another process made meanwhile, or made here."""
    shards, problems, made = files.shards, list[str](), dict[int, Made]()
    for number, content in enumerate(loaded):
        known = _load(files, paths[number], number, kind, report=True) if content is None else content
        if known is not None:
            made[number] = known
    lacking = [number for number in range(len(shards)) if number not in made]
    if lacking:
        folder, counts = paths[0].parent, (f"{len(lacking):,}", f"{len(shards):,}")
        logger.info("data: reading %s of %s shards for their %s, which is kept in %s", *counts, kind.name, folder)
    pool = ThreadPoolExecutor(THREADS)
    try:
        new = pool.map(partial(_make, kind), lacking)
        with closing(paced(new, len(lacking), f"data: {kind.name}", "shards", size=lambda _: 1)) as results:
            for number, result in zip(lacking, results, strict=True):
                if isinstance(result, str):
                    problems.append(f"{shards[number].name}: {result}")
                    continue
                made[number] = result
                with locked(paths[0].with_name("writing"), shared=False):  # another data set may use the same shard
                    kind.save(result, shards[number], paths[number])
    finally:
        pool.shutdown(cancel_futures=True)
    if problems:
        several = f"{len(problems):,} of {len(shards):,} shards cannot be read:{as_lines(problems)}"
        raise ValueError(problems[0] if len(problems) == 1 else several)
    return [made[number] for number in range(len(shards))]


def _make(kind: Kind[Made], number: int) -> Made | str:
    """Return the content for a shard, or the reason why it cannot be made."""
    try:
        return kind.make(number)
    except (OSError, ValueError) as error:
        return reason(error) if isinstance(error, OSError) else str(error)
