"""The numbers and texts of a run in a report: the facts at its top, all logged values, and the network."""

import math
from collections.abc import Iterator, Sequence

import numpy

from hookdiff.terminal import byte_size, duration, in_words, rate
from hookdiff_report.curves import distances
from hookdiff_report.goals import Goal
from hookdiff_report.run import ReportedRun
from hookdiff_report.words import count, number, shortened

_MOST_DISTANCES = 4
_MOST_VALUES = 400  # rows of the table of logged values
_MOST_MODEL = 100_000  # characters of the structure of the network

Fact = tuple[str, tuple[str, str]]  # name, value, and a note that may be empty


def facts(run: ReportedRun, goals: Sequence[Goal] = ()) -> dict[str, tuple[str, str]]:
    """Return the facts at the top of a report: by name a value and a note, which may be empty."""
    return dict([*_losses(run), *_best_distances(run), *_goals(run, goals), *_times(run), *_memory(run)])


def _goals(run: ReportedRun, goals: Sequence[Goal]) -> Iterator[Fact]:
    titles = dict(distances([run]))
    for goal in goals:
        title = titles.get(goal.name, shortened(goal.name, 60))
        yield f"Goal of {title}", (number(goal.value), goal.outlook(run))


def _losses(run: ReportedRun) -> Iterator[Fact]:
    for title, (steps, curve) in (("Loss, smoothed", run.loss), ("Loss, held out", run.points("val/loss"))):
        if numpy.isfinite(curve).any():
            best = int(numpy.nanargmin(curve))
            lowest = f"lowest {number(curve[best])} at step {count(steps[best])}"
            yield title, (number(run.newest_loss if title == "Loss, smoothed" else curve[-1]), lowest)


def _best_distances(run: ReportedRun) -> Iterator[Fact]:
    for name, title in distances([run])[:_MOST_DISTANCES]:
        nums = {step: num for step, num in zip(*run.points(f"{name}/num"), strict=True) if num > 0}
        points = [(value, step, nums.get(step)) for step, value in zip(*run.points(name), strict=True)]
        points = [point for point in points if math.isfinite(point[0])]
        # A distance that was measured with another n than the newest cannot be compared with it.
        if same := [point for point in points if point[2] == points[-1][2]]:
            value, step, num = min(same)
            yield f"Best {title}", (number(value), f"at step {count(step)}{f', n = {count(num)}' if num else ''}")


def _times(run: ReportedRun) -> Iterator[Fact]:
    pace, note = run.pace(), ""
    if pace:
        yield "Throughput", (rate(pace.mean, pace.unit), "")
        left = (run.total or 0) - run.history.step
        if run.state == "running" and left > 0:
            note = f"about {in_words(left * pace.size / pace.mean)} left"
    if run.seconds:
        yield "Time", (duration(run.seconds), note)


def _memory(run: ReportedRun) -> Iterator[Fact]:
    peak = run.history.last("memory/peak")
    if not math.isnan(peak):
        yield "Peak memory", (byte_size(peak * 2**20), "")


def model(run: ReportedRun) -> str:
    """Return the structure of the network that was logged last; "" if none was logged."""
    texts = [logged.values["model"] for logged in run.history.texts if "model" in logged.values]
    return shortened(texts[-1], _MOST_MODEL) if texts else ""


def values(run: ReportedRun) -> Iterator[tuple[str, ...]]:
    """Yield for each logged name its number of values, and its last, lowest and highest value, in words."""
    names, counts = sorted(run.history.series), run.history.part.counts
    for name in names[:_MOST_VALUES]:
        logged = run.points(name)[1]
        finite = logged[numpy.isfinite(logged)]
        ends = (number(finite.min()), number(finite.max())) if len(finite) else ("", "")
        yield shortened(name, 100), count(counts.get(name, len(logged))), number(run.history.last(name)), *ends
    if len(names) > _MOST_VALUES:
        yield f"and {count(len(names) - _MOST_VALUES)} more", "", "", "", ""
