"""`hookdiff replay`: run the step that met a NaN again, exactly as it was or with changed options."""

import sys
from pathlib import Path

import click

from hookdiff.cli import override_options, path_argument
from hookdiff_nan.kept_steps import check_kept


@click.command()
@path_argument("folder", check_kept, "DIR")
@override_options
@click.option(
    "--lr",
    type=click.FloatRange(0, min_open=True),
    metavar="X",
    help="Train at this learning rate from the checkpoint before the step, up to and including the step.",
)
@click.option(
    "--anomaly",
    is_flag=True,
    help="Name the forward operation with a derivative that is NaN, with its line of code (torch's anomaly mode).",
)
def command(
    folder: Path, plugins: tuple[str, ...], settings: tuple[str, ...], lr: float | None, anomaly: bool, trust: bool
) -> None:
    """Run again the step kept in DIR, such as RUN/nan/step-00000123-position-00000123.

    The exit code is 0 if all values of the step are the same to the bit, and 1 if not. With --plugins, --set or --lr,
    which change the step, it is 0 if the step is finite. With --anomaly, it is 0 if an operation of the backward pass
    that made a NaN is named. It is 2 if DIR cannot be used. The run directory is not changed. Only --lr needs the data
    of the run.
    """
    from hookdiff import UserError
    from hookdiff_nan.replay import replay, retrain

    if lr is not None and anomaly:
        raise UserError("give --lr or --anomaly, not both")
    if lr is not None:
        good = retrain(folder, lr, plugins, settings, trust, click.echo)
    else:
        good = replay(folder, plugins, settings, anomaly, trust, click.echo)
    sys.exit(0 if good else 1)
