"""`hookdiff lr`: draw the learning rate of a config."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hookdiff.cli.options import config_argument, override_options

if TYPE_CHECKING:
    from hookdiff import Config
    from hookdiff_lr.plugin import LR


@click.command()
@config_argument
@override_options
@click.option("--out", type=click.Path(path_type=Path), help="A .png; NAME-lr.png unless given.")
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON.")
def command(config: Path, plugins: tuple[str, ...], settings: tuple[str, ...], out: Path | None, as_json: bool) -> None:
    """Draw the learning rate that CONFIG would train with, from step 0 to the last that is made.

    The data is only looked at where the run is told in epochs.
    """
    from hookdiff import UserError, load_config
    from hookdiff_lr.chart import draw

    checked = load_config(config, plugins, settings)
    schedule, steps = _schedule(checked), _steps(checked)
    total, last = schedule.length(steps), steps - 1  # of the steps that are made: a restart there is none any more
    rates = _rates(checked)
    rows = [
        (what, step, {name: rate * schedule.factor(step, total) for name, rate in rates.items()})
        for what, step in sorted(_rows(schedule, steps, total), key=lambda row: row[1])
    ]
    out = out or Path(f"{checked.run.name}-lr.png")
    try:
        draw(lambda step: schedule.factor(min(step, last), total), rates, max(1, last), out)
    except (OSError, ValueError) as error:  # the latter of a name that ends in no format
        raise UserError(f"{out}: cannot be written: {error}") from None
    late = schedule.unreached(steps, total)
    if as_json:
        points = [{"what": what, "step": step, **values} for what, step, values in rows]
        told = {"run": checked.run.name, "schedule": schedule.schedule, "steps": steps, "picture": str(out)}
        click.echo(json.dumps({**told, "rates": rates, "points": points, "unreached": late}, indent=2))
        return
    click.echo(f"{checked.run.name}: {_what(checked, schedule)}, {steps} steps")
    click.echo(f"  {'step':>9}  {'':<20}" + "".join(f"  {name:>12}" for name in rates))
    for what, step, values in rows:
        click.echo(f"  {step:>9}  {what:<20}" + "".join(f"  {value:>12.4g}" for value in values.values()))
    if late:
        click.echo(f"  {late}")
    click.echo(f"  {out}")


def _what(config: Config, schedule: LR) -> str:
    if "lr" not in config.plugins:
        return "constant, since the plugin lr is not switched on"
    warmup = f" after {schedule.warmup} steps of warm-up" if schedule.warmup else ""
    return schedule.schedule + warmup


def _schedule(config: Config) -> LR:
    """Return the plugin as the config makes it; without one the rate stays as it is."""
    from hookdiff import UserError
    from hookdiff_lr.plugin import LR

    if "lr" not in config.plugins:
        return LR("constant")
    made = config.plugins["lr"].build()
    if not isinstance(made, LR):
        raise UserError(f"the plugin 'lr' of this config is a {type(made).__name__}, whose schedule is not known here")
    return made


def _steps(config: Config) -> int:
    """Return the updates of the run; for one in epochs the data is counted."""
    from hookdiff import build_loop

    if config.run.steps is not None:
        return config.run.steps
    assert config.run.epochs is not None
    with tempfile.TemporaryDirectory() as folder:
        return config.run.epochs * build_loop(config, Path(folder), hooks=()).feed.num_batches


def _rates(config: Config) -> dict[str, float]:
    """Return the highest rate of each group that has one of its own."""
    from hookdiff.experiment import try_optimizers
    from hookdiff_lr.plugin import distinct_groups

    return {name: float(group["lr"]) for name, group in distinct_groups(try_optimizers(config)).items()}


def _rows(schedule: LR, steps: int, total: int) -> Iterator[tuple[str, int]]:
    """Yield what the table tells, and at which step."""
    yield "start", 0
    for what, at in schedule.landmarks(total):
        if at < steps:
            yield what, at
    for quarter, what in enumerate(("a quarter", "half", "three quarters"), 1):
        yield what, steps * quarter // 4
    yield "last step", steps - 1
