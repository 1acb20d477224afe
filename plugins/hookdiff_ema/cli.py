"""`hookdiff ema`: make an average of another length from the snapshots of a run, or draw the averages of a config."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hookdiff import UserError
from hookdiff.cli import check_exists, check_output, out_option, override_options, overwrite_option, path_argument

if TYPE_CHECKING:
    from hookdiff_ema.profiles import Floats


@click.command()
@path_argument("path", check_exists, "RUN|CONFIG")
@click.option("--std", type=float, metavar="X", help="Width of the average to make, as a share of the training time.")
@click.option("--draw", is_flag=True, help="Draw the weight of each past step in the averages of a CONFIG or RUN.")
@click.option(
    "--step",
    type=click.IntRange(1),
    metavar="N",
    help="Last step of the average.  [default: the last snapshot's; with --draw: last step of the training]",
)
@out_option("File to write.  [default: RUN/ema-step-STEP-std=STD.safetensors; with --draw: NAME-ema.png]")
@overwrite_option
@override_options
def command(
    path: Path,
    std: float | None,
    draw: bool,
    step: int | None,
    out: Path | None,
    overwrite: bool,
    plugins: tuple[str, ...],
    settings: tuple[str, ...],
    trust: bool,
) -> None:
    """Make an average of the weights of RUN, a run directory, from the snapshots that the plugin ema wrote there.

    With --draw, draw instead how much the weights of each past step count in the averages of a CONFIG, or of a RUN.
    Then --plugins, --set and --trust apply to its config.
    """
    if draw and std is not None:
        raise UserError(f"--std {std:g} cannot be used with --draw: use --set plugins.ema.std={std:g} instead")
    if out is not None:
        check_output(out, overwrite)
    if draw:
        _draw(path, step, out, plugins, settings, trust)
        return
    if plugins or settings or trust:
        raise UserError("--plugins, --set and --trust are only for --draw: leave them out, or add --draw")
    if std is None:
        raise UserError("--std is missing: give the width of the average to make, or --draw to draw averages")
    _make(path, std, step, out)


def _make(run: Path, std: float, step: int | None, out: Path | None) -> None:
    from hookdiff.disk import confine, new_file, write_tensors, writing
    from hookdiff_ema.profiles import MAX_STD
    from hookdiff_ema.snapshots import find_snapshots, plan, reconstruct

    if not 0 < std <= MAX_STD:
        raise UserError(f"--std {std:g}: expected a width above 0 and at most {MAX_STD:.4f}")
    confine(run)
    planned = plan(find_snapshots(run), std, step)
    out = out or run / f"ema-step-{planned.step:08d}-std={std}.safetensors"
    with writing(out), new_file(out) as path:
        write_tensors(path, reconstruct(planned))
    count = f"{len(planned.parts)} snapshot" + ("s" if len(planned.parts) > 1 else "")
    click.echo(f"{out}: std {std:g} at step {planned.step:,}, of {count}; profile error {planned.error:.2g}")


def _draw(
    path: Path, step: int | None, out: Path | None, plugins: tuple[str, ...], settings: tuple[str, ...], trust: bool
) -> None:
    from hookdiff import UserError, load_config
    from hookdiff.authors import check_picture, draw_curves
    from hookdiff.experiment import num_steps, run_config
    from hookdiff_ema.plugin import EMA
    from hookdiff_ema.profiles import newest, step_weights

    run = path if path.is_dir() else None
    if run:
        config = run_config(run, plugins, settings, trust=trust, without=("data", "model"))
    else:
        config = load_config(path, plugins, settings, trust=trust)
    plugin = config.plugins["ema"].build() if "ema" in config.plugins else None
    if not isinstance(plugin, EMA):
        other = "is another plugin than hookdiff_ema" if plugin else "is not switched on: --plugins ema"
        raise UserError(f"{path}: the plugin 'ema' {other}")
    out = out or Path(f"{config.run.name}-ema.png")
    check_picture(out)
    steps = step or num_steps(config, run, trust=trust)
    profiles = {average.label: step_weights(average.decay, steps) for average in plugin.averages}
    # The share of the initial weights may be so large that no step would be visible beside it.
    curves = {
        f"{label}: weight of each step in the average at step {steps:,}, and {weights[0]:.1%} of the initial weights": (
            partial(_weight, weights)
        )
        for label, weights in profiles.items()
    }
    draw_curves(curves, steps, out)
    click.echo(f"{config.run.name}: the averages at step {steps:,}")
    width = max(map(len, profiles))
    for label, weights in profiles.items():
        counts = {"half of it is of": newest(weights, 0.5), "90% of": newest(weights, 0.9)}
        shares = [
            f"{name} " + (f"the last {count:,} steps" if count <= steps else "all steps and the initial weights")
            for name, count in counts.items()
        ]
        click.echo(f"  {label:<{width}}  {', '.join(shares)}; initial weights {weights[0]:.1%}")
    click.echo(f"  {out}")


def _weight(weights: "Floats", step: int) -> float:
    return float(weights[max(1, step)])
