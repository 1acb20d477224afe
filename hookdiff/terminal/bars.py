"""Lines at the bottom of a terminal, or in the output of a notebook's cell; rich is imported when they are drawn."""

from __future__ import annotations

import importlib
import io
import logging
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from hookdiff.errors import shown
from hookdiff.terminal.pace import Work, is_shown, shown_by
from hookdiff.terminal.words import duration

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

PAUSE = 0.25  # seconds between two drawings
_SHORT = 0.5  # seconds; shorter work needs no bar
_WIDTH = 100  # columns in a notebook
_GAP = 2  # columns between two parts of a line
_BAR = 5, 60  # columns of the smallest and of the largest bar

# Returns the lines for a number of columns, with or without block characters.
Draw = Callable[[int, bool], "Sequence[RenderableType]"]


class Display(Protocol):
    """Shows the lines that a `Draw` returns."""

    def start(self) -> None:
        """Show the lines for the first time."""

    def tick(self) -> None:
        """Draw the lines again after a `PAUSE`. A thread would do this, too, but interrupt the training at random."""

    def stop(self) -> None:
        """Leave the last lines in the output, or remove them."""


def find_display(draw: Draw, is_kept: bool = True) -> Display | None:
    """Return a display in a terminal or a notebook; None for a pipe. `is_kept`: its lines stay after `stop`.

    Raises:
        ValueError: if stderr is closed.
    """
    if sys.stderr is None:
        raise ValueError("it is closed")
    if _is_terminal(sys.stderr) and _moves_its_cursor():
        kind: type[Bottom | Cell] = Bottom
    elif _is_notebook():
        kind = Cell
    else:
        return None
    generator = random.getstate()
    importlib.import_module("rich.style")  # the import draws from Python's generator
    random.setstate(generator)
    return kind(draw, is_kept)


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()


def _moves_its_cursor() -> bool:
    # rich is not asked: it takes a pipe for a terminal if FORCE_COLOR is set.
    return os.environ.get("TERM") not in ("dumb", "unknown") and os.environ.get("TTY_COMPATIBLE") != "0"


def _is_notebook() -> bool:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return hasattr(shell, "kernel")


class Bottom:
    """Keeps lines at the bottom of a terminal, below all printed and logged text."""

    def __init__(self, draw: Draw, is_kept: bool) -> None:
        from rich.console import Console, Group
        from rich.live import Live

        console = Console(stderr=True)
        self._live = Live(
            get_renderable=lambda: Group(*draw(console.width, not console.options.ascii_only)),
            console=console,
            auto_refresh=False,
            transient=not is_kept,
            redirect_stdout=_is_terminal(sys.stdout),  # a file or a pipe must still get the printed text
        )
        self._next = 0.0
        self._handlers: list[tuple[logging.StreamHandler[Any], Any]] = []

    def start(self) -> None:
        """Show the lines. From now on, text that is printed or logged to the terminal appears above them."""
        before = (sys.stderr, sys.stdout)
        self._live.start(refresh=True)
        if self._live.transient:  # a signal may end a command at once
            self._live.console.show_cursor()
        # A log handler keeps the stream that it was made with, and would write into the lines.
        logger: logging.Logger | None = logging.getLogger("hookdiff")
        while logger is not None:
            for handler in logger.handlers:
                for old, new in zip(before, (sys.stderr, sys.stdout), strict=True):
                    if isinstance(handler, logging.StreamHandler) and handler.stream is old and new is not old:
                        self._handlers.append((handler, old))
                        handler.setStream(new)
            logger = logger.parent if logger.propagate else None

    def tick(self) -> None:
        """Draw the lines again if they are older than `PAUSE`."""
        if time.monotonic() >= self._next:
            self._live.refresh()
            self._next = time.monotonic() + PAUSE

    def stop(self) -> None:
        """Leave the last lines on the terminal or remove them, and restore the streams of the log handlers."""
        for handler, stream in self._handlers:
            handler.stream = stream  # setStream would flush, which fails on a broken terminal
        self._handlers = []
        self._live.stop()


