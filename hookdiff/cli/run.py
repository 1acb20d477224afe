"""`hookdiff run`: train from a config."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any

import click

from hookdiff.cli.exits import BY_REASON
from hookdiff.cli.options import config_argument, training_options

log = logging.getLogger("hookdiff")


@click.command()
@config_argument
@training_options
@click.option("--out", type=click.Path(path_type=Path), help="The run directory; runs/NAME unless given.")
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint, or start where there is none.")
@click.option("--overwrite", is_flag=True, help="Remove an earlier run in the same directory.")
def command(config: Path, out: Path | None, resume: bool, overwrite: bool, **options: Any) -> None:
    """Train from CONFIG."""
    from hookdiff.errors import UserError

    if resume and overwrite:
        raise UserError("--resume and --overwrite exclude each other")
    train(config, out, resume=resume, overwrite=overwrite, **options)


def train(
    path: Path,
    run_dir: Path | None,
    *,
    resume: bool | Path,
    overwrite: bool = False,
    plugins: tuple[str, ...],
    settings: tuple[str, ...],
    lr: str | None,
    skip_batches: int,
    fresh: tuple[str, ...],
    usr1: bool,
) -> None:
    """Train from the config at `path` in `run_dir`, runs/NAME unless given, and exit with the code of the outcome.

    `resume` is that of `build_loop`; where there is no directory yet, True starts one.
    """
    from hookdiff import experiment
    from hookdiff.builtin.signals import Signals
    from hookdiff.cli.summary import summary
    from hookdiff.disk.paths import check_run_dir
    from hookdiff.errors import UserError, nearest
    from hookdiff.experiment.config import load_config

    logging.basicConfig(format="%(message)s")
    log.setLevel(logging.INFO)
    if lr is not None:
        settings = (*settings, f"optimizer.lr={lr}")
    config = load_config(path, plugins, settings)
    for name in fresh:
        if name not in config.plugins:
            near = nearest(name, config.plugins) or f"; its plugins are {', '.join(config.plugins) or 'none'}"
            raise UserError(f"--fresh {name}: no plugin of this run{near}")
    run_dir = run_dir or Path("runs") / config.run.name
    if resume is True and not run_dir.exists():
        resume = False
        log.info("%s is not there yet: the run starts", run_dir)
    check_run_dir(run_dir, resume in (True, run_dir), overwrite)
    experiment.try_config(config, resume=bool(resume))
    signals = Signals(usr1)
    loop = experiment.build_loop(
        config,
        run_dir,
        resume=resume,
        overwrite=overwrite,
        fresh=fresh,
        skip_batches=skip_batches,
        plugins={"signals": signals},
    )
    reason = loop.run()
    if reason == "done" and resume and loop.progress.step == loop.first_step:
        unit = "steps" if config.run.epochs is None else "epochs"
        source, out = (run_dir, "") if resume is True else (resume, f" --out {run_dir}" * (resume != run_dir))
        length, there = getattr(config.run, unit), getattr(loop.progress, unit.removesuffix("s"))
        click.echo(
            f"{source} was done already, with {there} of {length} {unit}; to train on: hookdiff resume {source} "
            f"--{unit} N{out}"
        )
    else:
        click.echo(summary(loop, reason, config.run.name, time.monotonic() - loop.start_time))
        if reason in ("signal", "time") and loop.progress.step and loop.plugins.implement("restore"):
            click.echo(f"to go on: hookdiff resume {run_dir}")
    sys.exit(128 + signals.caught if signals.caught and reason == "signal" else BY_REASON[reason])
