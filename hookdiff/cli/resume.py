"""`hookdiff resume`: continue a run, for longer or in another directory if needed."""

from pathlib import Path
from typing import Any

import click

from hookdiff.cli.arguments import length_options, length_settings, out_option, run_argument, training_options
from hookdiff.errors import NoCheckpoint, UserError


@click.command()
@run_argument()
@length_options
@out_option("Continue in a new directory; RUN stays as it is.", metavar="DIR")
@training_options
def command(
    run: Path,
    steps: int | None,
    epochs: int | None,
    out: Path | None,
    settings: tuple[str, ...],
    trust: bool,
    **options: Any,
) -> None:
    """Continue RUN, a run directory, from its newest checkpoint and with its own config.

    RUN may also be a checkpoint in a run directory; then add --out. If the run is already done, the command prints
    a message and exits with 0.
    """
    from hookdiff.builtin.config_changes import check_parts
    from hookdiff.cli.run import train_from_config
    from hookdiff.disk.paths import is_empty
    from hookdiff.experiment.toml_file import read_toml
    from hookdiff.machine.joining import shown_once
    from hookdiff.run_dir.config_toml import CONFIG
    from hookdiff.run_dir.layout import run_of

    with shown_once():
        settings = (*settings, *length_settings(steps, epochs))
        source = run_of(run)
        if out is None and source != run:
            raise UserError(f"{run} is a checkpoint of {source}: add --out DIR, the directory of the new run")
        if out is not None and out.resolve() == source.resolve():
            if source != run:
                raise UserError(f"--out {out} holds the run of the checkpoint; choose another directory")
            out = None
        if out is not None and out.is_dir() and not is_empty(out):
            raise UserError(f"--out {out} exists; choose another directory, or continue it: hookdiff resume {out}")
        check_parts(settings, read_toml(source / CONFIG))
    try:
        train_from_config(source / CONFIG, out or run, resume=run, settings=settings, trust=trust, **options)
    except NoCheckpoint as error:
        if source != run:
            lacking = f"{run} has no checkpoint: no manifest is in it"
            raise UserError(f"{lacking}; use the newest: hookdiff resume {source} --out {out}") from None
        place = f"{run} --resume" if out is None else out
        again = f"hookdiff run {source / CONFIG} --out {place}" + " --trust" * trust
        raise UserError(f"{error}; to start anew: {again}") from None
