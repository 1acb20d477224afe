"""events.jsonl: a line for each event of a run, such as its start, a checkpoint or a warning.

{"step": 0, "time": 1764236235.125, "kind": "start", "severity": "info", "text": "started", "details": {...}}
"""

from pathlib import Path
from typing import Any, get_args

from attrs import frozen

from hookdiff.log.event import Event, Severity
from hookdiff.run_dir.lines import Skim, Tail, at_step, read_lines, step_and_time

EVENTS = "events.jsonl"
BEGINS = ("start", "resume")  # kinds of events with which a process begins to train


@frozen
class LoggedEvent:
    """A line of events.jsonl."""

    step: int
    time: float  # seconds since 1970
    event: Event


def event_line(step: int, event: Event) -> dict[str, Any]:
    """Return the line of an event."""
    details = {"details": dict(event.details)} if event.details else {}
    return {**at_step(step), "kind": event.kind, "severity": event.severity, "text": event.text, **details}


def parse_event(line: dict[str, Any]) -> LoggedEvent:
    """Return the event in a line."""
    kind, text, severity, details = line["kind"], line["text"], line["severity"], line.get("details", {})
    if not (isinstance(kind, str) and isinstance(text, str) and isinstance(details, dict)):
        raise TypeError("an event has a kind, a text and details")
    if severity not in get_args(Severity):
        raise ValueError(severity)
    return LoggedEvent(*step_and_time(line), Event(kind, text, severity, details))


def read_events(path: Path) -> list[LoggedEvent]:
    """Return the lines of the file at `path`, as `read_lines` does."""
    return read_lines(path, parse_event)


def follow_events(run_dir: Path) -> Tail[LoggedEvent]:
    """Return a reader of the lines that a run appends to its file."""
    return Tail(run_dir / EVENTS, parse_event)


def skim_events(run_dir: Path) -> Skim[LoggedEvent]:
    """Return a `Skim`, which reads only a few lines of the file.

    Raises:
        OSError: if the file cannot be read.
    """
    return Skim(run_dir / EVENTS, parse_event)
