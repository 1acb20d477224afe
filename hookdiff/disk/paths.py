"""Paths of a run directory: its files, its checks, and the run that a path belongs to."""

import os
from pathlib import Path

from hookdiff.disk.lock import LOCK
from hookdiff.errors import UserError, why_missing

CONFIG = "config.toml"
OUTCOME = "outcome.json"  # why and where the run has ended
LAUNCH = ".torchrun"  # name of the job of torchrun that trains, to tell a second attempt from another run
_LEFTOVERS = {LOCK, f".{CONFIG}.partial"}  # files of a run that was killed before its first step


def check_run_dir(path: Path, resume: bool = False, overwrite: bool = False) -> None:
    """Raise UserError unless a run may start at `path`; an earlier run needs `resume` or `overwrite`."""
    if resume or not path.exists() or (path.is_dir() and is_empty(path)):
        return
    if not overwrite:
        raise UserError(f"{path} exists; continue it with --resume, replace it with --overwrite, or choose --out DIR")
    if path.is_symlink():
        raise UserError(f"{path} is a symbolic link and is not overwritten")
    if not (path / CONFIG).is_file():
        raise UserError(f"{path} is no run directory (it has no {CONFIG}) and is not overwritten")


def is_empty(path: Path) -> bool:
    """Return whether the folder `path` is empty, except for files that a run killed before its first step leaves."""
    return all(entry.name in _LEFTOVERS for entry in path.iterdir())


def run_of(path: Path) -> Path:
    """Return the run directory of `path`, which is that directory itself or a checkpoint in it.

    Raises UserError for any other path.
    """
    if (path / CONFIG).is_file():
        return path
    above = Path(os.path.realpath(path)).parent.parent  # Path.resolve raises for a link to itself
    if path.is_dir() and (above / CONFIG).is_file():
        return above
    if path.exists():
        raise UserError(f"{path} is no run directory: it has no {CONFIG}")
    raise no_such_folder(path)


def leads_out(path: Path, run_dir: Path) -> bool:
    """Return whether `path` is outside of `run_dir` once links are followed."""
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(run_dir))


def folder_in(run_dir: Path, name: str) -> Path:
    """Return the path of the folder `name` in a run directory; raises UserError for a link that leads out of it."""
    if leads_out(path := run_dir / name, run_dir):
        raise UserError(f"{path} is a link that leads out of the run directory, to {os.path.realpath(path)}; remove it")
    return path


def no_such_folder(path: Path) -> UserError:
    """Return the error for a missing folder; its message suggests the most similar name."""
    return UserError(f"{path}: no such folder: {why_missing(path)}")


def check_writable(path: Path) -> None:
    """Raise UserError if no file can be written at `path`; the check writes nothing."""
    parent = next((folder for folder in path.absolute().parents if folder.exists()), path)
    if path.is_dir() or not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise UserError(f"{path}: cannot be written; expected a file in a directory with write permission")
