"""`hookdiff sample`: make images from a trained run."""

from pathlib import Path
from typing import Any

import click

from hookdiff import UserError
from hookdiff.cli import trust_option

_SHARE = click.FloatRange(0, 1, min_open=True)


@click.command()
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN|CHECKPOINT")
@click.option("--num", type=click.IntRange(1), metavar="N", help="Number of images.  [default: 64, or one per picture]")
@click.option("--steps", type=int, metavar="N", help="Steps of the sampler.")
@click.option("--sampler", metavar="NAME", help="ddim, ddpm, euler, heun or dpmpp_2m.")
@click.option("--precision", type=click.Choice(["float32", "bf16"]), help="Precision of the network.")
@click.option("--compile/--no-compile", default=None, help="Compile the network first: pays for many images.")
@click.option("--guidance-scale", type=float, metavar="X", help="Scale of classifier-free guidance.")
@click.option("--labels", metavar="A,B,...", help="Classes by name or number, in turn; -1: none.  [default: all]")
@click.option(
    "--images",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE|DIR",
    help="Picture to start from, or a folder of them, in turn; may be repeated.",
)
@click.option("--mask", type=click.Path(path_type=Path), help="With --images: picture that is white where to paint.")
@click.option(
    "--strength", type=_SHARE, metavar="X", help="With --images: share of steps.  [default: 0.8, 1 for masks]"
)
@click.option("--columns", type=click.IntRange(1), metavar="N", help="Columns of the grid.  [default: nearly square]")
@click.option("--seed", default=0, metavar="N", help="Seed of the noise.")
@click.option("--weights", metavar="NAME|FILE", help="An average, model, or a safetensors file.  [default: average]")
@click.option("--batch-size", type=click.IntRange(1), metavar="N", help="Images at a time.  [default: as many as fit]")
@click.option("--device", metavar="NAME", help="cpu, cuda, cuda:1 or mps.  [default: that of the run, if it is here]")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="PNG file of a grid, or NPZ file.  [default: RUN/samples/seed-SEED.png]",
)
@click.option("--each", type=click.Path(path_type=Path), metavar="DIR", help="Write each image to a PNG file in DIR.")
@click.option("--overwrite", is_flag=True, help="Replace pictures that exist.")
@trust_option
def command(
    run: Path,
    num: int | None,
    labels: str | None,
    images: tuple[Path, ...],
    mask: Path | None,
    columns: int | None,
    seed: int,
    weights: str | None,
    batch_size: int | None,
    device: str | None,
    out: Path | None,
    each: Path | None,
    overwrite: bool,
    trust: bool,
    **options: Any,
) -> None:
    """Make images from RUN, a run directory, or from one CHECKPOINT in it. The data of the run is not needed.

    RUN stands for its newest checkpoint. The images are written as one grid, unless --each or --out says otherwise. An
    NPZ file has them as arr_0 (uint8, n h w c), and their class numbers as arr_1 if the run has classes, as the
    evaluators of the field read them. --steps, --sampler, --precision, --compile and --guidance-scale replace the
    values of the config. With --images, a higher --strength leaves less of the picture; with --mask, the black part
    stays as it is.
    """
    from hookdiff import UnknownWeights, load_run
    from hookdiff.log import to_uint8
    from hookdiff.run_dir import run_of
    from hookdiff.terminal import paced
    from hookdiff_samples.chain import about
    from hookdiff_samples.pictures import Output, free_name, picture_files, read_mask, read_pictures

    if mask is not None and not images:
        raise UserError("--mask needs --images, the pictures to paint in")
    words = None if labels is None else [label.strip() for label in labels.split(",")]
    files = picture_files(images)
    num = num or len(files) or 64
    usual = None if each else free_name(run_of(run) / "samples", seed, overwrite)
    output = Output(out or usual, each, num, overwrite)
    output.check()
    settings = [f"sampling.batch_size={batch_size}"] if batch_size else []
    with load_run(run, settings, device=device, trust=trust) as opened:
        shape = opened.loop.feed.shape
        output.check_shape(shape)
        numbers = opened.labels(words, num)
        options["images"] = read_pictures(files, shape) if files else None
        options["mask"] = None if mask is None else read_mask(mask, shape)
        options["strength"] = options["strength"] or (0.8 if mask is None else 1.0)
        try:
            with opened.weights(weights) as name:
                for part in paced(opened.batches(num, labels=numbers, seed=seed, **options), num, "images"):
                    output.add(to_uint8(part))
                    info = about(opened.loop, opened.in_loop(name))  # while the loop has the sampler that is used
        except UnknownWeights as error:
            raise UserError(f"--weights: {error}, or a file that ends in .safetensors") from None
        info |= {"step": opened.step, "weights": name, "seed": seed}
        if files:
            info |= {"images": [file.name for file in files[:num]], "strength": options["strength"]}
        if mask:
            info["mask"] = mask.name
        paths = output.finish(numbers, opened.classes, columns, info)
        origin = f"weights in {name}" if name.endswith(".safetensors") else f"{name} weights of step {opened.step}"
    images_of = "1 image" if num == 1 else f"{num:,} images"
    click.echo(f"{', '.join(map(str, paths))}: {images_of} from the {origin}")
    if older := output.num_older():
        click.echo(f"  {each} still has {older:,} of an earlier call, from {num:06d}.png on")
