"""`hookdiff selftest`: prove on this machine that what hookdiff computes is right."""

import json
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import click

from hookdiff.cli import config_argument, json_option, override_options


@click.group()
def command() -> None:
    """Prove on this machine that what hookdiff computes is right."""


@command.command()
@click.option("--prediction-type", "names", multiple=True, metavar="NAME", help="Test only this type; may be repeated.")
@json_option
def gaussian(names: tuple[str, ...], as_json: bool) -> None:
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
    say: Callable[[str], object] = click.echo if not as_json else lambda text: None
    done: list[Check] = []
    failed = []
    for case in CASES:
        if names and case.prediction_type not in names:
            continue
        say(f"{case}; samples in {STEPS} steps")
        say(_row("", ["loss", "exact", "mean", "std", *SAMPLERS]))
        for weighting in WEIGHTINGS:
            checks = check(case, weighting)
            done += checks.values()
            if weighting == WEIGHTINGS[0]:  # the exact numbers but for the loss are the same for all weightings
                say(_row("exact", ["", "", *(checks[name].exact for name in shown)]))
            numbers = [checks["loss"].measured, checks["loss"].exact, *(checks[name].measured for name in shown)]
            wrong = [each for each in checks.values() if not each.passed]
            say(_row(weighting, numbers) + ("  FAILED" if wrong else ""))
            failed += wrong
        say("")
    if as_json:
        facts = [
            {"case": str(one.case), "weighting": one.weighting, "name": one.name}
            | {"measured": one.measured if math.isfinite(one.measured) else None}  # JSON has no NaN
            | {"exact": one.exact, "passed": one.passed}
            for one in done
        ]
        click.echo(json.dumps({"passed": not failed, "checks": facts}, indent=1))
    if failed:
        say("\n".join(f"FAILED  {each}" for each in failed))
        sys.exit(1)
    say(f"all within {TOLERANCE:.0%} of the exact value (means: of the standard deviation)")


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
    help="Data workers after the resume; before it, as in CONFIG.",
)
@json_option
def resume(
    config: Path,
    plugins: tuple[str, ...],
    settings: tuple[str, ...],
    trust: bool,
    steps: int,
    workers: int,
    as_json: bool,
) -> None:
    """Kill a run of CONFIG, resume it, and compare it with one that was never stopped.

    All tensors, all other values of the state, all logged numbers and all files have to be equal to the last bit; of
    text files, the numbers and the count of lines. What trackers write is not compared. A plugin is named as the cause
    if the difference goes away once its fields are put back, and with "perhaps" otherwise. The exit code is then 1.
    This is for authors of plugins, models and data. The runs are in a temporary folder and end early; the plugin that
    saves does so in the middle, numbers are logged at least six times, and all else is as in CONFIG.
    """
    from hookdiff import load_config
    from hookdiff.experiment import try_config
    from hookdiff_selftest.resume import prove

    checked = load_config(config, plugins, settings, trust=trust)
    try_config(checked)
    lines, passed = prove(checked, steps, workers, partial(click.echo, err=True))
    click.echo(json.dumps({"passed": passed, "lines": lines}, indent=1) if as_json else "\n".join(lines))
    if not passed:
        sys.exit(1)


def _row(name: str, cells: Sequence[str | float]) -> str:
    return f"  {name:<9}" + "".join(f"{cell if isinstance(cell, str) else f'{cell:.4f}':>11}" for cell in cells)
