"""The files of a run directory: their names, and whether a run may begin there."""

from __future__ import annotations

from pathlib import Path

from hookdiff.disk.lock import LOCK
from hookdiff.errors import UserError, nearest

CONFIG = "config.toml"
_NOTHING = {LOCK, f".{CONFIG}.partial"}  # the files that a run leaves when it is killed before its first step


def check_run_dir(path: Path, resume: bool = False, overwrite: bool = False) -> None:
    """Raise UserError unless a run may begin at `path`: an earlier one is only touched on request."""
    if resume or not path.exists() or (path.is_dir() and is_empty(path)):
        return
    if not overwrite:
        raise UserError(f"{path} exists; go on with --resume, start over with --overwrite, or choose --out DIR")
    if path.is_symlink():
        raise UserError(f"{path} is a symbolic link, so its target is not removed")
    if not (path / CONFIG).is_file():
        raise UserError(f"{path} is no run directory (it has no {CONFIG}), so it is not overwritten")


def is_empty(path: Path) -> bool:
    """Whether the folder `path` holds nothing of a run."""
    return all(entry.name in _NOTHING for entry in path.iterdir())


def run_of(path: Path) -> Path:
    """Return the directory of the run that `path` belongs to: itself, or of a checkpoint the folder two above.

    Raises UserError when neither is the directory of a run.
    """
    if (path / CONFIG).is_file():
        return path
    if path.is_dir() and (path.resolve().parent.parent / CONFIG).is_file():
        return path.resolve().parent.parent
    if path.exists():
        raise UserError(f"{path} is no run directory: it has no {CONFIG}")
    raise no_such_folder(path)


def no_such_folder(path: Path) -> UserError:
    """Return the error of a folder that is not there, with the nearest name beside it."""
    near = nearest(path.name, [other.name for other in path.parent.iterdir()]) if path.parent.is_dir() else ""
    return UserError(f"{path}: no such folder{near}")
