"""`hookdiff selftest`: prove on this machine that what hookdiff computes is right."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click

from hookdiff.cli import config_argument, override_options


@click.group()
def command() -> None:
    """Prove on this machine that what hookdiff computes is right."""


@command.command()
@click.option("--prediction-type", "names", multiple=True, metavar="NAME", help="Test only this type; may be repeated.")
def gaussian(names: tuple[str, ...]) -> None:
    """Train and sample where the optimum is known in closed form.

    The data is N(1, 0.5²) in every pixel. Each prediction type is trained with each loss weighting. The command prints
    the loss, the learned mean and standard deviation (std), and the std of the samples of each sampler in few steps,
    beside exact values from independent formulas. Takes about half a minute; exit code 1 if a number is off.
    """
    from hookdiff import UserError, nearest
    from hookdiff_selftest.gaussian import CASES, SAMPLERS, STEPS, TOLERANCE, WEIGHTINGS, Check, check

    known = sorted({case.prediction_type for case in CASES})
    for name in names:
        if name not in known:
            raise UserError(f"--prediction-type {name}: unknown{nearest(name, known)}; known: {', '.join(known)}")
    shown = ["mean", "std", *(f"{sampler} std" for sampler in SAMPLERS)]
    failed: list[Check] = []
    for case in CASES:
        if names and case.prediction_type not in names:
            continue
        click.echo(f"{case}; samples in {STEPS} steps")
        click.echo(_row("", ["loss", "exact", "mean", "std", *SAMPLERS]))
        for weighting in WEIGHTINGS:
            checks = check(case, weighting)
            if weighting == WEIGHTINGS[0]:  # except for the loss, the exact numbers are the same for all weightings
                click.echo(_row("exact", ["", "", *(checks[name].exact for name in shown)]))
            numbers = [checks["loss"].measured, checks["loss"].exact, *(checks[name].measured for name in shown)]
            wrong = [each for each in checks.values() if not each.passed]
            click.echo(_row(weighting, numbers) + ("  FAILED" if wrong else ""))
            failed += wrong
        click.echo()
    if failed:
        click.echo("\n".join(f"FAILED  {each}" for each in failed))
        sys.exit(1)
    click.echo(f"all within {TOLERANCE:.0%} of the exact value (means: of the standard deviation)")


@command.command()
@config_argument
@override_options
@click.option("--steps", default=40, show_default=True, type=click.IntRange(8), metavar="N", help="Steps of each run.")
@click.option(
    "--workers",
    default=0,
    show_default=True,
    type=click.IntRange(0),
    metavar="N",
    help="Data workers after the resume; CONFIG sets those before.",
)
def resume(
    config: Path, plugins: tuple[str, ...], settings: tuple[str, ...], trust: bool, steps: int, workers: int
) -> None:
    """Kill a run of CONFIG, resume it, and compare it with a run that was never stopped.

    All tensors, all other values of the state, all logged numbers and all files have to be equal to the last bit. Text
    files are compared by their numbers and the count of lines. The files of trackers are not compared. If the runs
    differ, the exit code is 1, and a plugin is named as the cause. The message says "perhaps", unless restoring the
    fields of this plugin removes the difference. The command is for authors of plugins, models and data. The runs are
    in a temporary folder and end early. The checkpoint comes in the middle, and numbers are logged at least six times.
    All other settings are those of CONFIG.
    """
    from hookdiff import load_config
    from hookdiff.experiment import try_config
    from hookdiff_selftest.resume import prove

    checked = load_config(config, plugins, settings, trust=trust)
    try_config(checked)
    lines, passed = prove(checked, steps, workers, partial(click.echo, err=True))
    click.echo("\n".join(lines))
    if not passed:
        sys.exit(1)


def _row(name: str, cells: Sequence[str | float]) -> str:
    return f"  {name:<9}" + "".join(f"{cell if isinstance(cell, str) else f'{cell:.4f}':>11}" for cell in cells)
