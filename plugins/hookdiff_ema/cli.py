"""`hookdiff ema`: make an average of another length from the snapshots of a run."""

from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--std", required=True, type=float, help="Width of the average, as a share of the training time.")
@click.option("--step", type=click.IntRange(1), help="Last step of the average, by default that of the last snapshot.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="File to write, by default RUN/ema-step-STEP-std=STD.safetensors."
)
def command(run: Path, std: float, step: int | None, out: Path | None) -> None:
    """Make an average of the weights of RUN, a run directory, from the snapshots that the plugin ema wrote there."""
    from hookdiff import UserError
    from hookdiff.disk import new_file, write_tensors, writing
    from hookdiff_ema.profiles import MAX_STD
    from hookdiff_ema.snapshots import find_snapshots, plan, reconstruct

    if not 0 < std <= MAX_STD:
        raise UserError(f"--std {std:g}: expected a width above 0 and at most {MAX_STD:.4f}")
    planned = plan(find_snapshots(run), std, step)
    out = out or run / f"ema-step-{planned.step:08d}-std={std}.safetensors"
    with writing(out), new_file(out) as path:
        write_tensors(path, reconstruct(planned))
    count = f"{len(planned.parts)} snapshot" + ("s" if len(planned.parts) > 1 else "")
    click.echo(f"{out}: std {std:g} at step {planned.step}, of {count}; profile error {planned.error:.2g}")
