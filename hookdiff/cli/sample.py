"""`hookdiff sample`: images from a trained run."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--num", default=64, show_default=True, type=click.IntRange(1), help="How many images.")
@click.option("--steps", type=int, help="Steps of the sampler; the run's unless given.")
@click.option("--sampler", help="ddim or ddpm; the run's unless given.")
@click.option("--seed", default=0, show_default=True, help="Image k of a seed is always the same.")
@click.option("--weights", help="An average's name, or model; an average if there is one.")
@click.option("--out", type=click.Path(path_type=Path), help="A .png; RUN/samples/seed-SEED.png unless given.")
def command(
    run: Path, num: int, steps: int | None, sampler: str | None, seed: int, weights: str | None, out: Path | None
) -> None:
    """Make images from the newest checkpoint of RUN, a run directory."""
    from hookdiff import experiment
    from hookdiff.config import load
    from hookdiff.errors import UserError
    from hookdiff.images import save_grid
    from hookdiff.run_dir import CONFIG
    from hookdiff.sampling import SampleRequest

    if not (run / CONFIG).is_file():
        raise UserError(f"{run} is no run directory: it has no {CONFIG}")
    settings = [
        f"sampling.{key}={value}" for key, value in (("steps", steps), ("sampler", sampler)) if value is not None
    ]
    config = load(run / CONFIG, settings=settings)
    experiment.probe(config)
    loop = experiment.build(config, run, resume=True, hooks=("prepare_model", "restore", "sample"))
    out = out or run / "samples" / f"seed-{seed}.png"
    with loop:
        if loop.progress.step == 0:
            raise UserError(f"{run} has no checkpoint to sample from")
        made = loop.sample(SampleRequest(num, seed, weights=weights))
        try:
            save_grid(made.images, out)
        except OSError as error:
            raise UserError(f"{out}: cannot be written: {error.strerror or error}") from None
    click.echo(f"{out}: {num} images from the {made.weights} weights of step {loop.progress.step}")
