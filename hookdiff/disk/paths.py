"""Checks of folders and paths."""

import os
from pathlib import Path

from hookdiff.disk.lock import LOCK, check_place
from hookdiff.errors import UserError, nearest


def user_cache() -> Path:
    """Return the folder `hookdiff` in the user's cache; it need not exist."""
    return Path(os.path.expanduser(os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "hookdiff")))


def partial_of(path: Path) -> Path:
    """Return the path of the partial file or folder that `new_file` and `new_folder` rename to `path`."""
    return path.with_name(f".{path.name}.partial")


def is_empty(path: Path) -> bool:
    """Return whether the folder `path` is empty, except for a lock and the partial files of a killed process."""
    return all(entry.name == LOCK or (entry.name[0] == "." and entry.suffix == ".partial") for entry in path.iterdir())


def leads_out(path: Path, run_dir: Path) -> bool:
    """Return whether `path` is outside of `run_dir` once links are followed."""
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(run_dir))


def folder_in(run_dir: Path, name: str) -> Path:
    """Return the path of the folder `name` in a run directory.

    Raises:
        UserError: for a link that leads out of the run directory.
    """
    if leads_out(path := run_dir / name, run_dir):
        raise UserError(f"{path} is a link that leads out of the run directory, to {os.path.realpath(path)}; remove it")
    return path


def why_missing(path: Path) -> str:
    """Return why `path` does not exist: its first missing part, and the nearest name in that folder."""
    parent = next(folder for folder in path.absolute().parents if folder.is_dir())
    missing = path.absolute().relative_to(parent).parts[0]
    if os.path.lexists(parent / missing):
        return f"{parent / missing} is {'no folder' if (parent / missing).exists() else 'a link that leads nowhere'}"
    return f"{parent} has no {missing!r}{nearest(missing, os.listdir(parent))}"


def no_such_folder(path: Path) -> UserError:
    """Return the error for a missing folder; its message suggests the most similar name."""
    return UserError(f"{path}: no such folder: {why_missing(path)}")


def check_writable(path: Path) -> None:
    """Raise UserError if no file can be written at `path`; the check writes nothing."""
    try:
        check_place(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    parent = next((folder for folder in path.absolute().parents if folder.exists()), path)
    if path.is_dir() or not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise UserError(f"{path}: cannot be written; expected a file in a directory with write permission")
