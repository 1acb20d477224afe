"""Ranks as real processes that begin at once: forked from one that has imported torch and hookdiff, and done no more.

Such an import takes longer than the work of most ranks in the tests.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from attrs import define

if TYPE_CHECKING:  # Windows has neither
    from multiprocessing.context import ForkServerContext, ForkServerProcess

PATIENCE = 300  # seconds that a process may take on a busy machine
_IMPORTED = ["torch._dynamo", "torch.distributed.fsdp", "tests.saved_on_ranks"]


@define(frozen=True)
class Process:
    """A process that has begun."""

    process: ForkServerProcess
    files: tuple[Path, Path]  # what it writes to stdout and stderr

    def finish(self) -> tuple[int, str, str]:
        """Wait for the process; return its exit code, stdout and stderr."""
        self.process.join(PATIENCE)
        out, err = (path.read_text() for path in self.files)
        assert self.process.exitcode is not None, err
        return self.process.exitcode, out, err


@contextmanager
def forked(folder: Path, num: int, work: Callable[..., None], *arguments: object) -> Iterator[list[Process]]:
    """Call `work` with the number of the rank and `arguments` in `num` processes, and kill them when the block ends.

    Nothing watches them: if one dies, the others are not ended. Their output goes to files in `folder`.
    """
    started = []
    try:
        for rank in range(num):
            files = folder / f"{rank}.out", folder / f"{rank}.err"
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            process = _context().Process(target=_begin, args=(environment, files, work, rank, *arguments))
            process.start()
            started.append(Process(process, files))
        yield started
    finally:
        for one in started:
            one.process.kill()
            one.process.join()


@cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    with pytest.MonkeyPatch.context() as patch:  # read when torch is imported
        patch.setenv("OMP_NUM_THREADS", "1")
        forkserver.ensure_running()
    return context


def _begin(
    environment: dict[str, str], files: tuple[Path, Path], work: Callable[..., None], *arguments: object
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for stream, path in zip((sys.stdout, sys.stderr), files, strict=True):
        with path.open("wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    work(*arguments)
