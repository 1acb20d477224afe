"""The lock of a run directory, which lets one process at a time write to it."""

import errno
import logging
import os
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from hookdiff.errors import UserError

LOCK = ".lock"  # in the run directory
_held: dict[Path, ExitStack] = {}  # locks of this process, because the system would grant it the same lock twice
log = logging.getLogger("hookdiff")


def lock_run_dir(run_dir: Path, resources: ExitStack) -> None:
    """Lock the existing folder `run_dir` until `resources` are closed; with the same resources again, do nothing.

    The system releases the lock when the process dies, even if worker processes that it started live on. Raises
    UserError with the host and the id of the process that holds the lock.
    """
    path = run_dir.resolve()
    if _held.get(path) is resources:
        return
    if path in _held:
        raise UserError(f"{run_dir} is in use by another Loop of this process")
    file: BinaryIO = (run_dir / LOCK).open("a+b", buffering=0)
    try:
        if os.name != "nt":  # Windows has no such lock
            import fcntl

            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not flock: forked workers would inherit its lock
    except OSError as error:
        host, process = [*_owner(file), "?", "?"][:2]
        file.close()
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise UserError(f"{run_dir / LOCK}: cannot be locked: {error.strerror}") from None
        holder = f"process {process} on {host}"
        raise UserError(f"{run_dir} is in use by {holder}; wait for it, stop it, or choose --out DIR") from None
    if owner := _owner(file):
        log.info("%s: took over the lock of process %s, which no longer runs", run_dir, owner[-1])
    _held[path] = resources
    resources.callback(_release, path, file)
    file.truncate(0)
    file.write(f"{socket.gethostname()} {os.getpid()}\n".encode())


def _release(path: Path, file: BinaryIO) -> None:
    file.truncate(0)  # not deleted: another process may have it open, and would then lock a deleted file
    file.close()
    del _held[path]


def _owner(file: BinaryIO) -> list[str]:
    """Return the host and the process id in the file, which is empty while nobody holds the lock."""
    file.seek(0)
    return file.read().decode(errors="replace").split()
