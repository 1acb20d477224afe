"""`hookdiff init`: write a config that fits a folder of images and this machine."""

import shlex
from pathlib import Path

import click

from hookdiff import UserError
from hookdiff.cli import add_schema, check_exists, check_output, out_option, overwrite_option, path_argument


def _check_folder(path: Path) -> None:
    check_exists(path)
    if not path.is_dir():
        raise UserError(f"{path} is not a folder; name a folder of images")


@click.command()
@path_argument("folder", _check_folder, "[DIR]", required=False)
@out_option("The config.  [default: the folder's name, .toml]")
@click.option(
    "--minutes",
    type=click.FloatRange(0, min_open=True),
    metavar="X",
    help="Length of the training.  [default: 10, or more on a machine that needs more time]",
)
@click.option(
    "--image-size",
    type=click.IntRange(1),
    metavar="N",
    help="Side of the training images in pixels; network and steps follow.  [default: by images and time]",
)
@click.option(
    "--model",
    type=click.Choice(["unet", "diffusers"]),
    default="unet",
    show_default=True,
    help="The network: hookdiff's own, or one of diffusers, which `hookdiff export --to diffusers` can write.",
)
@click.option(
    "--text-encoder",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Train on the captions in the .txt files beside the images, by the text encoder of transformers in DIR.",
)
@click.option("--schema", is_flag=True, help="Also write the schema with which an editor completes the config.")
@overwrite_option
def command(
    folder: Path | None,
    out: Path | None,
    minutes: float | None,
    image_size: int | None,
    model: str,
    text_encoder: Path | None,
    schema: bool,
    overwrite: bool,
) -> None:
    """Write a config that trains on the images in DIR, or, without DIR, on handwritten digits.

    The command reads the sizes and colours of the images, and their classes, which are the sub-folders. With
    --text-encoder it reads their captions in place of classes. It tries a few steps and a grid of samples on this
    machine, to choose an image size, a number of steps and grids that take about --minutes together. At most a tenth of
    the time goes into grids, unless even the smallest grid takes longer. You may change every line of the config.
    """
    from importlib.util import find_spec

    from hookdiff.disk import new_file
    from hookdiff_init.captions import check_encoder, with_captions
    from hookdiff_init.fit import check_side, fit
    from hookdiff_init.look import digits, look
    from hookdiff_init.write import text

    name = folder.resolve().name if folder else "digits"
    out = out or Path(f"{name or 'mine'}.toml")
    check_output(out, overwrite)
    if image_size:
        check_side(image_size)
    if model == "diffusers" and find_spec("diffusers") is None:
        raise UserError("--model diffusers needs a package: pip install 'hookdiff[diffusers]'")
    if text_encoder:
        if not text_encoder.is_dir():  # otherwise its files are checked after the captions
            check_encoder(text_encoder)
        if model == "diffusers":
            raise UserError("--text-encoder: the network of --model diffusers takes no text; leave out one option")
    pictures = look(folder) if folder else digits()
    if text_encoder:
        pictures = with_captions(pictures, text_encoder)
    plan = fit(pictures, 60 * minutes if minutes else None, image_size, model == "diffusers")
    try:
        config = text(pictures, plan, out).encode()
    except UnicodeEncodeError:
        raise UserError(f"{folder}: the name is not UTF-8, so a config cannot hold it; rename the folder") from None
    with new_file(out) as partial:
        partial.write_bytes(config)
    if schema:
        add_schema(out)
    click.echo(f"{out}: {pictures.summary} at {plan.side} x {plan.side}, {plan.steps:,} steps in about {plan.duration}")
    prompt = f" --prompt {shlex.quote(pictures.texts.prompts[0])}" if pictures.texts else ""
    click.echo(f"  hookdiff run {out}\n  hookdiff sample runs/{out.stem}{prompt}")
    if plan.diffusers:
        click.echo(f"  hookdiff export runs/{out.stem} {out.stem} --to diffusers")
    for line in plan.advice:
        click.echo(line)
    if pictures.are_captioned and not pictures.texts:
        use = f"`hookdiff init {folder} --text-encoder DIR` trains on them by a text encoder of transformers"
        use += ", and `hookdiff sample --prompt TEXT` then draws a text"
        click.echo(f"{pictures.captioned:,} of the images have a .txt of captions, which are not used: {use}")
