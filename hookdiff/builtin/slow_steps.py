"""The plugin that reports steps that have become slow, with the cause."""

import time
from statistics import median

from attrs import define, field

from hookdiff.device_part import DevicePart
from hookdiff.findings import Finding
from hookdiff.hookspecs import hookimpl
from hookdiff.loop import Loop
from hookdiff.machine import Usage

_USUAL = 20  # steps whose median is the usual time
_SLOW = 5  # times the usual time
_STEPS = 3  # slow ones in a row, since a single one may be a hiccup of the system
_LOST = 2.0  # seconds that they have lost: less is not worth a report


@define(eq=False)
class SlowSteps:
    """Reports when forward and backward pass suddenly take five times as long as before, and the cause if it shows.

    Most often it is another process: on busy CPUs the threads of torch wait for each other, and two are slower than
    one.
    """

    _times: list[float] = field(factory=list, init=False)  # of the last usual steps, in seconds
    _usual: float = field(default=0.0, init=False)  # their median; 0: too few of them
    _slow: int = field(default=0, init=False)  # slow steps since the last usual one
    _lost: float = field(default=0.0, init=False)  # seconds that these have lost
    _since: Usage | None = field(default=None, init=False)  # at the first slow step
    _begun: float = field(default=0.0, init=False)
    _is_reported: bool = field(default=False, init=False)

    @hookimpl(trylast=True)
    def before_step(self) -> None:
        self._begun = time.perf_counter()

    @hookimpl(tryfirst=True)
    def after_backward(self, loop: Loop) -> None:
        took = time.perf_counter() - self._begun
        if self._usual and took > _SLOW * self._usual:
            self._note(loop, took)
            return
        self._slow, self._lost, self._is_reported = 0, 0.0, False
        self._times.append(took)
        if len(self._times) == _USUAL:
            self._usual, self._times = median(self._times), []

    def on_device(self, loop: Loop) -> list[DevicePart]:
        """Return no work: the time to the end of a recorded step shows as well that steps have become slow."""
        return []

    def _note(self, loop: Loop, took: float) -> None:
        if not self._slow:
            self._since = Usage.now()  # after the first slow step, whose beginning nobody has noted
        self._slow += 1
        self._lost += took - self._usual
        if self._is_reported or self._since is None or self._slow <= _STEPS or self._lost < _LOST:
            return
        self._is_reported = True
        cause = Usage.now().since(self._since).cause()
        what = f"steps have become slow: {shown(took)}, usually {shown(self._usual)}"
        why = cause or "neither other processes, nor the memory, nor the limit of a container shows as the cause"
        loop.log.report(Finding("warning", what, why))


def shown(seconds: float) -> str:
    """Return "67.3 ms" or "2.48 s"."""
    return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{1000 * seconds:.3g} ms"
