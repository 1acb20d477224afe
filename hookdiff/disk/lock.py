"""The lock of a run directory: one process at a time writes to it, and never through a link to another folder."""

import errno
import logging
import os
import socket
import stat
import time
from contextlib import ExitStack
from io import FileIO
from pathlib import Path

from attrs import define

from hookdiff.disk.reading import check_kind
from hookdiff.errors import StorageError, UserError

LOCK = ".lock"  # in the run directory
logger = logging.getLogger("hookdiff")


@define(frozen=True, eq=False)
class _Held:
    """A run directory that this process has locked."""

    path: Path  # as the run names it
    resources: ExitStack
    folder: os.stat_result
    lock: os.stat_result  # of the lock file, which stays open, so that no other file gets its inode

    def has(self, path: Path) -> bool:
        return Path(os.path.abspath(path)).is_relative_to(os.path.abspath(self.path))

    def check(self, path: Path) -> None:
        try:
            now = os.stat(self.path), os.stat(self.path / LOCK)
        except (FileNotFoundError, NotADirectoryError):
            now = None
        if now is None or not all(map(os.path.samestat, now, (self.folder, self.lock))):
            gone = f"{self.path}, or its {LOCK}, was moved or removed during the run"
            raise StorageError(f"{gone}; the run ends, and writes nothing more")
        _check_inside(path, self.path)


_held: dict[Path, _Held] = {}  # by real path; the system would grant a process the same lock twice
_confined: dict[Path, None] = {}  # run directories of `confine`, as given and as real paths


def confine(run_dir: Path) -> None:
    """From now on, let `check_place` refuse links that lead out of this run directory, which may be untrusted."""
    _confined.update(dict.fromkeys((Path(os.path.abspath(run_dir)), Path(os.path.realpath(run_dir)))))


def check_place(path: Path) -> None:
    """Check a file or folder before it is written, if this process has locked or confined its run directory.

    Raises:
        StorageError: if a locked directory or its lock has been moved or removed since.
        OSError: if a link leads out of the directory.
    """
    for held in list(_held.values()):  # another thread may lock a directory meanwhile
        if held.has(path):
            held.check(path)
    place = Path(os.path.abspath(path))
    for folder in [folder for folder in place.parents if folder in _confined]:
        _check_inside(path, folder)


def is_in_run(path: Path) -> bool:
    """Return whether `path` is, or is in, a run directory that this process has locked or confined."""
    place = Path(os.path.abspath(path))
    return any(held.has(path) for held in list(_held.values())) or any(
        folder in _confined for folder in (place, *place.parents)
    )


def _check_inside(path: Path, run_dir: Path) -> None:
    real = os.path.realpath(path)
    if not Path(real).is_relative_to(os.path.realpath(run_dir)):
        raise OSError(errno.EXDEV, f"A link leads out of the run directory, to {real}", str(path))


def lock_run_dir(run_dir: Path, resources: ExitStack) -> None:
    """Lock the existing folder `run_dir` until `resources` are closed; with the same resources again, do nothing.

    The system releases the lock when the process dies, even if worker processes that it started live on.

    Raises:
        UserError: with the time since which another process holds the lock, its id and its host.
    """
    path = run_dir.resolve()
    if (held := _held.get(path)) and held.resources is resources:
        return
    if held:
        raise _used_here(run_dir)
    lock = run_dir / LOCK
    if os.path.lexists(lock) and not stat.S_ISREG(os.lstat(lock).st_mode):
        raise UserError(f"{lock} is a link, a folder, a pipe or a device, and no lock; remove it")
    file = _locked(run_dir, lock)
    if owner := _owner(file):
        logger.info("%s: took over the lock of process %s, which no longer runs", run_dir, owner[-1])
    _held[path] = _Held(run_dir, resources, os.stat(run_dir), os.fstat(file.fileno()))
    resources.callback(_release, path, file)
    file.truncate(0)
    file.write(f"{socket.gethostname()} {os.getpid()}\n".encode())


