"""The plugin that keeps the events of a run in `events.jsonl`, and reports the events of the loop itself."""

import os
import platform
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import define, field

from hookdiff.errors import StorageError
from hookdiff.log.event import Event, Finding, Severity
from hookdiff.loop.counts import Step, Verdict
from hookdiff.loop.end import Reason
from hookdiff.loop.hookspecs import hookimpl
from hookdiff.loop.loop import Loop
from hookdiff.loop.nonfinite import NonFinite
from hookdiff.options.software import versions
from hookdiff.run_dir.events_jsonl import EVENTS, event_line
from hookdiff.run_dir.lines import Lines

_WHY = {
    "void": "the loss scale was too high",
    "skipped": "the batch was skipped",
    "held": "a plugin held the update back (optimizer_step)",
}
_SEVERITY: Mapping[Reason, Severity] = {"on_nan": "error", "error": "error", "time": "warning", "signal": "warning"}


@define(eq=False)
class Events:
    """Appends each event to `events.jsonl` in the run directory; a resumed run keeps all earlier events.

    It reports the start, resume and end of the run, files left out of the data, steps without an update, checkpoints,
    steps that are not finite and rollbacks. Other plugins report events by `loop.log.event` and `loop.log.report`.
    """

    _lines: Lines = field(init=False, factory=lambda: Lines(EVENTS, is_cut=False))
    _step: int = field(init=False, default=0)  # updates at the end of the newest step
    _has_begun: bool = field(init=False, default=False)  # its start is reported, and its end is not

    @hookimpl(trylast=True)
    def on_ready(self, loop: Loop, resumed: bool) -> None:
        if resumed:
            self._lines.resume(loop)
        self._step = loop.progress.step
        text = f"resumed at step {loop.progress.step:,}" if resumed else "started"
        steps = loop.config.expected_steps(loop.progress, loop.feed)
        details = {**environment(loop), "steps": steps}
        loop.log.event(Event("resume" if resumed else "start", text, details=details))
        self._has_begun = True
        for left_out in loop.feed.reader.left_out:  # the warning is already in the log
            loop.log.event(Event.of(Finding("warning", f"data: {left_out}")))

    @hookimpl
    def on_event(self, loop: Loop, step: int, event: Event) -> None:
        self._lines.add(loop, event_line(step, event))

    @hookimpl
    def between_steps(self, loop: Loop, step: Step | None) -> None:
        now, before, self._step = loop.progress.step, self._step, loop.progress.step
        if now < before:
            loop.log.event(Event("rollback", f"from step {before:,} back to step {now:,}", "warning", {"from": before}))
        if step and step.outcome in _WHY:
            batch = loop.progress.position - 1
            text = f"batch {batch} changed no weight: {_WHY[step.outcome]}"
            severity: Severity = "info" if step.outcome == "held" else "warning"  # a plugin holds an update on purpose
            loop.log.event(Event(step.outcome, text, severity, {"position": batch}))

    @hookimpl
    def on_checkpoint(self, loop: Loop, path: Path, step: int) -> None:
        loop.log.event(Event("checkpoint", f"saved {path.name}", details={"name": path.name}), step)

    @hookimpl(wrapper=True, tryfirst=True)  # after all other plugins, which add notes to the report
    def on_nan(self, loop: Loop, report: NonFinite) -> Generator[None, list[Verdict], list[Verdict]]:
        verdicts = yield
        loop.log.event(Event("nan", str(report), "error", {"position": report.position}))
        return verdicts

    @hookimpl(wrapper=True, tryfirst=True)
    def on_stop(self, loop: Loop, reason: Reason) -> Generator[None, Any, Any]:
        """Report the end after all other plugins, such as one that saves the last checkpoint."""
        try:
            return (yield)
        except Exception as error:
            loop.end.close(error)
            raise
        finally:
            if self._has_begun:  # a script may open the Loop again only to sample
                self._has_begun = False
                self._stopped(loop, loop.end.reason or reason)  # a plugin may have changed it

    def _stopped(self, loop: Loop, reason: Reason) -> None:
        text = ": ".join(filter(None, (reason, loop.end.message)))
        try:
            loop.log.event(Event("stop", text, _SEVERITY.get(reason, "info"), {"reason": reason}))
        except StorageError:  # the directory is gone
            if reason != "error":
                raise


def environment(loop: Loop) -> dict[str, Any]:
    """Return the versions of the software, and facts about the machine."""
    device = torch.cuda.get_device_name(loop.device) if loop.device.type == "cuda" else platform.processor()
    return {
        "versions": versions(loop.plugins),
        "system": platform.platform(),
        "device": f"{loop.device} ({device})" if device else str(loop.device),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "ranks": loop.num_ranks,
    }
