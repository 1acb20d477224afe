"""`hookdiff replay`: run the step that stopped a run at a NaN again, to the bit or with a cure."""

import sys
from pathlib import Path

import click

from hookdiff.cli.options import override_options


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@override_options
@click.option("--no-amp", is_flag=True, help="Run the step without mixed precision: short for --plugins no:amp.")
@click.option(
    "--lr",
    type=click.FloatRange(0, min_open=True),
    help="Train at this learning rate from the checkpoint before the step, up to and including the step.",
)
@click.option(
    "--anomaly",
    is_flag=True,
    help="Name the operation of the forward whose derivative is a NaN, with its line (torch's anomaly mode).",
)
def command(
    folder: Path, plugins: tuple[str, ...], settings: tuple[str, ...], no_amp: bool, lr: float | None, anomaly: bool
) -> None:
    """Run the step kept in DIR, such as RUN/nan/step-00000123-position-00000123, again.

    Exit code 0 if all its values are the same to the bit, 1 if not. With --plugins, --set, --no-amp or --lr, which
    change the step: 0 if it is finite then, 1 if not. With --anomaly: 0 if an operation of the backward is found and
    named, 1 if none made a NaN. 2 when DIR cannot be used. The run directory is only read.
    """
    import logging

    from hookdiff import UserError
    from hookdiff_nan.record import read_record
    from hookdiff_nan.replay import names_of_plugins, replay, retrain

    logging.basicConfig(format="%(message)s")
    if lr is not None and anomaly:
        raise UserError("--lr and --anomaly exclude each other")
    if no_amp:
        if "amp" not in names_of_plugins(read_record(folder)):
            raise UserError("--no-amp: this run has no plugin 'amp', so it computed in the precision of its weights")
        plugins = (*plugins, "no:amp")
    if lr is not None:
        good = retrain(folder, lr, plugins, settings, click.echo)
    else:
        good = replay(folder, plugins, settings, anomaly, click.echo)
    sys.exit(0 if good else 1)
