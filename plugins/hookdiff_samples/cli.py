"""`hookdiff sample`: make images from a trained run."""

from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import click

from hookdiff import UserError
from hookdiff.cli import (
    device_option,
    guidance_option,
    out_option,
    overwrite_option,
    run_argument,
    seed_option,
    settings_option,
    solver_options,
    trust_option,
    weights_option,
)

_SHARE = click.FloatRange(0, 1, min_open=True)


@click.command()
@run_argument("RUN|CHECKPOINT")
@click.option(
    "--num", type=click.IntRange(1), metavar="N", help="Number of images, or of strips.  [default: 64, 4 strips]"
)
@click.option(
    "--size", metavar="WIDTHxHEIGHT", help="Size of the images.  [default: the most frequent one of the data]"
)
@click.option("--interpolate", type=click.IntRange(2), metavar="N", help="Make strips of N interpolated images.")
@solver_options
@click.option("--precision", type=click.Choice(["float32", "bf16"]), help="Precision of the network.")
@click.option("--compile/--no-compile", default=None, help="Compile the network first: worth it for many images.")
@guidance_option
@click.option("--labels", metavar="A,B,...", help="Classes by name or number, in turn; -1: none.  [default: all]")
@click.option("--prompt", "prompt", multiple=True, metavar="TEXT", help="Prompt; may be repeated, used in turn.")
@click.option("--prompts", type=click.Path(path_type=Path), metavar="FILE", help="File with a prompt in each line.")
@click.option("--negative", metavar="TEXT", help="Negative prompt of guidance.  [default: no text]")
@click.option(
    "--images",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE|DIR",
    help="Picture to start from, or a folder of pictures, used in turn; may be repeated.",
)
@click.option(
    "--mask",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With --images: mask, white where new content is drawn.",
)
@click.option(
    "--strength", type=_SHARE, metavar="X", help="With --images: share of the steps.  [default: 0.8, 1 for masks]"
)
@click.option("--columns", type=click.IntRange(1), metavar="N", help="Columns of the grid.  [default: nearly square]")
@seed_option
@weights_option
@click.option("--batch-size", type=click.IntRange(1), metavar="N", help="Images at a time.  [default: as many as fit]")
@device_option
@settings_option
@out_option("PNG file of a grid, or NPZ file.  [default: a new file, RUN/samples/seed-SEED.png]")
@click.option("--each", type=click.Path(path_type=Path), metavar="DIR", help="Write each image to a PNG file in DIR.")
@overwrite_option
@trust_option
def command(
    run: Path,
    num: int | None,
    size: str | None,
    interpolate: int | None,
    labels: str | None,
    prompt: tuple[str, ...],
    prompts: Path | None,
    negative: str | None,
    images: tuple[Path, ...],
    mask: Path | None,
    strength: float | None,
    columns: int | None,
    seed: int,
    weights: str | None,
    batch_size: int | None,
    device: str | None,
    settings: tuple[str, ...],
    out: Path | None,
    each: Path | None,
    overwrite: bool,
    trust: bool,
    **sampling: Any,
) -> None:
    """Make images from RUN, a run directory, or from one CHECKPOINT in it. The data of the run is not needed.

    RUN stands for its newest checkpoint. The images are written as one grid, unless --each or --out says otherwise. An
    NPZ file has the images as arr_0 (uint8, n h w c) and, if the run has classes, the class numbers as arr_1. The
    evaluators of the field read this form. --steps, --sampler, --precision, --compile and --guidance-scale replace the
    values of the config, and --set any other value, such as `data.encode.image.path` of an autoencoder that has moved.
    --size 80x48 may be any size that the network takes; a warning names the nearest sizes on which it was trained.
    With --images, a higher --strength keeps less of the picture, and each picture is resized and cropped to --size, or
    to the nearest size on which the network was trained. --mask is a picture of the same size; where the mask is black
    or transparent, the picture stays unchanged. --prompt and --prompts are for a network that was trained on
    captions: the grid has a row for each text, and --each writes the text beside the picture.

    --interpolate makes strips of images. The noise of a strip goes from one random noise to another along the sphere.
    With two --labels or two --prompt, a strip has one noise and goes from one class or text to the other. Strips are
    written as a PNG and a GIF file. The default sampler for strips is ddim, which adds no noise.
    """
    from hookdiff import load_run
    from hookdiff.cli import chosen_weights
    from hookdiff.data import size_of
    from hookdiff.diffusion import Sampling
    from hookdiff.log import to_uint8
    from hookdiff.run_dir import run_of
    from hookdiff.terminal import paced
    from hookdiff_samples.between import between, between_classes, between_noises, between_prompts
    from hookdiff_samples.images import Numbered, by_size, images_from, numbered
    from hookdiff_samples.pictures import Output, class_name, free_name, picture_files, read_mask, read_pictures
    from hookdiff_samples.prompts import read_prompts

    if size is not None:
        try:
            size_of(size)
        except ValueError as error:
            raise UserError(f"--size: {error}") from None
    if mask is not None and not images:
        raise UserError("--mask needs --images: name the pictures to paint in")
    if interpolate and (images or columns):
        raise UserError(f"--interpolate excludes {'--images' if images else '--columns'}; leave one of them out")
    words = None if labels is None else [label.strip() for label in labels.split(",")]
    texts = [*prompt, *(read_prompts(prompts) if prompts else ())]
    for option, values in (("--labels", words), ("--prompt", texts)):
        if interpolate and values and len(values) > 2:
            raise UserError(f"--interpolate: give one {option} to go between noises, or two to go between these")
    files = picture_files(images)
    num = (num or 4) * interpolate if interpolate else num or len(files) or len(texts) or 64
    stem = f"{'interpolation-' if interpolate else ''}seed-{seed}"
    usual = None if each else free_name(run_of(run) / "samples", stem, overwrite)
    output = Output(out or usual, each, num, overwrite, interpolate or 0)
    output.check()
    changes = [*settings, *([f"sampling.batch_size={batch_size}"] if batch_size else [])]
    with load_run(run, changes, device=device, trust=trust) as opened:
        output.check_shape(opened.loop.feed.picture_shape)
        wanted = opened.height_and_width(size)
        pictures = read_pictures(files, opened, wanted) if files else []
        sizes = list(by_size(pictures, num)) if pictures else []
        output.check_sizes(sizes)
        region = None if mask is None else read_mask(mask, files, sizes[0])
        strength = strength or opened.usual_strength(region)
        rows = num // (interpolate or 1)
        numbers = opened.labels(words, rows)
        asked: dict[str, Any] = {"prompts": texts or None, "negative": negative}
        placed: dict[str, Any] = {**asked, "size": size}
        ends = (opened.labels(words, 2) or ()) if interpolate and words and len(words) == 2 else ()
        opposite = texts if interpolate and len(texts) == 2 else []
        if ends and opposite:
            raise UserError("--interpolate: give two --labels or two --prompt, not both")
        if interpolate and isinstance(opened.loop.sampler, Sampling):
            sampling["sampler"] = sampling["sampler"] or "ddim"  # new noise in each step would hide the change
        with chosen_weights(opened, weights) as name, opened.sampling(**sampling):
            info = opened.info(name, seed)
            if files:
                info |= {"images": [file.name for file in files[:num]], "strength": strength}
            if mask:
                info["mask"] = mask.name
            info |= {key: value for key, value in placed.items() if value}
            if interpolate:
                info["interpolate"] = interpolate
            parts: Iterator[Numbered]
            if ends or opposite:
                other = between_classes(opened, ends) if ends else between_prompts(opened, opposite)
                first = {**placed, **({"labels": ends[:1]} if ends else {"labels": numbers, "prompts": opposite[:1]})}
                parts, numbers = numbered(between(opened, other, first, seed, rows, interpolate or 0)), None
            elif interpolate:
                parts = numbered(between_noises(opened, numbers, placed, seed, rows, interpolate))
                numbers = numbers and tuple(label for label in numbers for _ in range(interpolate))
            elif pictures:
                starts: dict[str, Any] = {"mask": region, "strength": strength, **asked}
                parts = images_from(opened, pictures, num, labels=numbers, seed=seed, **starts)
            else:
                batches = opened.batches(num, labels=numbers, seed=seed, **placed)
                parts = numbered(paced(batches, num, "images"))
            classes = [class_name(label, opened.classes) for label in numbers or ()]
            if texts and not opposite:
                output.texts = [text for text in islice(cycle(texts), rows) for _ in range(interpolate or 1)]
            for own, part in parts:
                output.add(own, to_uint8(part), info, classes)
        named = [class_name(label, opened.classes) for label in ends] or opposite
        paths = output.finish(numbers, opened.classes, columns, info, named)
        origin = opened.origin(name)
    images_of = "1 image" if num == 1 else f"{num:,} images"
    click.echo(f"{', '.join(map(str, paths))}: {images_of} from the {origin}")
    if older := output.older():
        click.echo(f"  {each} still has {len(older):,} of an earlier call, such as {older[0].name}")
