"""`hookdiff resume`: go on with a run that was stopped, from its own config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hookdiff.cli.options import training_options


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--steps", type=click.IntRange(1), metavar="N", help="The length of the run from now on, in updates.")
@click.option("--epochs", type=click.IntRange(1), metavar="N", help="Or in passes over the data.")
@click.option("--out", type=click.Path(path_type=Path), help="Go on in another directory, and leave RUN as it is.")
@training_options
def command(
    run: Path,
    steps: int | None,
    epochs: int | None,
    out: Path | None,
    settings: tuple[str, ...],
    **options: Any,
) -> None:
    """Go on with RUN, a run directory, from its newest checkpoint.

    RUN may also be one checkpoint of a run; --out is needed then. A run that is done already says so, and exits with 0.
    """
    from hookdiff.builtin.changes import check_parts
    from hookdiff.cli.run import train
    from hookdiff.disk.paths import CONFIG, is_empty, run_of
    from hookdiff.errors import NoCheckpoint, UserError
    from hookdiff.experiment.config import read_toml

    if steps and epochs:
        raise UserError("--steps and --epochs exclude each other")
    source = run_of(run)
    if out is None and source != run:
        raise UserError(f"{run} is a checkpoint of {source}: say --out DIR for the run that begins with it")
    if out is not None and out.resolve() == source.resolve():
        if source != run:
            raise UserError(f"--out {out} has the run that the checkpoint is of; choose another directory")
        out = None
    if out is not None and out.is_dir() and not is_empty(out):
        raise UserError(f"--out {out} exists; choose another directory, or go on with it: hookdiff resume {out}")
    if steps or epochs:
        settings = (*settings, f"run.steps={steps or 'none'}", f"run.epochs={epochs or 'none'}")
    check_parts(settings, read_toml(source / CONFIG))
    try:
        train(source / CONFIG, out or run, resume=run, settings=settings, **options)
    except NoCheckpoint as error:
        raise UserError(f"{error}; to start it anew: hookdiff run {source / CONFIG} --out {run} --resume") from None
