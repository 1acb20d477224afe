"""`hookdiff fid`: compare two sets of images."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hookdiff import UserError
from hookdiff.cli.options import trust_option

if TYPE_CHECKING:
    from hookdiff.features import Features
    from hookdiff_fid.sets import ImageSet

_ALL = "all"
_ERRORS = ("/error", "/deviation")  # ends of the names of values that belong to another


@click.command()
@click.argument("samples", type=click.Path(path_type=Path), metavar="A")
@click.argument("reference", type=click.Path(path_type=Path), metavar="[B]", required=False)
@click.option("--features", metavar="NAME", help="Space of the features.  [default: by the size of the images]")
@click.option("--recipe", metavar="NAME", help="Package whose resizing to follow; all: a table of them.")
@click.option("--weights", metavar="FILE", help="Weights of the features.  [default: the published ones]")
@click.option("--sha256", metavar="HEX", help="SHA-256 of --weights, if they are not the published ones.")
@click.option("--num", default=10_000, show_default=True, type=click.IntRange(2), help="Images to make of a run.")
@click.option("--seed", default=0, metavar="N", help="Seed of their noise.")
@click.option("--device", metavar="NAME", help="cpu, cuda, cuda:1 or mps.  [default: a GPU if there is one]")
@click.option("--save", type=click.Path(path_type=Path), help="Write mean and covariance of A to this NPZ file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each recipe.")
@trust_option
def command(
    samples: Path,
    reference: Path | None,
    features: str | None,
    recipe: str | None,
    weights: str | None,
    sha256: str | None,
    num: int,
    seed: int,
    device: str | None,
    save: Path | None,
    as_json: bool,
    trust: bool,
) -> None:
    """Compare the images A with B: Fréchet distance, kernel distance, precision, recall, density and coverage.

    A and B are each a folder of pictures, a run or a checkpoint (images are made of it), an NPZ file of images (arr_0),
    or an NPZ file of statistics (mu and sigma, such as papers publish). Without B, a run is compared with its training
    images. In the space "inception" the Fréchet distance is FID. Compare only values of the same space, recipe and
    number of images.
    """
    import json

    from hookdiff.disk import check_writable
    from hookdiff.experiment import pick_device
    from hookdiff.features import Collected, Gaussian
    from hookdiff_fid.compare import compare
    from hookdiff_fid.frechet import frechet_distance
    from hookdiff_fid.sets import ImageSet, data_of, open_set
    from hookdiff_fid.statistics import write_statistics

    if save and save.suffix != ".npz":
        raise UserError(f"--save {save}: expected a name that ends in .npz")
    if save:
        check_writable(save)
    place = pick_device(device or "auto")
    sets = [open_set(samples, num, seed, device, trust)]
    if reference:
        sets.append(open_set(reference, num, seed, device, trust))
    elif not save:
        sets.append(data_of(samples, trust))
    options = {"recipe": recipe, "weights": weights, "sha256": sha256}
    images = [one for one in sets if isinstance(one, ImageSet)]
    if not images:
        first, second = (one for one in sets if isinstance(one, Gaussian))
        click.echo(f"{frechet_distance(first, second):.6g} is the Fréchet distance of the two statistics")
        return
    rows = []
    for choice in _choices(features, {key: value for key, value in options.items() if value}, images[0]):
        space = choice.open(place)
        found = [one.features(space) if isinstance(one, ImageSet) else one for one in sets]
        if save:
            if not isinstance(found[0], Collected):
                raise UserError(f"--save: {samples} holds statistics already")
            write_statistics(save, found[0].moments)
        if len(found) > 1:
            try:
                values = compare(space, found[0], found[1])
            except ValueError as error:  # too few images, or statistics of other features
                raise UserError(f"{samples} and {reference}: {error}") from None
            rows.append({"space": space.name, "num": [one.num for one in found], **values})
    if as_json:
        for row in rows:
            click.echo(json.dumps(row))
    elif rows:
        click.echo(_table(rows) if recipe == _ALL else _list(rows[0]))
    if save:
        click.echo(f"{save}: mean and covariance of {samples} in the space {space.name}")


def _choices(use: str | None, options: dict[str, str], images: ImageSet) -> list[Features]:
    """Return the features that the options name: one, or one for each recipe."""
    import attrs

    from hookdiff.features import Features, usual_features
    from hookdiff.structure import Problems, structured

    if ":" in (use or "") and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # for a module of your own
    use = use or ("inception" if options else usual_features(images.shape).use)
    try:
        recipes = [options.pop("recipe", None)]
        if recipes == [_ALL]:
            known: Any = attrs.fields_dict(type(Features.of(use))).get("recipe")
            if known is None:
                raise UserError(f"--recipe all: the features {use!r} have only one recipe")
            recipes = list(known.validator.options)
        tables = [{"use": use, **options, **({"recipe": recipe} if recipe else {})} for recipe in recipes]
        return [structured(Features, table) for table in tables]  # type: ignore[type-abstract]
    except Problems as problems:
        raise UserError(f"--features {use}: {problems}") from None


def _list(row: dict[str, Any]) -> str:
    """Return the values in a space, one in a line, each with its error beside it."""
    ours, theirs = ("an unknown number of" if num is None else f"{num:,}" for num in row["num"])
    texts = _texts(row)
    wide = max(map(len, texts))
    return "\n".join(
        [f"{ours} images against {theirs} images", *(f"  {name:<{wide}}  {text}" for name, text in texts.items())]
    )


def _table(rows: list[dict[str, Any]]) -> str:
    """Return the values in several spaces, one space in a line."""
    texts = [{name.partition("/")[0]: text for name, text in _texts(row).items()} for row in rows]
    columns = [["", *(row["space"] for row in rows)]]
    columns += [[name, *(values[name] for values in texts)] for name in texts[0]]
    wide = [max(map(len, column)) for column in columns]
    lines = zip(*columns, strict=True)
    return "\n".join("  ".join([line[0].ljust(wide[0]), *map(str.rjust, line[1:], wide[1:])]) for line in lines)


def _texts(row: dict[str, Any]) -> dict[str, str]:
    """Return the values by name, each with its error beside it."""
    values = {name: value for name, value in row.items() if name not in ("space", "num")}
    errors = {name.rpartition("/")[0]: value for name, value in values.items() if name.endswith(_ERRORS)}
    texts = {}
    for name, value in values.items():
        if not name.endswith(_ERRORS):
            error = f" +- {errors[name]:.2g}" if name in errors else ""
            texts[name] = f"{value:.6g}{error}" if name == next(iter(values)) else f"{value:.4g}{error}"
    return texts
