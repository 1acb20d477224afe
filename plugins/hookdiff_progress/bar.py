"""The bar. It imports rich only where there is a terminal to show one."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Group

PAUSE = 0.25  # seconds between two pictures


class Bar:
    """Keeps a picture at the foot of the terminal, under what is printed and logged meanwhile.

    The steps redraw it: a thread would take its time from them at moments that nobody chose.
    """

    def __init__(self, draw: Callable[[], Group]) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(
            get_renderable=draw,
            console=Console(stderr=True),
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),  # what goes into a file has to get there
        )
        self._next = 0.0
        self._handlers: list[tuple[logging.StreamHandler[Any], Any]] = []

    def start(self) -> None:
        """Show it. Who writes to sys.stderr or logs to it writes above the bar from now on."""
        before = (sys.stderr, sys.stdout)
        self._live.start(refresh=True)
        # A handler keeps the stream that it found when it was made.
        for handler in _stream_handlers():
            for old, new in zip(before, (sys.stderr, sys.stdout), strict=True):
                if handler.stream is old and new is not old:
                    self._handlers.append((handler, old))
                    handler.setStream(new)

    def tick(self) -> None:
        """Redraw it if the last picture is old."""
        now = time.monotonic()
        if now >= self._next:
            self._live.refresh()
            self._next = time.monotonic() + PAUSE

    def stop(self) -> None:
        """Leave the last picture, and give the terminal and the handlers back."""
        for handler, stream in self._handlers:
            handler.setStream(stream)
        self._handlers = []
        self._live.stop()


def picture(label: str, step: int, total: int | None, pace: str, values: str) -> Group:
    """Return a bar between `label` and `pace`, and a line of `values` under it; None: the length is not known."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    head = Table.grid(padding=(0, 1), expand=True)
    head.add_column(no_wrap=True)
    head.add_column(ratio=1)
    head.add_column(no_wrap=True)
    head.add_row(label, ProgressBar(total, step), pace if total is None else f"{step / total:.0%}  {pace}")
    return Group(head, Text(values, no_wrap=True, overflow="ellipsis"))


def _stream_handlers() -> Iterator[logging.StreamHandler[Any]]:
    logger: logging.Logger | None = logging.getLogger("hookdiff")
    while logger is not None:
        yield from (handler for handler in logger.handlers if isinstance(handler, logging.StreamHandler))
        logger = logger.parent if logger.propagate else None
