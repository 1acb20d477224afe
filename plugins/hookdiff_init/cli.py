"""`hookdiff init`: write a config that fits a folder of images and this machine."""

import shlex
from pathlib import Path

import click
from click.core import ParameterSource

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
@click.option(
    "--from",
    "source",
    type=click.Path(),  # or a name of the hub
    metavar="DIR",
    help="Fine-tune the network in DIR, a folder of diffusers: a pipeline, or a network alone.",
)
@click.option("--whole", is_flag=True, help="With --from: train all weights of the network, not an adapter (LoRA).")
@click.option("--schema", is_flag=True, help="Also write the schema with which an editor completes the config.")
@overwrite_option
@click.pass_context
def command(
    context: click.Context,
    folder: Path | None,
    out: Path | None,
    minutes: float | None,
    image_size: int | None,
    model: str,
    text_encoder: Path | None,
    source: str | None,
    whole: bool,
    schema: bool,
    overwrite: bool,
) -> None:
    """Write a config that trains on the images in DIR, or, without DIR, on handwritten digits.

    The command reads the sizes and colours of the images, and their classes, which are the sub-folders. With
    --text-encoder it reads their captions in place of classes. It tries a few steps and a grid of samples on this
    machine, to choose an image size, a number of steps and grids that take about --minutes together. At most a tenth of
    the time goes into grids, unless even the smallest grid takes longer. You may change every line of the config.

    If squares would cut off more than a fifth of the pixels, the images get sizes of about their own shapes, each with
    about the pixels of a square (`data.buckets`).

    With --from, the config trains an adapter for a network that exists. Nothing is timed. The image size is that of the
    network, and the folder of the network gives what the config leaves open. Without captions beside the images, all
    have one caption: change it.
    """
    from hookdiff.disk import new_file

    name = folder.resolve().name if folder else "digits"
    out = out or Path(f"{name or 'mine'}.toml")
    check_output(out, overwrite)
    if source is not None:
        of_others = ("minutes", "model", "text_encoder")
        if named := [key for key in of_others if context.get_parameter_source(key) is ParameterSource.COMMANDLINE]:
            raise UserError(f"--{named[0].replace('_', '-')}: not with --from; leave out one option")
        config, lines = _fine_tuning(folder, out, source, image_size, whole)
    elif whole:
        raise UserError("--whole needs --from DIR, the folder with the network")
    else:
        config, lines = _new(folder, out, minutes, image_size, model, text_encoder)
    try:
        written = config.encode()
    except UnicodeEncodeError:
        raise UserError(f"{folder}: the name is not UTF-8, so a config cannot hold it; rename the folder") from None
    with new_file(out) as partial:
        partial.write_bytes(written)
    if schema:
        add_schema(out)
    for line in lines:
        click.echo(line)


def _new(
    folder: Path | None, out: Path, minutes: float | None, image_size: int | None, model: str, text_encoder: Path | None
) -> tuple[str, list[str]]:
    """Return the config of a new network, and what to print."""
    from importlib.util import find_spec

    from hookdiff_init.captions import check_encoder, with_captions
    from hookdiff_init.fit import check_side, fit
    from hookdiff_init.look import digits, look
    from hookdiff_init.write import text

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
    prompt = f" --prompt {shlex.quote(pictures.captions.prompts[0])}" if pictures.captions else ""
    lines = [
        f"{out}: {pictures.summary} at {plan.size}, {plan.steps:,} steps in about {plan.duration}",
        f"  hookdiff run {out}",
        f"  hookdiff sample runs/{out.stem}{prompt}",
    ]
    if plan.diffusers:
        lines.append(f"  hookdiff export runs/{out.stem} {out.stem} --to diffusers")
    lines += plan.advice
    if pictures.are_captioned and not pictures.texts:
        use = f"`hookdiff init {folder} --text-encoder DIR` trains on them by a text encoder of transformers"
        use += ", and `hookdiff sample --prompt TEXT` then draws a text"
        lines.append(f"{pictures.captioned:,} of the images have a .txt of captions, which are not used: {use}")
    return text(pictures, plan, out), lines


def _fine_tuning(
    folder: Path | None, out: Path, source: str, image_size: int | None, whole: bool
) -> tuple[str, list[str]]:
    """Return the config that trains the network in `source`, and what to print."""
    from importlib.util import find_spec

    from hookdiff_init.fine_tuning import fine_tuning, text
    from hookdiff_init.look import look
    from hookdiff_init.pipeline import pipeline_at

    if folder is None:
        raise UserError("--from: name the folder of images, too: hookdiff init FOLDER --from DIR")
    if not whole and find_spec("peft") is None:
        raise UserError("--from trains an adapter, which needs a package: pip install 'hookdiff[lora]'; or add --whole")
    plan = fine_tuning(pipeline_at(source), look(folder), image_size, whole)
    kind = "the whole network" if whole else "an adapter"
    prompt = f" --prompt {shlex.quote(plan.prompts[0])}" if plan.prompts else ""
    lines = [
        f"{out}: {kind} of {source} for {plan.pictures.summary} at {plan.size}, {plan.steps:,} steps",
        f"  hookdiff run {out}",
        f"  hookdiff sample runs/{out.stem}{prompt}",
        f"  hookdiff {plan.export(out.stem)}",
        "Nothing was timed, so the time of the training is not known.",
    ]
    if plan.prompts and not plan.pictures.captions:
        lines.append(f"No image has a .txt with a caption, so all have {plan.caption!r}: change `caption` in {out}.")
    if plan.pictures.captioned and not plan.prompts:
        lines.append(f"The captions are not used, because {source} takes no texts.")
    return text(plan, out), lines
