"""Checks whether a folder is a run directory, and whether a run may be written there."""

import os
from pathlib import Path

from hookdiff.disk.lock import LOCK, check_unlocked, confine
from hookdiff.disk.paths import is_empty, no_such_folder
from hookdiff.errors import UserError
from hookdiff.run_dir.checkpoints import CHECKPOINTS
from hookdiff.run_dir.config_toml import CONFIG
from hookdiff.run_dir.events_jsonl import EVENTS
from hookdiff.run_dir.metrics_jsonl import METRICS
from hookdiff.run_dir.outcome_json import OUTCOME

MARKS = {METRICS, EVENTS, OUTCOME, LOCK}  # one of these files makes a folder a run directory


def is_run_dir(folder: Path) -> bool:
    """Return whether the folder holds files that a run writes, other than its config."""
    return any(os.path.lexists(folder / name) for name in (*MARKS, CHECKPOINTS))


def has_logged(run_dir: Path) -> bool:
    """Return whether the run directory holds logged numbers or events."""
    return any((run_dir / name).exists() for name in (METRICS, EVENTS))


def check_run_dir(path: Path, resume: bool = False, overwrite: bool = False) -> None:
    """Raise UserError unless a run may start at `path`; an earlier run needs `resume` or `overwrite`."""
    if resume or not path.exists() or (path.is_dir() and is_empty(path)):
        return
    if not overwrite:
        check_unlocked(path)  # a run that is under way is not to be overwritten
        raise UserError(f"{path} exists; add --overwrite to replace it, --resume to continue it, or choose --out DIR")
    if path.is_symlink():
        raise UserError(f"{path} is a symbolic link, which --overwrite does not replace; choose --out DIR")
    if not (path / CONFIG).is_file():
        raise UserError(f"{path} is not replaced: it is no run directory, because it has no {CONFIG}; choose --out DIR")


def run_of(path: Path) -> Path:
    """Return the run directory of `path`, which is the directory itself or a checkpoint in it.

    From now on, this process writes nothing through links that lead out of the directory.

    Raises:
        UserError: for any other path.
    """
    if (path / CONFIG).is_file():
        confine(path)
        return path
    above = Path(os.path.realpath(path)).parent.parent  # Path.resolve raises for a link to itself
    if path.is_dir() and (above / CONFIG).is_file():
        confine(above)
        return above
    if path.exists():
        raise UserError(f"{path} is no run directory: it has no {CONFIG}; name a run or its checkpoint")
    raise no_such_folder(path)
