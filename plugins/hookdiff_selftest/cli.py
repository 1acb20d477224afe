"""`hookdiff selftest`: prove on this machine that what hookdiff computes is right."""

from __future__ import annotations

import sys
from functools import partial
from itertools import groupby
from pathlib import Path

import click

from hookdiff.cli.options import config_argument, override_options


@click.group()
def command() -> None:
    """Prove on this machine that what hookdiff computes is right."""


@command.command()
@click.option("--prediction-type", "names", multiple=True, help="Only this one; may be given several times.")
def gaussian(names: tuple[str, ...]) -> None:
    """Train and sample where the optimum is known in closed form.

    The data is N(1, 0.5²) in every pixel. For each prediction type, loss weighting and sampler: the loss, what was
    learned of mean and deviation (std), and the deviation of samples made in few steps, each beside its exact value,
    which is computed by formulas written a second time. Takes about half a minute; exit code 1 if a number is off.
    """
    from hookdiff import UserError, nearest
    from hookdiff_selftest.gaussian import CASES, SAMPLERS, STEPS, TOLERANCE, Check, run

    known = sorted({case.prediction_type for case in CASES})
    for name in names:
        if name not in known:
            raise UserError(f"--prediction-type {name}: unknown{nearest(name, known)}; known: {', '.join(known)}")
    cases = [case for case in CASES if not names or case.prediction_type in names]
    shown = ["mean", "std", *(f"{sampler} std" for sampler in SAMPLERS)]
    failed: list[Check] = []
    for case, trainings in groupby(run(cases), key=lambda checks: checks[0].case):
        click.echo(f"{case}; samples in {STEPS} steps")
        click.echo(_row("", ["loss", "exact", "mean", "std", *SAMPLERS]))
        for number, checks in enumerate(trainings):
            by_name = {check.name: check for check in checks}
            if number == 0:  # the exact numbers but for the loss are the same for all weightings
                click.echo(_row("exact", ["", "", *(f"{by_name[name].exact:.4f}" for name in shown)]))
            loss = by_name["loss"]
            numbers = [loss.measured, loss.exact, *(by_name[name].measured for name in shown)]
            wrong = [check for check in checks if not check.passed]
            row = _row(checks[0].weighting, [f"{value:.4f}" for value in numbers])
            click.echo(row + ("  FAILED" if wrong else ""))
            failed += wrong
        click.echo()
    if failed:
        click.echo("\n".join(f"FAILED  {check}" for check in failed))
        sys.exit(1)
    click.echo(f"all within {TOLERANCE:.0%} of the exact value (means: of the deviation)")


@command.command()
@config_argument
@override_options
@click.option("--steps", default=40, show_default=True, type=click.IntRange(8), metavar="N", help="Of each run.")
@click.option(
    "--workers",
    default=0,
    show_default=True,
    type=click.IntRange(0),
    metavar="N",
    help="Of the data, after the resume; before it, as in CONFIG.",
)
def resume(config: Path, plugins: tuple[str, ...], settings: tuple[str, ...], steps: int, workers: int) -> None:
    """Kill a run of CONFIG, resume it, and compare it with one that was never stopped.

    All tensors, all other values of the state, all logged numbers and all files have to be equal to the last bit. A
    difference is reported with the plugin that it belongs to, and the exit code is 1. This is for authors of plugins,
    models and data. The runs are in a temporary folder and end early; the plugin that saves does so in their middle, at
    least every sixth step is logged, and all else is as CONFIG says.
    """
    from hookdiff import load_config
    from hookdiff.experiment import try_config
    from hookdiff_selftest.resume import prove

    checked = load_config(config, plugins, settings)
    try_config(checked)
    lines, passed = prove(checked, steps, workers, partial(click.echo, err=True))
    click.echo("\n".join(lines))
    if not passed:
        sys.exit(1)


def _row(name: str, cells: list[str]) -> str:
    return f"  {name:<9}" + "".join(f"{cell:>11}" for cell in cells)
