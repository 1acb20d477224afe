"""`hookdiff sample`: images from a trained run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from torch import Tensor


@click.command()
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN|CHECKPOINT")
@click.option("--num", default=64, show_default=True, type=click.IntRange(1), help="How many images.")
@click.option("--steps", type=int, help="Steps of the sampler; the run's unless given.")
@click.option("--sampler", help="ddim, ddpm, euler, heun or dpmpp_2m; the run's unless given.")
@click.option("--guidance-scale", type=float, help="Of classifier-free guidance; the run's unless given.")
@click.option("--labels", metavar="N,N,...", help="Classes to take in turn, -1 is none; all in turn unless given.")
@click.option("--image", type=click.Path(path_type=Path), help="A picture to start from, in place of noise.")
@click.option(
    "--strength",
    default=0.8,
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True),
    help="With --image: share of the steps, 1 leaves little of the picture.",
)
@click.option("--columns", type=click.IntRange(1), help="Of the grid; the nearest to a square unless given.")
@click.option("--seed", default=0, show_default=True, help="Image k of a seed is always the same.")
@click.option("--weights", help="An average's name, model, or a safetensors file; an average if there is one.")
@click.option("--out", type=click.Path(path_type=Path), help="A .png; RUN/samples/seed-SEED.png unless given.")
def command(
    run: Path,
    num: int,
    steps: int | None,
    sampler: str | None,
    guidance_scale: float | None,
    labels: str | None,
    image: Path | None,
    strength: float,
    columns: int | None,
    seed: int,
    weights: str | None,
    out: Path | None,
) -> None:
    """Make images from the newest checkpoint of RUN, a run directory, or from one CHECKPOINT in it."""
    from hookdiff import experiment
    from hookdiff.disk.images import check_writable, save_grid
    from hookdiff.disk.paths import CONFIG, run_of
    from hookdiff.errors import UserError
    from hookdiff.experiment.config import load_config
    from hookdiff.models.load import load_into
    from hookdiff.sampling import SampleRequest, UnknownWeights

    source = run_of(run)
    changed = {"steps": steps, "sampler": sampler, "guidance.scale": guidance_scale}
    settings = [f"sampling.{key}={value}" for key, value in changed.items() if value is not None]
    classes = _in_turn(labels, num) if labels else None
    from_file = weights if weights and weights.endswith(".safetensors") else None
    config = load_config(source / CONFIG, settings=settings)
    experiment.try_config(config, resume=True)
    hooks = ("prepare_model", "restore", "sample", "offer_weights")
    loop = experiment.build_loop(config, source, resume=run, hooks=hooks)
    out = out or source / "samples" / f"seed-{seed}.png"
    check_writable(out)
    with loop:
        start = None if image is None else _picture(image, loop.feed.shape).expand(num, *loop.feed.shape)
        if from_file:
            load_into(loop.model, Path(from_file), asked_by="--weights")
        named = "model" if from_file else weights
        request = SampleRequest(num, seed, weights=named, labels=classes, images=start, strength=strength)
        try:
            made = loop.sample(request)
        except UnknownWeights as error:
            raise UserError(f"--weights: {error}, or a file that ends in .safetensors") from None
        try:
            save_grid(made.images, out, columns)
        except OSError as error:
            raise UserError(f"{out}: cannot be written: {error.strerror or error}") from None
    whose = f"weights in {from_file}" if from_file else f"{made.weights} weights of step {loop.progress.step}"
    click.echo(f"{out}: {num} images from the {whose}")


def _in_turn(labels: str, num: int) -> tuple[int, ...]:
    from hookdiff.errors import UserError

    try:
        given = [int(label) for label in labels.split(",")]
    except ValueError:
        raise UserError(f"--labels {labels}: expected whole numbers with commas between, such as 0,1,2") from None
    return tuple(given[k % len(given)] for k in range(num))


def _picture(path: Path, shape: tuple[int, ...]) -> Tensor:
    """Return the picture at `path` as training would see it, c h w in [-1, 1]."""
    from PIL import Image

    from hookdiff.data.memory import to_unit_range
    from hookdiff.data.source import reason
    from hookdiff.data.transforms import Transforms
    from hookdiff.errors import UserError

    channels, *sides = shape
    if channels not in (1, 3) or len(set(sides)) != 1:
        raise UserError(f"--image {path}: the run makes {' x '.join(map(str, shape))}, not grey or RGB squares")
    transforms = Transforms(image_size=sides[0], channels=1 if channels == 1 else 3, upscale=True)
    try:
        with Image.open(path) as picture:
            return to_unit_range(transforms.fit(picture))
    except Exception as error:  # decoders raise whatever the bytes lead them to
        raise UserError(f"{path}: cannot be read as a picture: {reason(error)}") from None
