"""The values that the page's slider shows at each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from hookdiff_report.curves import distances
from hookdiff_report.gallery import Group, evenly
from hookdiff_report.run import Array, ReportedRun
from hookdiff_report.words import number

_MOST_STOPS = 500
_MOST_RUNS = 6


def scrubber(runs: Sequence[ReportedRun], groups: Sequence[Group]) -> dict[str, Any]:
    """Return the steps at which the slider stops, and for each label the values there, as text.

    The slider stops at each step that has pictures or a distance such as FID, and at logged steps between them. Each
    value is the newest at that step, or "" before the first value. With fewer than two steps the result is empty.
    """
    wanted: set[int] = {step for group in groups for strip in group.strips for step in strip.steps}
    rows: dict[str, tuple[Array, Array]] = {}
    for run in runs[:_MOST_RUNS]:
        label = f", {run.label}" if len(runs) > 1 else ""
        rows[f"loss{label}"] = run.loss
        if not label:
            rows["learning rate"] = run.points("lr")
        for name, title in distances([run])[: 1 if label else 3]:
            rows[f"{title}{label}"] = run.points(name)
            wanted.update(map(int, rows[f"{title}{label}"][0]))
    logged_at = [points[0] for points in rows.values() if len(points[0])]
    wanted.update(int(step) for steps in logged_at for step in (steps[0], steps[-1]))
    logged = sorted({int(step) for steps in logged_at for step in steps})
    stops = sorted({*evenly(sorted(wanted), _MOST_STOPS), *evenly(logged, _MOST_STOPS)})
    if len(stops) < 2:
        return {}
    values_at = {label: _at(stops, *points) for label, points in rows.items() if len(points[0])}
    return {"stops": stops, "values": values_at}


def _at(stops: Sequence[int], steps: Array, values: Array) -> list[str]:
    places = numpy.searchsorted(steps, numpy.array(stops, float), side="right") - 1
    return [number(values[place]) if place >= 0 else "" for place in places]
