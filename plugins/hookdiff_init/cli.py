"""`hookdiff init`: write a config that fits a folder of images and this machine."""

from pathlib import Path

import click


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), required=False)
@click.option("-o", "--out", type=click.Path(path_type=Path), help="The config.  [default: the folder's name, .toml]")
@click.option(
    "--minutes",
    type=click.FloatRange(0, min_open=True),
    metavar="X",
    help="Length of the training.  [default: 10, or more for a machine on which that is too short]",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
def command(folder: Path | None, out: Path | None, minutes: float | None, overwrite: bool) -> None:
    """Write a config that trains on the images in FOLDER, or, without FOLDER, on handwritten digits.

    The images are looked at: their sizes, colours and sub-folders, which are the classes. A few steps are tried on this
    machine, to choose a size and a number of steps that take about --minutes. Every line of the config may be changed.
    """
    from hookdiff import UserError
    from hookdiff.disk import check_writable, new_file
    from hookdiff_init.fit import fit
    from hookdiff_init.look import digits, look
    from hookdiff_init.write import text

    name = folder.resolve().name if folder else "digits"
    out = out or Path(f"{name or 'mine'}.toml")
    if out.exists() and not overwrite:
        raise UserError(f"{out} exists: --overwrite replaces it, -o FILE writes another")
    check_writable(out)
    pictures = look(folder) if folder else digits()
    plan = fit(pictures, 60 * minutes if minutes else None)
    try:
        config = text(pictures, plan, out).encode()
    except UnicodeEncodeError:
        raise UserError(f"{folder}: the name is not UTF-8, as a config has to be; rename it") from None
    with new_file(out) as partial:
        partial.write_bytes(config)
    click.echo(f"{out}: {pictures.summary} at {plan.side} x {plan.side}, {plan.steps} steps in about {plan.duration}")
    click.echo(f"  hookdiff run {out}\n  hookdiff sample runs/{out.stem}")
