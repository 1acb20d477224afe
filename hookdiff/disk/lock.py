"""One run, one writer: the lock on a run directory."""

from __future__ import annotations

import errno
import logging
import os
import socket
from contextlib import ExitStack
from pathlib import Path

from hookdiff.errors import UserError

LOCK = ".lock"  # in the run directory
_held: dict[Path, ExitStack] = {}  # by this process, which the system would let in a second time
log = logging.getLogger("hookdiff")


def lock_run_dir(run_dir: Path, resources: ExitStack) -> None:
    """Keep all others from writing to `run_dir`, which must be there, until `resources` are closed.

    Asked again with the same resources, it does nothing. Raises UserError that names the process which holds the lock.
    A process that died holds none, since the lock is the system's: not even while processes live on that it had
    started.
    """
    path = run_dir.resolve()
    if _held.get(path) is not resources:
        if path in _held:
            raise UserError(f"{run_dir} is in use by another Loop of this process")
        descriptor = _take(run_dir)
        _held[path] = resources
        resources.callback(_release, path, descriptor)


def _take(run_dir: Path) -> int:
    """Return the descriptor of the locked file, which holds the host and the process id of its owner."""
    descriptor = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _lock(descriptor)
    except OSError as error:
        owner = os.read(descriptor, 1000).decode(errors="replace").split()
        os.close(descriptor)
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise UserError(f"{run_dir / LOCK}: cannot be locked: {error.strerror}") from None
        host, pid = [*owner, "?", "?"][:2]
        raise UserError(
            f"{run_dir} is in use by process {pid} on {host}; wait for it, stop it, or choose --out DIR"
        ) from None
    if owner := os.read(descriptor, 1000).decode(errors="replace").split():
        log.info("%s: took over the lock of process %s, which is gone", run_dir, owner[-1])
    _write(descriptor, f"{socket.gethostname()} {os.getpid()}\n")
    return descriptor


def _release(path: Path, descriptor: int) -> None:
    # The file stays: another may wait for this very one, and would lock a name that is gone.
    _write(descriptor, "")
    os.close(descriptor)
    del _held[path]


def _write(descriptor: int, text: str) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)


def _lock(descriptor: int) -> None:
    """Raise OSError when another process holds the lock.

    Of a process and not of an open file (`flock`): workers that it forked have the file too, and may outlive it.
    """
    if os.name != "nt":  # which has neither this call nor forks
        import fcntl

        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
