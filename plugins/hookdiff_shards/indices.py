"""The indices of many shards, kept in a folder. Each is made once, and again when its shard changes."""

import hashlib
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

from hookdiff.disk import cannot_write, make_folder
from hookdiff.images import as_lines, locked, reason
from hookdiff.terminal import paced
from hookdiff_shards.files import THREADS, Files, Shard
from hookdiff_shards.index import Index, load, make, save
from hookdiff_shards.remote import is_url

logger = logging.getLogger("hookdiff")

_NEAR, _FAR = 1 << 16, 1 << 20  # bytes that are read at a time, of a file and by URL


def indices_of(files: Files, folder: Path) -> list[Index]:
    """Return the index of each shard, from `folder` if it is there; others are made, and written there.

    An index that is damaged is reported and made again. Raises ValueError that names the shards that cannot be read,
    and UserError if the folder cannot be written.
    """
    names = [_hash(shard.place) for shard in files.shards]
    paths = [folder / f"{name}.index" for name in names]
    try:
        make_folder(folder)
        found = [_load(path, shard) for path, shard in zip(paths, files.shards, strict=True)]
        if None in found:
            with locked(folder / _hash("\n".join(names)), shared=False):  # so that only one rank makes them
                return _with_others(files, paths, found)
    except OSError as error:
        raise cannot_write(Path(error.filename or folder), error) from None
    return [index for index in found if index is not None]


def _hash(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:32]


def _load(path: Path, shard: Shard, report: bool = False) -> Index | None:
    """Return the index in a file; None if it is missing, of an earlier state or damaged, which is logged on request.

    Without a mark of the shard, nothing says of which state it is.
    """
    if not shard.mark or not os.path.lexists(path):
        return None
    try:
        return load(path, shard)
    except Exception as error:  # of safetensors, json and Pillow, which may raise any on broken bytes
        if report:
            logger.warning("data: %s, the index of %s, is damaged and made again: %s", path, shard.name, reason(error))
        return None


def _with_others(files: Files, paths: Sequence[Path], found: list[Index | None]) -> list[Index]:
    """Return all indices: those `found`, those that another process has made meanwhile, and new ones."""
    shards, problems, made = files.shards, list[str](), dict[int, Index]()
    for number, index in enumerate(found):
        known = _load(paths[number], shards[number], report=True) if index is None else index
        if known is not None:
            made[number] = known
    lacking = [number for number in range(len(shards)) if number not in made]
    if lacking:
        folder = paths[0].parent
        logger.info(
            "data: reading the headers of %s of %s shards for an index in %s",
            f"{len(lacking):,}",
            f"{len(shards):,}",
            folder,
        )
    pool = ThreadPoolExecutor(THREADS)
    try:
        new = pool.map(partial(_make, files), lacking)
        with closing(paced(new, len(lacking), "data: index", "shards", size=lambda _: 1)) as results:
            for number, result in zip(lacking, results, strict=True):
                if isinstance(result, str):
                    problems.append(f"{shards[number].name}: {result}")
                    continue
                made[number] = result
                with locked(paths[0].with_name("writing"), shared=False):  # another set may have the same shard
                    save(result, shards[number], paths[number])
    finally:
        pool.shutdown(cancel_futures=True)
    if problems:
        count = f"{len(problems):,} of {len(shards):,} shards cannot be read:{as_lines(problems)}"
        raise ValueError(problems[0] if len(problems) == 1 else count)
    return [made[number] for number in range(len(shards))]


def _make(files: Files, number: int) -> Index | str:
    """Return the index of a shard, or the reason why it has none."""
    shard = files.shards[number]
    try:
        return make(partial(files.read, number), shard.size, _FAR if is_url(shard.name) else _NEAR)
    except (OSError, ValueError) as error:
        return reason(error) if isinstance(error, OSError) else str(error)
