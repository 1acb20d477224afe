"""The plugin that handles SIGINT, SIGTERM and SIGUSR1."""

import logging
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import Any

from attrs import define, field

from hookdiff.errors import UserError
from hookdiff.loop.hookspecs import hookimpl
from hookdiff.loop.loop import Loop
from hookdiff.machine.joining import job_name

logger = logging.getLogger("hookdiff")


@define(eq=False)
class Signals:
    """Ends the run after the current step at the first SIGINT or SIGTERM; the second signal ends the process.

    SIGUSR1 saves the run after the current step, and the run goes on; with `usr1` it ends the run as out of time. Under
    torchrun, which passes signals on, a second signal does nothing. A signal to one rank ends or saves the run on all.
    The handlers are installed at the very beginning of `on_start`. The earlier handlers are restored after the run has
    saved and closed everything. Outside the main thread, Python allows no handlers, so the plugin does nothing.

    Raises:
        UserError: with `usr1`, where there is no SIGUSR1.
    """

    usr1: bool = False  # SIGUSR1 ends the run as out of time; some schedulers send it before they stop a job
    caught: int | None = field(default=None, init=False)  # the first SIGINT or SIGTERM of the last run

    @hookimpl(tryfirst=True)
    def on_start(self, loop: Loop) -> None:
        self.caught = None
        has_usr1 = hasattr(signal, "SIGUSR1")
        if self.usr1 and not has_usr1:
            raise UserError("--usr1: this system has no signal SIGUSR1; set run.max_time to end the run in time")
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
            elif loop.end.reason is None and self.usr1:  # no first signal: a scheduler may send SIGTERM next
                loop.stop("time")
                logger.warning("the time is nearly up: stopping after this step")
            elif loop.end.reason is None:
                loop.save()
                logger.info("SIGUSR1: a save is asked for after this step, and the run goes on")

        for number in (signal.SIGINT, signal.SIGTERM, *([signal.SIGUSR1] if has_usr1 else [])):
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
