"""metrics.jsonl: the logged numbers, one line for each step with logged numbers.

    {"step": 50, "time": 1764236235.125, "loss": 0.25, "lr": 0.001}

NaN and infinities, which JSON lacks, are null.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hookdiff.log.event import STEP, TIME
from hookdiff.run_dir.lines import Logged, Skim, Tail, at_step, number, read_lines, step_number

METRICS = "metrics.jsonl"
SMOOTHED = 10  # number of losses in the mean that is shown as "smoothed" if no plugin logs one
DISTANCES = ("fd/", "fid/")  # beginnings of the names of FID values


def is_distance(name: str) -> bool:
    """Return whether `name` is the name of a logged FID value, not of the number of images or the floor of an FID."""
    return name.startswith(DISTANCES) and not name.endswith(("/", "/num", "/floor"))


def metrics_line(step: int, values: Mapping[str, float]) -> dict[str, Any]:
    """Return the line with the `values` of `step`; values that are not finite are written as null."""
    return {**at_step(step), **values}


def parse_metrics(line: dict[str, Any]) -> Logged[float]:
    """Return the step, time and values of a line; NaN stands for values that are not finite, and for a missing time."""
    values = {name: math.nan if value is None else number(value) for name, value in line.items()}
    return Logged(step_number(values.pop(STEP)), values.pop(TIME, math.nan), values)


def read_metrics(path: Path) -> list[Logged[float]]:
    """Return the lines of the file at `path`, as `read_lines` does."""
    return read_lines(path, parse_metrics)


def follow_metrics(run_dir: Path, most: int | None = None) -> Tail[Logged[float]]:
    """Return a reader of the lines that a run appends to its file; of more than `most` new lines, some are read."""
    return Tail(run_dir / METRICS, parse_metrics, most)


def skim_metrics(run_dir: Path) -> Skim[Logged[float]]:
    """Return a `Skim`, which reads only a few lines of the file.

    Raises:
        OSError: if the file cannot be read.
    """
    return Skim(run_dir / METRICS, parse_metrics)
