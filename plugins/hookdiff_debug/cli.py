"""`hookdiff doctor`: check a config or a run, and print the findings, the cause first."""

import sys
from pathlib import Path

import click

from hookdiff.cli import (
    check_output,
    config_or_run_argument,
    json_option,
    out_option,
    override_options,
    overwrite_option,
)


@click.command()
@config_or_run_argument("path", "CONFIG|RUN|CHECKPOINT")
@override_options
@click.option(
    "--steps",
    default=50,
    show_default=True,
    type=click.IntRange(2),
    metavar="N",
    help="Updates of the trial. If the learning rate of a CONFIG still rises after them, more follow: through the"
    " warm-up in growing strides, and 25 at the full rate.",
)
@out_option("Draw images and predictions in this PNG file.")
@overwrite_option
@json_option
def command(
    path: Path,
    plugins: tuple[str, ...],
    settings: tuple[str, ...],
    steps: int,
    out: Path | None,
    overwrite: bool,
    as_json: bool,
    trust: bool,
) -> None:
    """Check CONFIG, or the newest checkpoint of the run directory RUN, or one CHECKPOINT in it.

    Trains for some steps in a temporary directory, half a minute at most, and checks data, network and optimisation.
    The first line names the cause when there is an error; then comes each check: ok, warning (unusual, but perhaps
    intended) or error. The picture of --out shows four images with more and more noise and, below each, the network's
    prediction. Exit code 1 when there is an error.
    """
    import json
    import math
    import tempfile

    from attrs import asdict

    from hookdiff import UserError, load_config
    from hookdiff.run_dir import CONFIG, run_of
    from hookdiff_debug.checks import cause
    from hookdiff_debug.doctor import as_text, examine

    run = path if path.is_dir() else None
    place = run_of(run) / CONFIG if run else path
    if out is not None:
        check_output(out, overwrite)
    config = load_config(place, plugins, settings, trust=trust)
    with tempfile.TemporaryDirectory() as folder:
        try:
            report = examine(config, run, steps, Path(folder), out)
        except OSError as error:
            raise UserError(f"{error.filename or out}: {error.strerror or error}") from None
    first, trial = cause(report.findings), report.trial
    if as_json:
        facts = {
            "cause": first,
            "findings": [{"name": name, **asdict(finding)} for name, finding in report.findings.items()],
            "step": report.step,
            "steps_asked": trial.asked,
            "steps_made": len(trial.rates),
            "losses": [loss if math.isfinite(loss) else None for loss in trial.losses],
            "seconds_per_step": trial.seconds / trial.steps_timed,
            "parts": {f"{plugin}.{hook}": time / trial.steps_timed for (plugin, hook), time in trial.parts.items()},
            "strip": report.strip and str(report.strip),
        }
        click.echo(json.dumps(facts))
    else:
        click.echo(as_text(report.findings))
        if report.strip:
            click.echo(f"{'':<8} picture        {report.strip}: more noise to the right, predictions below")
    if first:
        sys.exit(1)
