"""Signals: finish the step, save, and exit."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from attrs import define, field

from hookdiff.hookspecs import hookimpl

if TYPE_CHECKING:
    from hookdiff.loop import Loop

log = logging.getLogger("hookdiff")


@define(eq=False)
class Signals:
    """Lets the first SIGINT or SIGTERM end the run after the step under way, and the second leave at once.

    The handlers are installed first of all in `on_start`, and removed when the run has saved and closed everything.
    They exist only in the main thread, since Python has none elsewhere.
    """

    usr1: bool = False  # SIGUSR1 ends the run as out of time: some schedulers send it before they stop a job
    caught: int | None = field(default=None, init=False)  # the first SIGINT or SIGTERM of the last run

    @hookimpl(tryfirst=True)
    def on_start(self, loop: Loop) -> None:
        """Take over the signals; how they were comes back when the run has ended."""
        self.caught = None
        if threading.current_thread() is not threading.main_thread():
            return
        before: dict[int, Any] = {}
        # Closed last: the first signal must not cut off the end of the run, above all the save.
        loop.resources.callback(_put_back, before)
        process = os.getpid()

        def handler(number: int, frame: object) -> None:
            if os.getpid() != process:  # one that was forked from this one: it is not the run
                _put_back(before)
                os.kill(os.getpid(), number)
            elif number in (signal.SIGINT, signal.SIGTERM):
                self._stop(loop, number)
            elif loop.reason is None:  # it is not the second signal: a scheduler may send SIGTERM next
                loop.stop("time")
                log.warning("the time is nearly up: stopping after this step")

        numbers = [signal.SIGINT, signal.SIGTERM]
        if self.usr1 and hasattr(signal, "SIGUSR1"):  # Windows has none
            numbers.append(signal.SIGUSR1)
        for number in numbers:
            before[number] = signal.signal(number, handler)

    def _stop(self, loop: Loop, number: int) -> None:
        # Not back to Python's own handler: that one waits for the call under way, and a signal can slip past it.
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)
        if sys.__stderr__ and sys.__stderr__.isatty():
            sys.__stderr__.write("\x1b[?25h")  # a bar hides the cursor, and may not get to show it again
        what = "stopping after this step" if loop.reason is None else "the run is ending already"
        self.caught = number
        loop.stop("signal")
        log.warning("%s; once more leaves at once", what)


def _put_back(before: dict[int, Any]) -> None:
    for number, handler in before.items():
        # None is a handler that was not made in Python, and that Python cannot put back.
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
