"""What the table says about a run. Little of its files is parsed, so that many runs are read quickly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import define

from hookdiff import UserError
from hookdiff.disk import CONFIG
from hookdiff.errors import shown
from hookdiff.history import (
    BEGINS,
    EVENTS,
    METRICS,
    History,
    LoggedEvent,
    Skim,
    parse_event,
    parse_metrics,
    total_steps,
)

STATES = ("running", "done", "stopped", "crashed", "damaged")
_LOSSES = ("loss/smooth", "loss")  # the newest one counts, of two of a step the first
_DISTANCES = ("fd/", "fid/")  # with which the names of FID values begin
_ABOUT = ("/num", "/floor")  # with which the names of values about them end
_LARGEST = 1e18  # number of steps


@define(eq=False)
class Row:
    """A run in the table; what is not known is None or not finite."""

    name: str  # the path of the run directory, relative to the folder
    state: str  # one of STATES
    config: Mapping[str, Any]
    problem: str = ""  # why the run directory cannot be read
    step: int = 0
    steps: int | None = None  # of the whole run
    begin: LoggedEvent | None = None  # its newest start or resume
    loss_name: str = ""
    loss: float = math.nan
    best: Mapping[str, tuple[float, int]] = {}  # lowest value and its step, by metric
    time: float = -math.inf  # of the newest line, in seconds since 1970


def read_row(history: History, folder: Path) -> Row:
    """Return the row of a run below `folder`; it raises no error for a damaged one."""
    name = str(history.run_dir.relative_to(folder))
    row = Row(history.name if name == "." else name, history.state, {})
    for read in (_read_events, _read_metrics, _read_config):  # the config last: its problem is the one to report
        try:
            read(row, history)
        except UserError as error:
            row.problem = str(error)
        except OSError as error:
            row.problem = f"{error.filename}: cannot be read: {error.strerror}"
    if row.problem and row.state != "running":
        row.state = "damaged"
    row.problem = shown(row.problem)
    row.steps = total_steps(row.config, row.begin)
    row.step = max(row.step, _count(history.outcome.get("step")) or 0)
    return row


def _read_config(row: Row, history: History) -> None:
    row.config = history.config
    row.problem = row.problem if row.config else f"{CONFIG} is empty"


def _read_metrics(row: Row, history: History) -> None:
    if not (path := history.run_dir / METRICS).exists():
        return
    metrics = Skim(path, parse_metrics)
    for line in metrics.backwards():
        row.step = _count(line["step"]) or 0
        row.time = max(row.time, line.get("time", row.time))
        break
    newest = -1.0
    for name in _LOSSES:
        found = next((line for line in metrics.backwards(f'"{name}"') if name in line), {})
        if found and found["step"] > newest:
            row.loss_name, row.loss, newest = name, found[name], found["step"]
    best: dict[str, tuple[float, int]] = {}
    for beginning in _DISTANCES:
        for line in metrics.having(f'"{beginning}'):
            for name, value in line.items():
                if name.startswith(beginning) and not name.endswith(_ABOUT) and not math.isnan(value):
                    found_here = value, _count(line["step"]) or 0
                    best[name] = min(best.get(name, found_here), found_here)
    row.best = best


def _read_events(row: Row, history: History) -> None:
    if not (path := history.run_dir / EVENTS).exists():
        return
    events = Skim(path, parse_event)
    row.time = next((line.time for line in events.backwards()), row.time)
    begins = (line for line in events.backwards('"steps":') if line.event.kind in BEGINS)
    row.begin = next(begins, None)


def _count(value: object) -> int | None:
    is_count = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _LARGEST
    return int(value) if is_count else None  # type: ignore[call-overload]
