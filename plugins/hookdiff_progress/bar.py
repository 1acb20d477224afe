"""The bar on a terminal. It imports rich only when there is one."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Group

PAUSE = 0.25  # seconds between two pictures


class Bar:
    """Keeps the picture that `draw` returns at the bottom of the terminal, below all printed and logged lines.

    `tick` redraws it: a thread of its own would interrupt the training at random moments.
    """

    def __init__(self, draw: Callable[[], Group]) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(
            get_renderable=draw,
            console=Console(stderr=True),
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),  # a file or a pipe must still get what is printed
        )
        self._next = 0.0
        self._handlers: list[tuple[logging.StreamHandler[Any], Any]] = []

    def start(self) -> None:
        """Show the bar. From now on, all that is printed or logged to the terminal appears above it."""
        before = (sys.stderr, sys.stdout)
        self._live.start(refresh=True)
        # A log handler keeps the stream that it was made with, and would write into the bar.
        logger: logging.Logger | None = logging.getLogger("hookdiff")
        while logger is not None:
            for handler in logger.handlers:
                for old, new in zip(before, (sys.stderr, sys.stdout), strict=True):
                    if isinstance(handler, logging.StreamHandler) and handler.stream is old and new is not old:
                        self._handlers.append((handler, old))
                        handler.setStream(new)
            logger = logger.parent if logger.propagate else None

    def tick(self) -> None:
        """Redraw the bar if its last picture is older than `PAUSE`."""
        if time.monotonic() >= self._next:
            self._live.refresh()
            self._next = time.monotonic() + PAUSE

    def stop(self) -> None:
        """Leave the last picture on the terminal, and give the handlers their streams back."""
        for handler, stream in self._handlers:
            handler.stream = stream  # without a flush, which fails on a broken terminal
        self._handlers = []
        self._live.stop()


def picture(label: str, step: int, total: int | None, pace: str, values: str) -> Group:
    """Return a bar between `label` and `pace`, with a line of `values` below; a `total` of None means no known end."""
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
