"""Reads the row of a run in the table. It parses little of the files, so that many runs are read quickly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from itertools import islice
from typing import Any

from attrs import define

from hookdiff import UserError, shown
from hookdiff.run_dir import (
    BEGINS,
    CONFIG,
    DISTANCES,
    SMOOTHED,
    History,
    LoggedEvent,
    is_distance,
    skim_events,
    skim_metrics,
    total_steps,
)
from hookdiff_runs.configs import Configs

STATES = ("running", "done", "stopped", "crashed", "damaged")
_SMOOTH, _RAW = "loss/smooth", "loss"


@define(eq=False)
class Row:
    """A run in the table; an unknown number is None or not finite."""

    name: str  # the path of the run directory, relative to the folder
    state: str  # one of STATES
    config: Mapping[str, Any]
    problem: str = ""  # why the run directory cannot be read
    step: int = 0
    steps: int | None = None  # steps of the whole run
    begin: LoggedEvent | None = None  # its newest start or resume
    has_loss: bool = False
    loss: float = math.nan  # smoothed loss
    best: Mapping[str, tuple[float, int]] = {}  # lowest value and its step, by metric
    time: float = -math.inf  # time of the newest line, in seconds since 1970


def read_row(history: History, name: str, configs: Configs) -> Row:
    """Return the row of a run; a damaged run raises no error."""
    row = Row(name, history.state, {})
    # The config is read last, so that its problem is the one that is reported.
    for read in (_read_events, _read_metrics, partial(_read_config, configs=configs)):
        try:
            read(row, history)
        except FileNotFoundError:  # nothing is logged yet
            continue
        except UserError as error:
            row.problem = str(error)
        except OSError as error:
            row.problem = f"{error.filename}: cannot be read: {error.strerror}"
    if row.problem and row.state != "running":
        row.state = "damaged"
    row.problem = shown(row.problem)
    row.steps = total_steps(row.config, row.begin)
    row.step = max(row.step, history.outcome.step)
    return row


def _read_config(row: Row, history: History, configs: Configs) -> None:
    row.config = configs.read(history)
    row.problem = row.problem if row.config else f"{CONFIG} is empty"


def _read_metrics(row: Row, history: History) -> None:
    metrics = skim_metrics(history.run_dir)
    if newest := next(iter(metrics.backwards()), None):
        row.step, row.time = newest.step, max(row.time, newest.time)  # a line without a time (NaN) changes no time
    smooth = next((line for line in metrics.backwards(_SMOOTH) if _SMOOTH in line.values), None)
    raw = next((line for line in metrics.backwards(_RAW) if _RAW in line.values), None)
    if smooth and (raw is None or smooth.step >= raw.step):
        row.has_loss, row.loss = True, smooth.values[_SMOOTH]
    elif raw:
        losses = (line.values[_RAW] for line in metrics.backwards(_RAW) if _RAW in line.values)
        values = list(islice(losses, SMOOTHED))
        row.has_loss, row.loss = True, sum(values) / len(values)
    best: dict[str, tuple[float, int]] = {}
    for beginning in DISTANCES:
        for line in metrics.having(beginning):
            for name, value in line.values.items():
                if is_distance(name) and not math.isnan(value):
                    best[name] = min(best.get(name, (value, line.step)), (value, line.step))
    row.best = best


def _read_events(row: Row, history: History) -> None:
    events = skim_events(history.run_dir)
    row.time = next((line.time for line in events.backwards()), row.time)
    begins = (line for line in events.backwards("steps") if line.event.kind in BEGINS)
    row.begin = next(begins, None)
