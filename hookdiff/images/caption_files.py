"""The text files with captions that lie beside pictures."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

from hookdiff.disk.reading import open_file, reason
from hookdiff.errors import UserError, shown
from hookdiff.images.labels import as_lines
from hookdiff.images.texts import LARGEST_CAPTIONS, lines_of
from hookdiff.terminal.pace import paced

_AT_ONCE = 256  # files that a thread takes at a time
_THREADS = 16  # threads that wait for a disk or a server


def read_captions(root: Path, names: Sequence[str | None]) -> list[tuple[str, ...]]:
    """Return the captions in each of the files `names` below `root`. None as a name: no captions.

    Raises:
        UserError: for files that cannot be read; the message lists them.
    """
    parts = [names[start : start + _AT_ONCE] for start in range(0, len(names), _AT_ONCE)]
    texts: list[tuple[str, ...]] = []
    problems: list[str] = []
    with ThreadPoolExecutor(_THREADS) as pool:
        results = pool.map(partial(_read_all, root), parts)
        with closing(paced(results, len(names), "data: captions", size=lambda part: len(part[0]))) as paced_parts:
            for captions, wrong in paced_parts:
                texts += captions
                problems += wrong
    if len(problems) > 1:
        raise UserError(f"{len(problems):,} files of captions cannot be read:{as_lines(problems)}")
    for problem in problems:
        raise UserError(problem)
    return texts


def _read_all(root: Path, names: Sequence[str | None]) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return the captions in some files, and the problems of those that cannot be read."""
    texts, problems = list[tuple[str, ...]](), list[str]()
    for name in names:
        captions: tuple[str, ...] = ()
        if name is not None:
            try:
                with open_file(root / name) as file:
                    captions = lines_of(file.read(LARGEST_CAPTIONS + 1) or b"")
            except (OSError, ValueError) as error:
                problems.append(f"{shown(root / name)}: {reason(error) if isinstance(error, OSError) else error}")
        texts.append(captions)
    return texts, problems