def _locked(run_dir: Path, lock: Path) -> FileIO:
    """Open and lock the file `lock`; a file with a second name (a hard link) is replaced by a new file."""
    while True:
        if _is_held(lock):  # by a hard link in a copied run; to open and close it would release that lock
            if os.stat(lock).st_nlink == 1:
                raise _used_here(run_dir)
            lock.unlink()
        file = lock.open("a+b", buffering=0)
        try:
            if os.name != "nt":  # Windows has no such lock
                _lock(file)
        except OSError as error:
            with file:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    raise _running(run_dir, file) from None
            raise UserError(f"{lock}: cannot be locked: {error.strerror}; use a folder on another disk") from None
        status, is_there = os.fstat(file.fileno()), os.path.lexists(lock)
        if status.st_nlink == 1 and is_there and os.path.samestat(os.lstat(lock), status):
            return file
        if os.name == "nt":
            file.close()  # Windows removes no open file
        if status.st_nlink > 1 and is_there:
            lock.unlink()  # while it is locked, so that no other process takes it for the lock
        file.close()


def check_unlocked(run_dir: Path) -> None:
    """Raise UserError, as `lock_run_dir` does, if a process holds the lock of `run_dir`; lock nothing."""
    if os.name == "nt" or not is_locked(run_dir):  # Windows has no such lock, and a killed run leaves its name
        return
    if run_dir.resolve() in _held or _is_held(run_dir / LOCK):
        raise _used_here(run_dir)
    with FileIO(run_dir / LOCK) as file:
        raise _running(run_dir, file)


def _used_here(run_dir: Path) -> UserError:
    return UserError(f"{run_dir} is in use by another Loop of this process; close it first")


def _running(run_dir: Path, file: FileIO) -> UserError:
    """Return the error for a run of another process, which has locked and written `file`."""
    host, process = [*_owner(file), "?", "?"][:2]
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(os.fstat(file.fileno()).st_mtime))
    return UserError(
        f"{run_dir} has been running since {since}, as process {process} on {host}; wait for it, stop it, or "
        "choose --out DIR"
    )


def _is_held(lock: Path) -> bool:
    """Return whether this process holds the lock of that file, perhaps under another name."""
    try:
        status = os.stat(lock)
    except OSError:
        return False
    return any(os.path.samestat(status, held.lock) for held in list(_held.values()))


def _lock(file: FileIO) -> None:
    """Lock the file for this process; raise OSError if another process holds the lock."""
    import fcntl

    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not flock: forked workers would inherit its lock
    except OSError:
        time.sleep(0.1)  # `is_locked` of another process may hold it for an instant
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_locked(run_dir: Path, besides: ExitStack | None = None) -> bool:
    """Return whether a process, this one or another, holds the lock of `run_dir`; that of `besides` does not count."""
    if _held and (held := _held.get(run_dir.resolve())):
        return held.resources is not besides  # the file is not opened, because closing it would release the lock
    if _is_held(run_dir / LOCK):  # a copy with hard links has the lock file of the run
        return True
    try:
        check_kind(run_dir / LOCK)
        file = FileIO(run_dir / LOCK)
    except OSError:  # no lock exists, or it cannot be read
        return False
    with file:
        if not _owner(file):
            return False
        if os.name != "nt":
            import fcntl

            try:
                fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError as error:
                return error.errno in (errno.EACCES, errno.EAGAIN)
            return False
        return True


def _release(path: Path, file: FileIO) -> None:
    if os.fstat(file.fileno()).st_nlink < 2:  # else a copy of the run, made meanwhile, has the same file
        file.truncate(0)  # not deleted: another process may have it open, and would then lock a deleted file
    file.close()
    del _held[path]


def _owner(file: FileIO) -> list[str]:
    """Return the host and the process id in the file, which is empty while nobody holds the lock."""
    file.seek(0)
    return file.readall().decode(errors="replace").split()
