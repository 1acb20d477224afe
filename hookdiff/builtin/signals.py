"""The plugin that handles SIGINT, SIGTERM and SIGUSR1."""

import logging
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import Any

from attrs import define, field

from hookdiff.loop.hookspecs import hookimpl
from hookdiff.loop.loop import Loop
from hookdiff.machine.joining import job_name

logger = logging.getLogger("hookdiff")


@define(eq=False)
class Signals:
    """Ends the run after the current step at the first SIGINT or SIGTERM; the second signal ends the process.

    Under torchrun, which passes signals on, a second signal does nothing. A signal to one rank ends the run on all.
    The handlers are installed at the very beginning of `on_start`. The earlier handlers are restored after the run has
    saved and closed everything. Outside the main thread, Python allows no handlers, so the plugin does nothing.
    """

    usr1: bool = False  # SIGUSR1 ends the run as out of time; some schedulers send it before they stop a job
    caught: int | None = field(default=None, init=False)  # the first SIGINT or SIGTERM of the last run

    @hookimpl(tryfirst=True)
    def on_start(self, loop: Loop) -> None:
        self.caught = None
        if threading.current_thread() is not threading.main_thread():
            return
        before: dict[int, Any] = {}
        # The first resource is closed last, so that no signal interrupts the last save.
        loop.resources.callback(_put_back, before)
        process = os.getpid()

        def handler(number: int, frame: object) -> None:
            if os.getpid() != process:  # a process forked from the run, such as a data worker
                _put_back(before)
                os.kill(os.getpid(), number)
            elif number in (signal.SIGINT, signal.SIGTERM):
                self._stop(loop, number)
            elif loop.end.reason is None:  # not counted as a first signal: a scheduler may send SIGTERM next
                loop.stop("time")
                logger.warning("the time is nearly up: stopping after this step")

        numbers = [signal.SIGINT, signal.SIGTERM]
        if self.usr1 and hasattr(signal, "SIGUSR1"):  # Windows has no SIGUSR1
            numbers.append(signal.SIGUSR1)
        for number in numbers:
            before[number] = signal.signal(number, handler)

    def _stop(self, loop: Loop, number: int) -> None:
        # SIG_DFL ends the process at once. Python's own handler waits for the current call, and can miss a signal.
        # torchrun repeats a signal that all processes have already got, and itself ends processes that take too long.
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN if job_name() else signal.SIG_DFL)
        with suppress(OSError, ValueError):  # the terminal is broken or closed
            if sys.__stderr__ and sys.__stderr__.isatty():
                sys.__stderr__.write("\x1b[?25h")  # show the cursor, which a progress bar hides
        action = "stopping after this step" if loop.end.reason is None else "the run is already ending"
        self.caught = number
        loop.stop("signal")
        logger.warning("%s%s", action, "" if job_name() else "; a second signal ends the process at once")


def _put_back(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        # None means that the handler was not installed from Python, and cannot be restored.
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
