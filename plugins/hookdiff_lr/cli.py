"""`hookdiff lr`: draw the learning rate of a config, or find one by a range test."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hookdiff.cli import check_free, config_or_run_argument, json_option, out_option, override_options, overwrite_option

if TYPE_CHECKING:
    from hookdiff import Config
    from hookdiff.authors import Chart
    from hookdiff_lr.find import RangeTest
    from hookdiff_lr.plugin import LR, RateCurve


STEPS = 200
RATES = (1e-5, 10.0)


@click.command()
@config_or_run_argument("config", "CONFIG|RUN")
@override_options
@click.option("--find", "finds", is_flag=True, help="Train at growing learning rates, and suggest a rate.")
@click.option(
    "--steps", type=click.IntRange(40), metavar="N", help=f"With --find: number of rates.  [default: {STEPS}]"
)
@click.option(
    "--rates",
    nargs=2,
    type=click.FloatRange(0, min_open=True),
    metavar="X X",
    help=f"With --find: lowest and highest rate.  [default: {RATES[0]:g} {RATES[1]:g}]",
)
@out_option("Picture to write.  [default: NAME-lr.png or NAME-lr-find.png, overwritten]")
@overwrite_option
@json_option
def command(
    config: Path,
    plugins: tuple[str, ...],
    settings: tuple[str, ...],
    finds: bool,
    steps: int | None,
    rates: tuple[float, float] | None,
    out: Path | None,
    overwrite: bool,
    as_json: bool,
    trust: bool,
) -> None:
    """Draw the learning rate of a training with CONFIG, or of the run directory RUN, from step 0 to the last step.

    The data is read only if CONFIG gives its length in epochs. For a RUN, a checkpoint gives the length of an epoch.

    With --find, train a copy of the model for one step at each of many growing rates, and draw the loss over the rate
    (the learning-rate range test, Smith 2015). The suggested rate is a tenth of the rate from which the loss rises. The
    copy is a new model of CONFIG, or the model of the newest checkpoint of RUN; RUN is not changed. All rates of the
    optimizer keep their ratios. The schedule is not used.
    """
    if not finds and (steps or rates):
        raise click.UsageError("--steps and --rates need --find: add it, or leave them out")
    if out is not None:
        check_free(out, overwrite)
    from hookdiff import UserError, load_config
    from hookdiff.authors import check_picture
    from hookdiff.experiment import num_steps, run_config
    from hookdiff_lr.find import growing
    from hookdiff_lr.plugin import LR

    low, high = rates or RATES
    if not low < high < math.inf:
        raise UserError(f"--rates: expected two rising numbers, got {low:g} {high:g}")
    run = config if config.is_dir() else None
    if run is None:
        checked = load_config(config, plugins, settings, trust=trust)
    else:
        without = () if finds else ("data", "model")
        checked = run_config(run, plugins, settings, trust=trust, without=without)
    out = out or Path(f"{checked.run.name}-lr{'-find' if finds else ''}.png")
    check_picture(out)
    plugin = checked.plugins["lr"].build() if "lr" in checked.plugins else LR("constant", warmup=0)
    if not isinstance(plugin, LR):
        kind = type(plugin).__name__
        raise UserError(f"plugins: `hookdiff lr` needs LR of hookdiff_lr as the plugin 'lr'; this config has a {kind}")
    if finds:
        _find(checked, run, plugin, growing(low, high, steps or STEPS), out, as_json)
    else:
        _draw(checked, num_steps(checked, run, trust=trust), plugin, out, as_json)


def _draw(config: Config, steps: int, plugin: LR, out: Path, as_json: bool) -> None:
    """Draw the rates of a run of `steps`, and print them at the events of the schedule."""
    from hookdiff.authors import draw_curves
    from hookdiff.experiment import try_optimizers
    from hookdiff_lr.plugin import distinct_groups

    curve, last = plugin.curve(steps), steps - 1  # a restart after the last step must not be drawn
    rates = {name: float(group["lr"]) for name, group in distinct_groups(try_optimizers(config)).items()}
    remarks = list(plugin.remarks(steps))

    def rate_at(name: str, step: int) -> float:
        return rates[name] * curve.factor(min(step, last))

    rows = [
        (event, step, {name: rate_at(name, step) for name in rates})
        for event, step in sorted(_events(curve, steps), key=lambda row: row[1])
    ]
    draw_curves({name: partial(rate_at, name) for name in rates}, max(1, last), out)
    use = curve.schedule.use
    if as_json:
        points = [{"what": event, "step": step, **values} for event, step, values in rows]
        about = {"run": config.run.name, "schedule": use, "steps": steps, "picture": str(out), "rates": rates}
        click.echo(json.dumps({**about, "points": points, "remarks": remarks}, indent=2))
        return
    warmup = f" after {curve.warmup:,} step{'s' * (curve.warmup != 1)} of warm-up" if curve.warmup else ""
    shape = f"{use}{warmup}" if "lr" in config.plugins else "constant, since the plugin lr is not switched on"
    click.echo(f"{config.run.name}: {shape}, {steps:,} steps")
    click.echo(f"  {'step':>9}  {'':<20}" + "".join(f"  {name:>12}" for name in rates))
    for event, step, values in rows:
        click.echo(f"  {step:>9,}  {event:<20}" + "".join(f"  {value:>12.4g}" for value in values.values()))
    for line in (*remarks, out):
        click.echo(f"  {line}")


def _find(config: Config, run: Path | None, plugin: LR, rates: list[float], out: Path, as_json: bool) -> None:
    """Make the range test, draw it, and print the rates at which the loss changes."""
    from hookdiff.authors import draw_charts
    from hookdiff_lr.find import find, trial_loop
    from hookdiff_lr.plugin import distinct_groups

    with tempfile.TemporaryDirectory() as folder, trial_loop(config, Path(folder), run) as loop:
        highest = {name: float(group["lr"]) for name, group in distinct_groups(loop.optimizers).items()}
        test = find(loop, rates, plugin.adopted)
    names = list(highest)
    draw_charts([_chart(test, names[0])], out)

    def of_all(rate: float) -> dict[str, float]:
        return {name: float(f"{rate * each / highest[names[0]]:.3g}") for name, each in highest.items()}

    suggested, remarks = test.suggested, list(test.remarks(rates))
    if as_json:
        marks = {"falls": test.falls, "lowest": test.lowest, "rises": test.rises, "diverged": test.has_diverged}
        lines = {"rates": test.rates, "losses": test.losses, "smooth": test.smooth}
        about = {"run": config.run.name, "picture": str(out), "suggested": suggested and of_all(suggested)}
        click.echo(json.dumps({**about, **marks, **lines, "remarks": remarks}, indent=2))
        return
    tried = f"{len(test.rates)} of {len(rates)} rates" if test.has_diverged else f"{len(rates)} rates"
    end = ", then the loss diverged" if test.has_diverged else ""
    click.echo(f"{config.run.name}: {tried}, from {rates[0]:.3g} to {test.rates[-1]:.3g}{end}")
    click.echo("".join(f"  {name:>12}" for name in names) + f"  {'loss':>9}")
    events = (("falls from here on", test.falls), ("is lowest", test.lowest), ("rises from here on", test.rises))
    for event, rate in events:
        if rate is not None:
            columns = "".join(f"  {value:>12.3g}" for value in of_all(rate).values())
            click.echo(f"{columns}  {test.loss_at(rate):>9.3g}  the loss {event}")
    if suggested is not None:
        settings = ", ".join(f"{name} = {value:g}" for name, value in of_all(suggested).items())
        click.echo(f"suggested: {settings}")
        click.echo("  a tenth of the rate from which the loss rises, since a rate must hold for a whole run")
    for line in (*remarks, out):
        click.echo(f"  {line}")


def _chart(test: RangeTest, name: str) -> Chart:
    """Return the chart of the losses of `test` over its rates; the rate is called `name`."""
    from hookdiff.authors import Chart

    marks = {"suggested": test.suggested, "the loss rises": test.rises}
    shown = {f"{text}: {rate:.2g}": rate for text, rate in marks.items() if rate and test.rates[0] <= rate}
    return Chart(
        title="loss after a step at each rate",
        x_label=name,
        curve=list(zip(test.rates, test.smooth, strict=True)),
        name="running median",
        dots=list(zip(test.rates, test.losses, strict=True)),
        dots_name="loss",
        marks=shown,
        highest=test.limit,
        log_x=True,
        log_y=min(test.losses) > 0,
        height=600,
    )


def _events(curve: RateCurve, steps: int) -> Iterator[tuple[str, int]]:
    """Yield the events of the table, each with its step."""
    yield "start", 0
    yield from ((event, step) for event, step in curve.landmarks() if step < steps)
    for quarter, share in enumerate(("a quarter", "half", "three quarters"), 1):
        yield share, steps * quarter // 4
    yield "last step", steps - 1
