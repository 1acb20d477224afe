"""The plugin `report`."""

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

from attrs import define, field
from attrs.validators import gt

from hookdiff import Every, Loop, Periodic, hookimpl, parse_every, plugin
from hookdiff.machine import safe_path
from hookdiff.options import about

logger = logging.getLogger("hookdiff")


@plugin(needs={"bokeh": "hookdiff[report]"})
@define(eq=False)
class Report(Periodic):
    """Writes `report.html` in the run directory at regular intervals and at every end of the run.

    A separate process with low priority writes it, as `hookdiff report RUN` does. If a report fails or is late, the run
    logs one warning and goes on. If a report takes longer than an interval, the next report is left out.
    """

    every: Every = field(
        default=Every(600, "seconds"),
        converter=parse_every,
        kw_only=True,
        metadata=about("how often; 0: only when the run ends"),
    )
    timeout: float = field(
        default=120.0, validator=gt(0), metadata=about("longest wait for the last report", "seconds")
    )
    goals: tuple[str, ...] = field(
        default=(), metadata=about('values to reach, which the plots show, such as ["fd/digits=0.4"]')
    )
    _process: subprocess.Popen[bytes] | None = field(init=False, default=None)
    _messages: IO[bytes] = field(init=False)  # output of the process
    _has_warned: bool = field(init=False, default=False)

    @goals.validator
    def _are_goals(self, attribute: object, value: Sequence[str]) -> None:
        from hookdiff_report.goals import Goal

        for text in value:
            Goal.of(text)

    @hookimpl
    def on_start(self) -> None:
        self._process, self._has_warned = None, False

    @hookimpl
    def on_ready(self, loop: Loop) -> None:
        # Called after on_stop of all plugins, so that the last report has the end of the run.
        if loop.is_main and loop.run_dir:
            loop.resources.callback(self._finish, loop)

    def act(self, loop: Loop) -> None:
        """Begin a report, unless the last one is not finished."""
        is_due = loop.is_main and loop.run_dir and not loop.end.reason
        if is_due and (self._process is None or self._process.poll() is not None):
            self._wait()
            self._begin(loop)

    def _finish(self, loop: Loop) -> None:
        """Write the last report; a report that is under way is stopped."""
        if self._process is not None:
            with self._process, self._messages:
                self._process.kill()
        self._begin(loop)
        self._wait()

    def _begin(self, loop: Loop) -> None:
        words = [sys.executable, "-m", "hookdiff", "report", "--", os.fspath(loop.run_dir or "")]
        null, self._process = subprocess.DEVNULL, None
        try:
            # Not a pipe: it is read after the end of the process, and a full pipe would stop the process.
            err = self._messages = tempfile.TemporaryFile()  # noqa: SIM115 the process needs it
            # In a new session: Ctrl-C in the terminal is for the training.
            with safe_path():
                self._process = subprocess.Popen(words, stdin=null, stdout=null, stderr=err, start_new_session=True)
        except OSError as error:
            self._warn(str(error))
            return
        if hasattr(os, "setpriority"):
            with suppress(OSError):  # the process has ended already
                os.setpriority(os.PRIO_PROCESS, self._process.pid, 19)

    def _wait(self) -> None:
        """Wait for the process, and warn if it fails or is late."""
        process, self._process = self._process, None
        if process is None:
            return
        with process, self._messages:
            try:
                if process.wait(self.timeout):
                    self._messages.seek(0)
                    messages = self._messages.read().decode(errors="replace").split("\n")
                    self._warn(next(filter(str.strip, reversed(messages)), f"exit code {process.returncode}"))
            except subprocess.TimeoutExpired:
                self._warn(f"it takes longer than plugins.report.timeout = {self.timeout:g} s; raise the timeout")
            finally:
                process.kill()

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("report: report.html cannot be written, the run goes on: %s", why)
