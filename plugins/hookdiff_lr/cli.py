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
    from hookdiff_lr.plugin import LR, Curve


@click.command()
@config_argument
@override_options
@click.option("--out", type=click.Path(path_type=Path), help="A .png; NAME-lr.png unless given.")
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON.")
def command(config: Path, plugins: tuple[str, ...], settings: tuple[str, ...], out: Path | None, as_json: bool) -> None:
    """Draw the learning rate that CONFIG would train with, from step 0 to the last that is made.

    The data is only looked at where the length of the run is given in epochs.
    """
    from hookdiff import UserError, load_config
    from hookdiff_lr.chart import draw

    checked = load_config(config, plugins, settings)
    plugin, steps = _plugin(checked), _steps(checked)
    curve, last = plugin.curve(steps), steps - 1  # of the steps that are made: a restart at the end is none any more
    rates, remarks = _rates(checked), list(plugin.remarks(steps))
    rows = [
        (what, step, {name: rate * curve.factor(step) for name, rate in rates.items()})
        for what, step in sorted(_rows(curve, steps), key=lambda row: row[1])
    ]
    out = out or Path(f"{checked.run.name}-lr.png")
    try:
        draw(lambda step: curve.factor(min(step, last)), rates, max(1, last), out)
    except (OSError, ValueError) as error:  # the latter of a name that ends in no format
        raise UserError(f"{out}: cannot be written: {error}") from None
    use = curve.schedule.use
    if as_json:
        points = [{"what": what, "step": step, **values} for what, step, values in rows]
        about = {"run": checked.run.name, "schedule": use, "steps": steps, "picture": str(out), "rates": rates}
        click.echo(json.dumps({**about, "points": points, "remarks": remarks}, indent=2))
        return
    warmup = f" after {curve.warmup} steps of warm-up" if curve.warmup else ""
    shape = f"{use}{warmup}" if "lr" in checked.plugins else "constant, since the plugin lr is not switched on"
    click.echo(f"{checked.run.name}: {shape}, {steps} steps")
    click.echo(f"  {'step':>9}  {'':<20}" + "".join(f"  {name:>12}" for name in rates))
    for what, step, values in rows:
        click.echo(f"  {step:>9}  {what:<20}" + "".join(f"  {value:>12.4g}" for value in values.values()))
    for line in (*remarks, out):
        click.echo(f"  {line}")


def _plugin(config: Config) -> LR:
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


def _rows(curve: Curve, steps: int) -> Iterator[tuple[str, int]]:
    """Yield the rows of the table: what happens, and at which step."""
    yield "start", 0
    for what, at in curve.landmarks():
        if at < steps:
            yield what, at
    for quarter, what in enumerate(("a quarter", "half", "three quarters"), 1):
        yield what, steps * quarter // 4
    yield "last step", steps - 1
