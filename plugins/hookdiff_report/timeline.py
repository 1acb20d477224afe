"""The events of a run, for people: those that come by the thousand as one row, and the monitors' diagnoses."""

from __future__ import annotations

import re
from collections.abc import Sequence

from attrs import define

from hookdiff.history import LoggedEvent
from hookdiff_report.facts import count, moment

_MOST_ROWS = 200
_MOST_TEXT = 2000  # letters of a text that are shown
_RANKS = {"error": 0, "warning": 1, "info": 2, "ok": 3}
# Rows of these are joined between two other events: runs have thousands of them.
_ROUTINE = {
    "checkpoint": "checkpoints saved",
    "void": "void steps: the loss scale was too high, and no weight changed",
    "skipped": "batches skipped",
    "held": "updates held back",
}


@define(frozen=True)
class Row:
    """A row of the timeline."""

    steps: str
    when: str
    kind: str
    severity: str
    text: str


@define(frozen=True)
class Diagnosis:
    """A finding of a monitor, which may have been reported several times."""

    severity: str
    what: str
    why: Sequence[str]
    remedy: str
    steps: str
    num: int


def timeline(events: Sequence[LoggedEvent]) -> tuple[list[Row], int]:
    """Return the rows, oldest first, and the number of rows that were left out in the middle."""
    groups: list[list[LoggedEvent]] = []
    routine: dict[str, list[LoggedEvent]] = {}  # since the last event that is none
    for logged in events:
        kind = logged.event.kind
        if kind in routine:
            routine[kind].append(logged)
            continue
        groups.append([logged])
        if kind in _ROUTINE:
            routine[kind] = groups[-1]
        else:
            routine = {}
    left_out = max(0, len(groups) - _MOST_ROWS)
    if left_out:
        half = _MOST_ROWS // 2
        groups = groups[:half] + groups[-half:]
    return [_row(group) for group in groups], left_out


def _row(group: Sequence[LoggedEvent]) -> Row:
    first, last = group[0], group[-1]
    event = last.event
    steps, when, text = count(first.step), moment(first.time), event.text
    if len(group) > 1:
        steps = f"{steps} to {count(last.step)}"
        text = f"{count(len(group))} {_ROUTINE[event.kind]}"
    return Row(steps, when, shortened(event.kind, 60), event.severity, shortened(text))


def diagnoses(events: Sequence[LoggedEvent]) -> tuple[list[Diagnosis], int]:
    """Return what the monitors found, the worst first, and the number of those that were left out.

    Findings that differ only by their numbers are one diagnosis, in the words of the newest.
    """
    groups: dict[tuple[str, str], list[LoggedEvent]] = {}
    for logged in events:
        if logged.event.kind in ("finding", "nan"):
            what = re.sub(r"[-+]?\d[\d.,e+-]*", "0", logged.event.text.partition("\n")[0])
            groups.setdefault((logged.event.severity, what), []).append(logged)
    found = sorted(groups.values(), key=lambda group: (_RANKS[group[-1].event.severity], -group[-1].step))
    return [_diagnosis(group) for group in found[:50]], max(0, len(found) - 50)


def _diagnosis(group: Sequence[LoggedEvent]) -> Diagnosis:
    event = group[-1].event
    what, *lines = [line.strip() for line in shortened(event.text).split("\n")]
    remedies = [line.removeprefix("try ") for line in lines[-1:] if line.startswith("try ")]
    first, last = group[0].step, group[-1].step
    steps = f"step {count(first)}" if first == last else f"steps {count(first)} to {count(last)}"
    why = lines[: len(lines) - len(remedies)]
    return Diagnosis(event.severity, what, why, "".join(remedies), steps, len(group))


def shortened(text: str, most: int = _MOST_TEXT) -> str:
    """Return the text, cut to `most` letters."""
    return text if len(text) <= most else f"{text[:most]}..."
