"""`hookdiff watch`: show a run on the terminal while it trains."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

    from hookdiff_watch.followed import Followed
    from hookdiff_watch.view import Screen

_LINES = 30  # lines of a snapshot in a pipe
_TICK = 0.2  # seconds between two looks at the size of the terminal


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--every", default=2.0, type=click.FloatRange(min=0.1), metavar="X", help="Seconds between two readings.")
@click.option("--once", is_flag=True, help="Print one snapshot, and end.")
def command(run: Path, every: float, once: bool) -> None:
    """Show RUN, a run directory, until the run ends or Ctrl-C is pressed. Nothing is written to it.

    It shows step, speed and ETA, the newest values, the curves of loss, gradient norm, learning rate and FID, the
    newest samples, and the last events, such as findings and checkpoints. In a pipe the command prints one snapshot.
    """
    from rich.console import Console

    from hookdiff.run_dir import History
    from hookdiff_watch.followed import Followed

    followed = Followed(History.of(run).run_dir)
    followed.read()
    console = Console(highlight=False, soft_wrap=False)
    # Rich's own test is not used: with FORCE_COLOR it takes a pipe for a terminal.
    is_live = sys.stdout.isatty() and not console.is_dumb_terminal and not once
    if is_live and not followed.is_over:
        _follow(followed, console, every)
    _print(followed, console)


def _follow(run: Followed, console: Console, every: float) -> None:
    """Show the run on the whole screen until the run is over."""
    from rich.console import Group
    from rich.live import Live

    from hookdiff_watch.view import view

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the end of `Live` shows the cursor again
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while not run.is_over:
            size = console.size
            live.update(Group(*view(run, _screen(console))), refresh=True)
            until = time.monotonic() + every
            while time.monotonic() < until and console.size == size:
                time.sleep(min(_TICK, every))
            if time.monotonic() >= until:
                run.read()


def _print(run: Followed, console: Console) -> None:
    """Print the run as it is now."""
    from hookdiff_watch.view import view

    lines = view(run, _screen(console))
    if sys.stdout.isatty():
        for line in lines:
            console.print(line)
    else:
        click.echo("\n".join(line.plain.rstrip() for line in lines))


def _screen(console: Console) -> Screen:
    from hookdiff_watch.view import Screen

    is_utf = console.encoding.lower().startswith("utf")
    if not sys.stdout.isatty():
        return Screen(max(40, shutil.get_terminal_size((80, 0)).columns), _LINES, is_utf, False)
    colours = console.color_system in ("256", "truecolor") and not console.no_color
    return Screen(console.width, console.height - 1, is_utf, is_utf and colours)