class Cell:
    """Keeps lines in one output of a notebook's cell, without widgets."""

    def __init__(self, draw: Draw, is_kept: bool) -> None:
        self._draw, self._is_kept = draw, is_kept
        self._next = 0.0
        self._handle: Any = None

    def start(self) -> None:
        """Make the output."""
        self._handle = importlib.import_module("IPython.display").display(self._bundle(), raw=True, display_id=True)

    def tick(self) -> None:
        """Replace the output if it is older than `PAUSE`."""
        if time.monotonic() >= self._next:
            self._handle.update(self._bundle(), raw=True)
            self._next = time.monotonic() + PAUSE

    def stop(self) -> None:
        """Replace the output for the last time."""
        self._handle.update(self._bundle() if self._is_kept else {"text/plain": ""}, raw=True)

    def _bundle(self) -> dict[str, str]:
        from rich.console import Console, Group

        # In a notebook rich would print to the cell, whatever its file is.
        look: Any = {"width": _WIDTH, "color_system": "truecolor", "force_terminal": True, "force_jupyter": False}
        console = Console(file=io.StringIO(), record=True, **look)
        console.print(Group(*self._draw(_WIDTH, True)))
        code = '<pre style="line-height: normal">{code}</pre>'
        html = console.export_html(code_format=code, inline_styles=True, clear=False)
        return {"text/plain": console.export_text(), "text/html": html}


@contextmanager
def shown_works() -> Iterator[None]:
    """Show bars of the long work of this thread in a terminal or a notebook; see `hookdiff.terminal.pace`.

    Do nothing if another function shows the work, or if there is only a pipe.
    """
    if is_shown() or not ((_is_terminal(sys.stderr) and _moves_its_cursor()) or _is_notebook()):
        yield
        return
    bars = _Bars()
    with shown_by(bars.show):
        try:
            yield
        finally:
            bars.show(())


class _Bars:
    """Bars that are shown only while there is long work."""

    def __init__(self) -> None:
        self._works: Sequence[Work] = ()
        self._display: Display | None = None
        self._is_broken = False

    def show(self, works: Sequence[Work]) -> None:
        self._works = works
        if self._is_broken:
            return
        try:
            if self._display is not None and works:
                self._display.tick()
            elif self._display is not None:
                display, self._display = self._display, None
                display.stop()
            elif long_works(works):
                self._display = find_display(lambda width, _: work_lines(self._works, width), is_kept=False)
                if self._display is not None:
                    self._display.start()
        except (OSError, ValueError):  # stderr is broken or closed; the command goes on
            self._is_broken = True
            with suppress(OSError, ValueError):
                if self._display is not None:
                    self._display.stop()


def long_works(works: Sequence[Work]) -> list[Work]:
    """Return the works that have taken long enough for a bar."""
    return [work for work in works if time.monotonic() - work.began > _SHORT]


def work_lines(works: Sequence[Work], width: int) -> list[Table]:
    """Return a line with a bar for each long work, such as "fid: images  ━━━━━  64/100  12 s left"."""
    lines = []
    for work in long_works(works):
        left = work.left()
        parts = [shown(work.what), f"{work.done:,}/{work.total:,} {work.unit}"]
        parts += [] if left is None else [f"{duration(left)} left"]
        lines.append(bar_line(parts, 1, work.done, work.total, width))
    return lines


def bar_line(parts: Sequence[str], place: int, done: int, total: int, width: int) -> Table:
    """Return a line with a bar after the first `place` parts; if the parts do not fit, the last are left out."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    texts = [Text(part) for part in parts]
    while len(texts) > 1 and sum(text.cell_len + _GAP for text in texts) + _BAR[0] > width:
        texts.pop()
    bar = ProgressBar(total, done, style="bright_black", complete_style="green", finished_style="green")
    line = Table.grid(padding=(0, _GAP, 0, 0))
    row: list[RenderableType] = [*texts[:place], bar, *texts[place:]]
    for part in row:
        line.add_column(no_wrap=part is not bar, overflow="crop", max_width=_BAR[1] if part is bar else None)
    line.add_row(*row)
    return line


def flow(parts: Sequence[Text], width: int, most: int) -> list[Text]:
    """Return the parts in at most `most` lines; a part that does not fit is left out."""
    lines: list[Text] = []
    for part in parts:
        if part.cell_len > width:
            continue
        if lines and lines[-1].cell_len + _GAP + part.cell_len <= width:
            lines[-1].append(" " * _GAP).append_text(part)
        elif len(lines) < most:
            lines.append(part.copy())
    return lines
