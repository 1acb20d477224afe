"""A run, as the files of its run directory show it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import tomli
from attrs import define

from hookdiff.disk.lock import LOCK, is_locked
from hookdiff.disk.paths import CONFIG, OUTCOME, run_of
from hookdiff.disk.reading import read_file
from hookdiff.distribution import Distribution
from hookdiff.errors import UserError
from hookdiff.history.lines import (
    DISTRIBUTIONS,
    EVENTS,
    METRICS,
    TEXTS,
    Logged,
    LoggedEvent,
    read_distributions,
    read_events,
    read_metrics,
    read_texts,
)
from hookdiff.history.pictures import find_pictures

State = Literal["running", "done", "stopped", "crashed"]
_MARKS = {METRICS, EVENTS, OUTCOME, LOCK}  # one of these files makes a folder a run directory
_LARGEST = 10**15  # number of steps
BEGINS = ("start", "resume")  # kinds of events with which a process begins to train
Series = tuple[list[int], list[float]]  # steps in order, and the value of each


@define(eq=False, slots=False)
class History:
    """A run directory, to read: nothing is written, and the run may be under way.

    Each property reads its file when it is first asked for. Files that are missing are empty.
    """

    run_dir: Path

    @classmethod
    def of(cls, path: str | Path) -> History:
        """Return the history of a run directory, or of the run that a checkpoint is in; raises UserError."""
        return cls(run_of(Path(path)))

    @cached_property
    def config(self) -> dict[str, Any]:
        """The whole config, as in config.toml. Raises UserError if it cannot be read."""
        path = self.run_dir / CONFIG
        try:
            return tomli.loads(read_file(path).decode("utf-8-sig"))
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: cannot be read: {error}") from None

    @property
    def name(self) -> str:
        """The name of the run directory."""
        return self.run_dir.resolve().name

    @property
    def state(self) -> State:
        """Whether the run is under way, done, was stopped before its end, or crashed or was killed."""
        if is_locked(self.run_dir):
            return "running"
        reason = self.outcome.get("reason", "error")
        return "done" if reason == "done" else "crashed" if reason == "error" else "stopped"

    @property
    def outcome(self) -> Mapping[str, Any]:
        """The content of outcome.json: reason, message, step and epoch; empty while there is no outcome."""
        try:
            found = json.loads(read_file(self.run_dir / OUTCOME))
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    @cached_property
    def metrics(self) -> list[dict[str, float]]:
        """The lines of metrics.jsonl, with step and time; NaN stands for all that is not finite."""
        path = self.run_dir / METRICS
        return read_metrics(path) if path.exists() else []

    @cached_property
    def series(self) -> dict[str, Series]:
        """The logged values by name, in the order of their steps; of several values of a step the last one counts."""
        found: dict[str, dict[int, float]] = {}
        for line in self.metrics:
            step = int(line["step"])
            for name, value in line.items():
                if name != "step":
                    found.setdefault(name, {})[step] = value
        ordered = {name: dict(sorted(values.items())) for name, values in found.items()}
        return {name: (list(values), list(values.values())) for name, values in ordered.items()}

    def last(self, name: str) -> float:
        """Return the newest value of a logged name, or NaN."""
        return self.series[name][1][-1] if name in self.series else math.nan

    @property
    def step(self) -> int:
        """The last step that is known."""
        logged = int(self.metrics[-1]["step"]) if self.metrics else 0
        ended = self.outcome.get("step")
        return max(logged, ended if isinstance(ended, int) else 0)

    @cached_property
    def events(self) -> list[LoggedEvent]:
        """The lines of events.jsonl, oldest first; after a resume the steps go back."""
        path = self.run_dir / EVENTS
        return read_events(path) if path.exists() else []

    @cached_property
    def texts(self) -> list[Logged[str]]:
        """The lines of texts.jsonl."""
        path = self.run_dir / TEXTS
        return read_texts(path) if path.exists() else []

    @cached_property
    def distributions(self) -> list[Logged[Distribution]]:
        """The lines of distributions.jsonl."""
        path = self.run_dir / DISTRIBUTIONS
        return read_distributions(path) if path.exists() else []

    @cached_property
    def pictures(self) -> dict[str, dict[int, Path]]:
        """The PNG files of logged pictures, by name and step."""
        return find_pictures(self.run_dir)


def total_steps(config: Mapping[str, Any], begin: LoggedEvent | None) -> int | None:
    """Return the number of steps of a whole run, or None if it is not known.

    It is `run.steps` of the config. A run with its length in epochs has written what it expects in the event `begin`,
    its newest start or resume.
    """
    run = config.get("run")
    asked = run.get("steps") if isinstance(run, dict) else None
    for value in (asked, begin.event.details.get("steps") if begin else None):
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < _LARGEST:
            return value
    return None


def is_run_dir(folder: Path) -> bool:
    """Return whether the folder holds files that a run writes beside its config."""
    return any(os.path.lexists(folder / name) for name in (*_MARKS, "checkpoints"))


def find_runs(folder: Path, depth: int = 3) -> list[History]:
    """Return the runs in `folder` and at most `depth` folders below it, by path; links are not followed.

    A run that has lost its config is among them, and so is a folder that cannot be read.
    """
    try:
        names = sorted(entry.name for entry in os.scandir(folder))
        if not _MARKS.isdisjoint(names):
            return [History(folder)]
        inside = [folder / name for name in names if name[0] != "."] if depth else []
        folders = [path for path in inside if path.is_dir() and not path.is_symlink()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError:
        return [History(folder)]
    found = [run for path in folders for run in find_runs(path, depth - 1)]
    # A folder with a config alone may hold a project, with runs below it, or a run that was copied in part.
    return found or ([History(folder)] if CONFIG in names else [])
