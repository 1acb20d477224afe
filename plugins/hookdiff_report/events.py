"""The events of a run as readers see them: a timeline, marks on a plot, and the diagnoses of monitors."""

import re
from collections.abc import Sequence

from attrs import frozen

from hookdiff.run_dir import LoggedEvent
from hookdiff_report.run import ReportedRun
from hookdiff_report.words import count, moment, shortened

_MOST_ROWS = 200
_MOST_DIAGNOSES = 50
_MOST_TEXT = 2000  # characters
_RANKS = {"error": 0, "warning": 1, "info": 2, "ok": 3}
# Runs have thousands of these events, so all events of a kind between two other events are one row.
_ROUTINE = {
    "checkpoint": "checkpoints saved",
    "void": "void steps: the loss scale was too high, and no weight changed",
    "skipped": "batches skipped",
    "held": "updates held back",
}


@frozen
class Row:
    """A row of the timeline."""

    steps: str
    when: str
    kind: str
    severity: str
    text: str


@frozen
class Mark:
    """Something that happened, at the foot of a plot."""

    kind: str
    step: float
    text: str


@frozen
class Diagnosis:
    """A problem of the run, which may have been reported several times."""

    severity: str
    what: str
    why: Sequence[str]
    remedy: str
    steps: str
    num: int


def timeline(run: ReportedRun) -> list[Row]:
    """Return the rows, oldest first. If there are too many, a row in the middle says so."""
    groups: dict[tuple[int, str], list[LoggedEvent]] = {}
    begin = 0  # index of the last event of another kind
    for place, logged in enumerate(run.history.events):
        if logged.event.kind not in _ROUTINE:
            begin = place
        groups.setdefault((begin, logged.event.kind), []).append(logged)
    rows = [_row(group) for group in groups.values()]
    half = _MOST_ROWS // 2
    if len(rows) <= 2 * half:
        return rows
    gap = Row("...", "", "", "", f"{count(len(rows) - 2 * half)} rows are left out")
    return [*rows[:half], gap, *rows[-half:]]


def _row(group: Sequence[LoggedEvent]) -> Row:
    first, event = group[0], group[-1].event
    steps, text = count(first.step), event.text
    if len(group) > 1:
        steps, text = _steps(group), f"{count(len(group))} {_ROUTINE[event.kind]}"
    return Row(steps, moment(first.time), shortened(event.kind, 60), event.severity, shortened(text, _MOST_TEXT))


def marks(run: ReportedRun) -> list[Mark]:
    """Return marks for the events, about 200 of each kind at most; close events share a mark."""
    events = [logged for logged in run.history.events if logged.event.kind not in ("start", "stop")]
    steps = [logged.step for logged in events]
    width = max(1, (max([*steps, run.history.step]) - min([*steps, run.history.step])) / 200)
    groups: dict[tuple[str, int], list[LoggedEvent]] = {}
    for logged in events:
        groups.setdefault((logged.event.kind, int(logged.step // width)), []).append(logged)
    joined = []
    for (kind, _), group in groups.items():
        text = shortened(group[-1].event.text.partition("\n")[0], 120)
        if len(group) > 1:
            text = f"{count(len(group))} times, steps {_steps(group)}; {text}"
        joined.append(Mark(kind, group[0].step, text))
    return joined


def diagnoses(run: ReportedRun) -> tuple[list[Diagnosis], int]:
    """Return the problems of the run, the worst first, and the number of problems that were left out.

    They are findings of monitors, and errors that have ended the run. Problems that differ only by their numbers are
    one diagnosis, in the words of the newest.
    """
    groups: dict[tuple[str, str], list[LoggedEvent]] = {}
    for logged in run.history.events:
        is_crash = (logged.event.kind, logged.event.severity) == ("stop", "error")
        if is_crash or logged.event.kind in ("finding", "nan"):
            what = re.sub(r"[-+]?\d[\d.,e+-]*", "0", logged.event.text.partition("\n")[0])
            groups.setdefault((logged.event.severity, what), []).append(logged)
    worst_first = sorted(groups.values(), key=lambda group: (_RANKS[group[-1].event.severity], -group[-1].step))
    return [_diagnosis(group) for group in worst_first[:_MOST_DIAGNOSES]], max(0, len(worst_first) - _MOST_DIAGNOSES)


def _diagnosis(group: Sequence[LoggedEvent]) -> Diagnosis:
    event = group[-1].event
    what, *why = [line.strip() for line in shortened(event.text, _MOST_TEXT).split("\n")]
    remedy = why.pop().removeprefix("try ") if why and why[-1].startswith("try ") else ""
    return Diagnosis(event.severity, what, why, remedy, _steps(group), len(group))


def _steps(group: Sequence[LoggedEvent]) -> str:
    low, high = (end(logged.step for logged in group) for end in (min, max))  # after a resume the steps go back
    return count(low) if low == high else f"{count(low)} to {count(high)}"
