"""`hookdiff lr`: draw the learning rate of a config."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hookdiff.cli import override_options

if TYPE_CHECKING:
    from hookdiff import Config
    from hookdiff_lr.plugin import RateCurve


@click.command()
@click.argument("config", type=click.Path(path_type=Path), metavar="CONFIG|RUN")
@override_options
@click.option("--out", type=click.Path(path_type=Path), help="Picture to write, by default NAME-lr.png.")
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON.")
def command(
    config: Path, plugins: tuple[str, ...], settings: tuple[str, ...], out: Path | None, as_json: bool, trust: bool
) -> None:
    """Draw the learning rate of a training with CONFIG, or of the run directory RUN, from step 0 to the last step.

    The data is read only for a CONFIG with its length in epochs. Of a RUN, a checkpoint has the length of an epoch.
    """
    from hookdiff import UserError, load_config
    from hookdiff.experiment import run_config, try_optimizers
    from hookdiff_lr.chart import draw
    from hookdiff_lr.plugin import LR, distinct_groups

    is_run = config.is_dir()
    if is_run:
        checked = run_config(config, plugins, settings, trust=trust, without=("data", "model"))
    else:
        checked = load_config(config, plugins, settings, trust=trust)
    plugin = checked.plugins["lr"].build() if "lr" in checked.plugins else LR("constant", warmup=0)
    if not isinstance(plugin, LR):
        raise UserError(f"the plugin 'lr' of this config is a {type(plugin).__name__}; only LR of hookdiff_lr is drawn")
    steps = _steps(checked, config if is_run else None, trust)
    curve, last = plugin.curve(steps), steps - 1  # a restart after the last step must not be drawn
    rates = {name: float(group["lr"]) for name, group in distinct_groups(try_optimizers(checked)).items()}
    remarks = list(plugin.remarks(steps))
    rows = [
        (event, step, {name: rate * curve.factor(step) for name, rate in rates.items()})
        for event, step in sorted(_events(curve, steps), key=lambda row: row[1])
    ]
    out = out or Path(f"{checked.run.name}-lr.png")
    try:
        draw(lambda step: curve.factor(min(step, last)), rates, max(1, last), out)
    except (OSError, ValueError) as error:  # ValueError: the name ends in no known format
        raise UserError(f"{out}: cannot be written: {error}") from None
    use = curve.schedule.use
    if as_json:
        points = [{"what": event, "step": step, **values} for event, step, values in rows]
        about = {"run": checked.run.name, "schedule": use, "steps": steps, "picture": str(out), "rates": rates}
        click.echo(json.dumps({**about, "points": points, "remarks": remarks}, indent=2))
        return
    warmup = f" after {curve.warmup} step{'s' * (curve.warmup != 1)} of warm-up" if curve.warmup else ""
    shape = f"{use}{warmup}" if "lr" in checked.plugins else "constant, since the plugin lr is not switched on"
    click.echo(f"{checked.run.name}: {shape}, {steps} steps")
    click.echo(f"  {'step':>9}  {'':<20}" + "".join(f"  {name:>12}" for name in rates))
    for event, step, values in rows:
        click.echo(f"  {step:>9}  {event:<20}" + "".join(f"  {value:>12.4g}" for value in values.values()))
    for line in (*remarks, out):
        click.echo(f"  {line}")


def _steps(config: Config, run: Path | None, trust: bool) -> int:
    """Return the number of updates; if it is given in epochs, the checkpoint of the `run` or the data has the rest."""
    from hookdiff import build_loop, load_run

    if config.run.steps is not None:
        return config.run.steps
    assert config.run.epochs is not None
    if run is not None:
        with load_run(run, device="cpu", trust=trust) as opened:
            return config.run.epochs * opened.loop.feed.num_batches
    with tempfile.TemporaryDirectory() as folder:
        return config.run.epochs * build_loop(config, Path(folder), hooks=()).feed.num_batches


def _events(curve: RateCurve, steps: int) -> Iterator[tuple[str, int]]:
    """Yield the events of the table, each with its step."""
    yield "start", 0
    yield from ((event, step) for event, step in curve.landmarks() if step < steps)
    for quarter, share in enumerate(("a quarter", "half", "three quarters"), 1):
        yield share, steps * quarter // 4
    yield "last step", steps - 1
