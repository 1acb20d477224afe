"""The history of a run, read from the files of its run directory."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from attrs import define

from hookdiff.disk.lock import is_locked
from hookdiff.log.distribution import Distribution
from hookdiff.run_dir.config_toml import CONFIG, read_config
from hookdiff.run_dir.distributions_jsonl import DISTRIBUTIONS, parse_distributions
from hookdiff.run_dir.events_jsonl import EVENTS, LoggedEvent, read_events
from hookdiff.run_dir.layout import MARKS, run_of
from hookdiff.run_dir.lines import MOST_STEPS, Logged, read_lines, read_thinned
from hookdiff.run_dir.metrics_jsonl import METRICS, parse_metrics
from hookdiff.run_dir.outcome_json import RunOutcome, read_outcome
from hookdiff.run_dir.pictures_png import find_pictures
from hookdiff.run_dir.texts_jsonl import TEXTS, parse_texts
from hookdiff.run_dir.thinned import ReadPart

Status = Literal["running", "done", "stopped", "crashed"]
Series = tuple[list[int], list[float]]  # steps in order, and the value of each


@define(eq=False, slots=False)
class History:
    """Reads a run directory, also while the run is under way, and writes nothing.

    Each property reads its file at its first use. A missing file counts as empty.
    """

    run_dir: Path
    most_lines: int | None = None  # of more lines in metrics.jsonl, only some are read; None: all are read

    @classmethod
    def of(cls, path: str | Path, most_lines: int | None = None) -> History:
        """Return the history of a run directory, or of the run that a checkpoint is in.

        Args:
            path: of the run directory or the checkpoint.
            most_lines: if metrics.jsonl has more lines, only some of them are read, so that curves look the same;
                `part` describes the lines that were read. A million lines then take seconds instead of a minute.

        Raises:
            UserError: if there is no run.
        """
        return cls(run_of(Path(path)), most_lines)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The whole config, as in config.toml.

        Raises:
            UserError: if the file cannot be read.
        """
        return read_config(self.run_dir)

    @property
    def name(self) -> str:
        """The name of the run directory."""
        return self.run_dir.resolve().name

    @property
    def state(self) -> Status:
        """Whether the run is under way, done, was stopped before its end, or crashed or was killed."""
        if is_locked(self.run_dir):
            return "running"
        reason = self.outcome.reason
        return "done" if reason == "done" else "crashed" if reason in ("error", None) else "stopped"

    @property
    def outcome(self) -> RunOutcome:
        """Why and at which step the run has ended; the reason is None while it is unknown."""
        return read_outcome(self.run_dir)

    @cached_property
    def metrics(self) -> list[Logged[float]]:
        """The lines of metrics.jsonl; NaN stands for values that are not finite."""
        return self._read[0]

    @property
    def part(self) -> ReadPart:
        """The part of metrics.jsonl that was read."""
        return self._read[1]

    @cached_property
    def _read(self) -> tuple[list[Logged[float]], ReadPart]:
        return read_thinned(self.run_dir / METRICS, parse_metrics, self.most_lines)

    @cached_property
    def series(self) -> dict[str, Series]:
        """The logged values by name, in the order of their steps; if a step has several values, the last."""
        curves: dict[str, dict[int, float]] = {}
        for line in self.metrics:
            for name, value in line.values.items():
                curves.setdefault(name, {})[line.step] = value
        return {name: _in_order(values) for name, values in curves.items()}

    @cached_property
    def times(self) -> Series:
        """The time of the last line of each step, in seconds since 1970."""
        return _in_order({line.step: line.time for line in self.metrics if not math.isnan(line.time)})

    def last(self, name: str) -> float:
        """Return the newest value of a logged name, or NaN."""
        return self.series[name][1][-1] if name in self.series else math.nan

    @property
    def step(self) -> int:
        """The last step in metrics.jsonl or outcome.json."""
        logged = self.metrics[-1].step if self.metrics else 0
        return max(logged, self.outcome.step)

    @cached_property
    def events(self) -> list[LoggedEvent]:
        """The lines of events.jsonl, oldest first; after a resume the steps go back."""
        return read_events(self.run_dir / EVENTS)

    @cached_property
    def texts(self) -> list[Logged[str]]:
        """The lines of texts.jsonl."""
        return read_lines(self.run_dir / TEXTS, parse_texts)

    @cached_property
    def distributions(self) -> list[Logged[Distribution]]:
        """The lines of distributions.jsonl."""
        return read_lines(self.run_dir / DISTRIBUTIONS, parse_distributions)

    @cached_property
    def pictures(self) -> dict[str, dict[int, Path]]:
        """The PNG files of logged pictures, by name and step."""
        return find_pictures(self.run_dir)


def _in_order(values: Mapping[int, float]) -> Series:
    ordered = dict(sorted(values.items()))
    return list(ordered), list(ordered.values())


def total_steps(config: Mapping[str, Any], begin: LoggedEvent | None) -> int | None:
    """Return the number of steps of a whole run, or None if it is not known.

    This is `run.steps` of the config. If the config gives epochs instead, the run has written the expected number of
    steps into the event `begin`, its newest start or resume.
    """
    return asked_number(config, "steps") or (_number(begin.event.details.get("steps")) if begin else None)


def asked_number(config: Mapping[str, Any], key: str) -> int | None:
    """Return a positive number of the table [run] by its `key`, such as "batch_size"; None if it is not set."""
    run = config.get("run")
    return _number(run.get(key)) if isinstance(run, dict) else None


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < MOST_STEPS else None


def find_runs(folder: Path, depth: int = 3) -> list[History]:
    """Return the runs in `folder` and up to `depth` levels below it, sorted by path; links are not followed.

    Runs that have lost their config are included, and so are folders that cannot be read.
    """
    try:
        names = sorted(entry.name for entry in os.scandir(folder))
        if not MARKS.isdisjoint(names):
            return [History(folder)]
        inside = [folder / name for name in names if name[0] != "."] if depth else []
        folders = [path for path in inside if path.is_dir() and not path.is_symlink()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError:
        return [History(folder)]
    runs = [run for path in folders for run in find_runs(path, depth - 1)]
    # A folder with a config alone may hold a project, with runs below it, or an incomplete copy of a run.
    return runs or ([History(folder)] if CONFIG in names else [])
