"""Sends a run from the files of its run directory to a sink, which passes it on to a tracker."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from attrs import frozen

from hookdiff.authors.sinks import Call, Sink, TrackedRun, send_picture
from hookdiff.run_dir.history import History


@frozen
class Mirrored:
    """The numbers of steps and pictures that `mirror` has sent to a sink."""

    steps: int  # number of steps with logged values
    pictures: int  # number of pictures
    last: int  # the last step


def tracked(history: History) -> TrackedRun:
    """Return the facts about a run that `mirror` passes to the `open` of a sink."""
    return TrackedRun(history.run_dir.resolve(), history.config, is_branch=False, step=0)


def mirror(history: History, sink: Sink) -> Mirrored:
    """Send a whole run to `sink`, replacing an earlier copy of the run there. The errors of the tracker are raised."""
    run = tracked(history)
    sink.clear(run)
    try:
        sink.open(run)
        calls = _in_order(history, sink)
        for _, call in calls:
            call.make()
    finally:
        sink.close()
    steps = {step for step, call in calls if call.name != "event"}  # events may be of steps that a resume has undone
    return Mirrored(len(steps), sum(map(len, history.pictures.values())), max(steps, default=0))


def earlier(run: TrackedRun, sink: Sink) -> list[Call]:
    """Return the calls that send the steps up to `run.step` from the run directory to `sink`; none for a new run.

    The files are read immediately, so that later lines are not included.
    """
    if run.run_dir is None or not run.has_earlier_steps:
        return []
    return [call for step, call in _in_order(History(run.run_dir), sink) if step <= run.step]


def _in_order(history: History, sink: Sink) -> list[tuple[int, Call]]:
    """Return the calls for a whole run, each with its step, in the order of the steps.

    The end of the run stays last, because an earlier attempt may have ended at a later step.
    """
    calls = list(_calls(history, sink))
    events = [(at.step, Call("event", partial(sink.event, at.step, at.time, at.event))) for at in history.events]
    is_over = bool(events) and history.events[-1].event.kind == "stop"
    end = [events.pop()] if is_over else []
    return [*sorted([*calls, *events], key=lambda call: call[0]), *end]  # calls of the same step keep their order


def _calls(history: History, sink: Sink) -> Iterator[tuple[int, Call]]:
    for line in history.metrics:
        if line.values:
            time = 0.0 if math.isnan(line.time) else line.time
            yield line.step, Call("scalars", partial(sink.scalars, line.step, time, line.values))
    for texts in history.texts:
        yield texts.step, Call("texts", partial(sink.texts, texts.step, texts.time, texts.values))
    for logged in history.distributions:
        yield logged.step, Call("distributions", partial(sink.distributions, logged.step, logged.time, logged.values))
    for name, pictures in history.pictures.items():
        for step, path in pictures.items():
            yield step, Call("images", partial(send_picture, sink, step, name, path))
