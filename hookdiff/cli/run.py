"""`hookdiff run`: train from a config."""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hookdiff.cli.exits import BY_REASON
from hookdiff.cli.options import config_argument, override_options

if TYPE_CHECKING:
    from hookdiff.loop import Loop

log = logging.getLogger("hookdiff")


@click.command()
@config_argument
@override_options
@click.option("--out", type=click.Path(path_type=Path), help="The run directory; runs/NAME unless given.")
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint, or start where there is none.")
@click.option("--overwrite", is_flag=True, help="Remove an earlier run in the same directory.")
@click.option("--lr", metavar="X", help="The learning rate: short for --set optimizer.lr=X.")
@click.option("--skip-batches", default=0, type=click.IntRange(0), metavar="N", help="Pass over the next N batches.")
@click.option("--fresh", multiple=True, metavar="NAME", help="On --resume, start this plugin anew.")
def command(
    config: Path,
    plugins: tuple[str, ...],
    settings: tuple[str, ...],
    out: Path | None,
    resume: bool,
    overwrite: bool,
    lr: str | None,
    skip_batches: int,
    fresh: tuple[str, ...],
) -> None:
    """Train from CONFIG."""
    from hookdiff import experiment
    from hookdiff.cli.summary import summary
    from hookdiff.config import load_config
    from hookdiff.errors import UserError, nearest
    from hookdiff.run_dir import check_run_dir

    if resume and overwrite:
        raise UserError("--resume and --overwrite exclude each other")
    logging.basicConfig(format="%(message)s")
    log.setLevel(logging.INFO)
    if lr is not None:
        settings = (*settings, f"optimizer.lr={lr}")
    checked = load_config(config, plugins, settings)
    for name in fresh:
        if name not in checked.plugins:
            raise UserError(f"--fresh {name}: no plugin of this run{nearest(name, checked.plugins)}")
    run_dir = out or Path("runs") / checked.run.name
    resume = resume and run_dir.exists()
    check_run_dir(run_dir, resume, overwrite)
    experiment.probe(checked, resume=resume)
    loop = experiment.build_loop(
        checked, run_dir, resume=resume, overwrite=overwrite, fresh=fresh, skip_batches=skip_batches
    )
    caught: list[int] = []
    with _stop_on_signal(loop, caught):
        reason = loop.run()
    click.echo(summary(loop, reason, checked.run.name, time.monotonic() - loop.began))
    sys.exit(128 + caught[0] if caught and reason == "signal" else BY_REASON[reason])


@contextmanager
def _stop_on_signal(loop: Loop, caught: list[int]) -> Iterator[None]:
    """Let the first SIGINT or SIGTERM end the run after the step under way, and the second leave at once."""

    def handler(number: int, frame: object) -> None:
        caught.append(number)
        loop.stop("signal")
        # Not back to Python's own handler: that one waits for the call under way, and a signal can slip past it.
        for each in previous:
            signal.signal(each, signal.SIG_DFL)
        if sys.__stderr__ and sys.__stderr__.isatty():
            sys.__stderr__.write("\x1b[?25h")  # a bar hides the cursor, and may not get to show it again
        log.warning("stopping after this step; once more leaves at once")

    previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, before in previous.items():
            signal.signal(each, before)
