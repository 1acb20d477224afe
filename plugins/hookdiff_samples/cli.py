"""`hookdiff sample`: make images from a trained run."""

from __future__ import annotations

from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hookdiff import UserError
from hookdiff.cli.options import trust_option

if TYPE_CHECKING:
    from torch import Tensor

_SHARE = click.FloatRange(0, 1, min_open=True)


@click.command()
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN|CHECKPOINT")
@click.option("--num", default=64, type=click.IntRange(1), metavar="N", help="Number of images.")
@click.option("--steps", type=int, metavar="N", help="Steps of the sampler.")
@click.option("--sampler", metavar="NAME", help="ddim, ddpm, euler, heun or dpmpp_2m.")
@click.option("--guidance-scale", type=float, metavar="X", help="Scale of classifier-free guidance.")
@click.option("--labels", metavar="N,N,...", help="Classes, used in turn; -1 is no class.  [default: all classes]")
@click.option("--image", type=click.Path(path_type=Path), help="Picture to add noise to and start from.")
@click.option("--strength", default=0.8, type=_SHARE, metavar="X", help="With --image: share of the steps to run.")
@click.option("--columns", type=click.IntRange(1), metavar="N", help="Columns of the grid.  [default: square]")
@click.option("--seed", default=0, metavar="N", help="Seed of the noise.")
@click.option("--weights", metavar="NAME|FILE", help="An average, model, or a safetensors file.  [default: average]")
@click.option("--out", type=click.Path(path_type=Path), help="PNG file.  [default: RUN/samples/seed-SEED.png]")
@trust_option
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
    trust: bool,
) -> None:
    """Make images from RUN, a run directory, or from one CHECKPOINT in it.

    RUN stands for its newest checkpoint. All images are written as one grid. --steps, --sampler and --guidance-scale
    replace the values of the config. With --image, a higher --strength leaves less of the picture.
    """
    from hookdiff import SampleRequest, UnknownWeights, build_loop, load_config
    from hookdiff.disk import CONFIG, check_writable, run_of, save_grid, writing
    from hookdiff.experiment import try_config
    from hookdiff.models import load_into

    source = run_of(run)
    changed = {"steps": steps, "sampler": sampler, "guidance.scale": guidance_scale}
    settings = [f"sampling.{key}={value}" for key, value in changed.items() if value is not None]
    try:
        classes = tuple(islice(cycle(map(int, labels.split(","))), num)) if labels else None
    except ValueError:
        raise UserError(f"--labels {labels}: expected integers separated by commas, such as 0,1,2") from None
    file = Path(weights) if weights and weights.endswith(".safetensors") else None
    config = load_config(source / CONFIG, settings=settings, trust=trust)
    try_config(config, resume=True)
    hooks = ("prepare_model", "restore", "sample", "offer_weights")
    loop = build_loop(config, source, resume=run, hooks=hooks)
    out = out or source / "samples" / f"seed-{seed}.png"
    check_writable(out)
    with loop:
        start = None if image is None else _picture(image, loop.feed.shape).expand(num, *loop.feed.shape)
        if file:
            load_into(loop.model, file, asked_by="--weights")
            weights = "model"
        request = SampleRequest(num, seed, weights=weights, labels=classes, images=start, strength=strength)
        try:
            made = loop.sample(request)
        except UnknownWeights as error:
            raise UserError(f"--weights: {error}, or a file that ends in .safetensors") from None
        with writing(out):
            save_grid(made.images, out, columns)
    origin = f"weights in {file}" if file else f"{made.weights} weights of step {loop.progress.step}"
    click.echo(f"{out}: {num} images from the {origin}")


def _picture(path: Path, shape: tuple[int, ...]) -> Tensor:
    """Return the picture at `path` as an input of the model: c h w in [-1, 1]."""
    from PIL import Image

    from hookdiff.data import Transforms, to_unit_range
    from hookdiff.data.source import reason

    channels, *sides = shape
    if channels not in (1, 3) or len(set(sides)) != 1:
        made = " x ".join(map(str, shape))
        raise UserError(f"--image {path}: needs a model of square grey or RGB images; this one makes {made}")
    transforms = Transforms(image_size=sides[0], channels=1 if channels == 1 else 3, upscale=True)
    try:
        with Image.open(path) as picture:
            return to_unit_range(transforms.fit(picture))
    except Exception as error:  # decoders raise errors of any type
        raise UserError(f"{path}: cannot be read as a picture: {reason(error)}") from None
