"""`hookdiff ema`: make an average of any length from the snapshots of a run."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--std", required=True, type=float, help="Width of the average, relative to the training time.")
@click.option("--step", type=click.IntRange(1), help="The step that it ends at; the newest snapshot's unless given.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="A safetensors file; RUN/ema-step-STEP-std=STD.safetensors unless given.",
)
def command(run: Path, std: float, step: int | None, out: Path | None) -> None:
    """Make an average of the weights of RUN, a run directory, from the snapshots that the plugin ema left there."""
    from hookdiff import UserError
    from hookdiff.disk import new_file, write_tensors
    from hookdiff_ema.profiles import MAX_STD
    from hookdiff_ema.snapshots import find_snapshots, recipe, reconstruct

    if not 0 < std <= MAX_STD:
        raise UserError(
            f"--std {std:g}: expected a width above 0 and at most {MAX_STD:.4f}, where all steps count alike"
        )
    made = recipe(find_snapshots(run), std, step)
    out = out or run / f"ema-step-{made.step:08d}-std={std}.safetensors"
    try:
        with new_file(out) as path:
            write_tensors(path, reconstruct(made))
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error.strerror or error}") from None
    count = f"{len(made.parts)} snapshot" + ("s" if len(made.parts) > 1 else "")
    click.echo(f"{out}: std {std:g} at step {made.step}, of {count}; profile error {made.error:.2g}")
