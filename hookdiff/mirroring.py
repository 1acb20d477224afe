"""Makes the calls of a sink again, from the files of a run directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy
from attrs import frozen

from hookdiff.history import History
from hookdiff.pictures import Picture, read_info
from hookdiff.sinks import Sink, TrackedRun


@frozen
class Mirrored:
    """What was sent to a sink."""

    steps: int  # that logged something
    pictures: int
    last: int  # step


def mirror(history: History, sink: Sink) -> Mirrored:
    """Send a whole run to `sink`, in place of an earlier mirror of it. The errors of the tracker are raised."""
    run = TrackedRun(history.run_dir.resolve(), history.config, is_branch=False, step=0)
    sink.clear(run)
    try:
        sink.open(run)
        return replay(history, sink)
    finally:
        sink.close()


def replay(history: History, sink: Sink, until: int | None = None) -> Mirrored:
    """Send what the run directory has, in the order of its steps, to an open `sink`; `until` is the last step."""
    calls = sorted(_calls(history, sink), key=lambda call: call[0])  # equal steps keep their order
    calls = [call for call in calls if until is None or call[0] <= until]
    for _, call in calls:
        call()
    pictures = [step for steps in history.pictures.values() for step in steps if until is None or step <= until]
    steps = [step for step, _ in calls]
    return Mirrored(len(set(steps)), len(pictures), max(steps, default=0))


def fill(run: TrackedRun, sink: Sink, until: int | None = None) -> None:
    """Send what a resumed run has logged before to `sink`, whose tracker begins anew; `until` is the last step."""
    until = run.step if until is None else until
    if run.run_dir and until:
        replay(History(run.run_dir), sink, until)


def _calls(history: History, sink: Sink) -> Iterator[tuple[int, Callable[[], None]]]:
    for line in history.metrics:
        values = {name: value for name, value in line.items() if name not in ("step", "time")}
        if values:
            yield int(line["step"]), partial(sink.scalars, int(line["step"]), line.get("time", 0.0), values)
    for texts in history.texts:
        yield texts.step, partial(sink.texts, texts.step, texts.time, texts.values)
    for found in history.distributions:
        yield found.step, partial(sink.distributions, found.step, found.time, found.values)
    for logged in history.events:
        yield logged.step, partial(sink.event, logged.step, logged.time, logged.event)
    for name, pictures in history.pictures.items():
        for step, path in pictures.items():
            yield step, partial(_send_picture, sink, step, name, path)


def _send_picture(sink: Sink, step: int, name: str, path: Path) -> None:
    from PIL import Image

    try:
        with Image.open(path) as image:
            picture = Picture(numpy.array(image), read_info(image))
    except (OSError, ValueError, SyntaxError):  # damaged since it was found
        return
    sink.images(step, path.stat().st_mtime, {name: picture})
