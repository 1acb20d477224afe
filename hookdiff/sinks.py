"""The base of all sinks. A sink sends logged values and pictures to a tracker."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from attrs import define, field
from attrs.validators import gt

from hookdiff.disk.images import as_pictures
from hookdiff.hookspecs import hookimpl
from hookdiff.options import about

if TYPE_CHECKING:
    from torch import Tensor

    from hookdiff.loop import Loop

log = logging.getLogger("hookdiff")


@define(eq=False)
class Sink:
    """The base of Aim and of every other tracker: a sink never ends a run, and never delays one for long.

    A subclass is a plugin like any other (`@define(eq=False)`) and implements those of the five methods below that it
    needs, but no hooks. They are called on the main rank only, one at a time, on a thread that belongs to the sink,
    while the loop waits. When `open`, `scalars`, `images` or `close` raises, or takes longer than `timeout`, the sink
    is switched off with one warning and the run continues. KeyboardInterrupt and SystemExit are not caught.
    """

    timeout: float = field(
        default=30.0,
        validator=gt(0),
        kw_only=True,
        metadata=about("limit of one call; after it, the tracker is switched off and the run goes on", "seconds"),
    )
    _thread: _Thread | None = field(init=False, default=None)  # None unless the sink is open
    _is_off: bool = field(init=False, default=False)

    def check(self) -> None:
        """Raise UserError for a mistake of the user, such as a missing package; the run then ends before it starts."""

    def open(self, loop: Loop) -> None:
        """Open the tracker: before the first step, when the state of a resumed run has been loaded."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write the `values` logged at `step`; they may be nan or infinite."""

    def images(self, step: int, images: Mapping[str, Tensor]) -> None:
        """Write pictures: n c h w, uint8, on the CPU, with c 1 or 3."""

    def close(self) -> None:
        """Flush and close, at the end of every run; also after a call that raised, `open` included."""

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        self._is_off = False
        if loop.is_main:
            self.check()

    @hookimpl
    def before_step(self, loop: Loop) -> None:
        if self._thread is None:  # opened here because in on_start its state is not loaded yet
            self._open(loop)

    @hookimpl
    def on_log(self, loop: Loop, step: int, values: Mapping[str, float]) -> None:
        self._write(loop, self.scalars, step, values)

    @hookimpl
    def on_images(self, loop: Loop, step: int, images: Mapping[str, Tensor]) -> None:
        self._write(loop, self.images, step, {name: as_pictures(values) for name, values in images.items()})

    def _open(self, loop: Loop) -> None:
        if loop.is_main and not self._is_off:
            self._thread = _Thread(type(self).__name__)
            # Not in on_stop: other plugins may still log there.
            loop.resources.callback(self._close, self._thread)
            self._attempt(self._thread, self.open, loop)

    def _write(self, loop: Loop, method: Callable[..., None], *arguments: Any) -> None:
        if self._thread is None:
            self._open(loop)
        if self._thread is not None and not self._is_off:
            self._attempt(self._thread, method, *arguments)

    def _close(self, thread: _Thread) -> None:
        self._thread = None
        if not thread.is_stuck:
            self._attempt(thread, self.close)
        thread.end()

    def _attempt(self, thread: _Thread, method: Callable[..., None], *arguments: Any) -> None:
        try:
            thread.call(method, *arguments, timeout=self.timeout)
        except Exception as error:
            if not self._is_off:
                reason = f"{type(error).__name__}: {error}"
                log.warning("%s is switched off, the run goes on: %s: %s", thread.name, method.__name__, reason)
                log.debug("where %s failed:", thread.name, exc_info=True)
            self._is_off = True


class _Thread:
    """Makes calls one by one on a daemon thread, so that a call that hangs does not keep the process from ending.

    All calls share one thread: locks and SQLite connections belong to the thread that made them.
    """

    def __init__(self, name: str) -> None:
        self.name, self.is_stuck = name, False
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def call(self, function: Callable[..., None], *arguments: Any, timeout: float) -> None:
        """Call `function` and wait. Its exceptions are raised here, or TimeoutError after `timeout` seconds."""
        done: Future[None] = Future()

        def make() -> None:
            try:
                function(*arguments)
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self._calls.put(make)
        try:
            done.result(timeout)
        except TimeoutError:
            if done.done():  # the function itself raised it
                raise
            self.is_stuck = True
            raise TimeoutError(f"no answer within {timeout:g} s") from None

    def end(self) -> None:
        """End the thread after the call under way, if that ever ends."""
        self._calls.put(None)

    def _run(self) -> None:
        while (make := self._calls.get()) is not None:
            make()
