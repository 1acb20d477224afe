"""`hookdiff fid`: compare two sets of images."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hookdiff import UserError
from hookdiff.cli import trust_option

if TYPE_CHECKING:
    from hookdiff.authors import Features
    from hookdiff_fid.sets import ImageSet, Statistics

logger = logging.getLogger("hookdiff")

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

    from hookdiff.authors import Collected
    from hookdiff.disk import check_writable
    from hookdiff.experiment import pick_device
    from hookdiff_fid.compare import compare, too_few
    from hookdiff_fid.frechet import frechet_distance
    from hookdiff_fid.sets import ImageSet, Statistics, data_of, open_set
    from hookdiff_fid.statistics import write_statistics

    if save and save.suffix != ".npz":
        raise UserError(f"--save {save}: expected a name that ends in .npz")
    if save and recipe == _ALL:
        raise UserError("--save with --recipe all: name one recipe, since a file has the statistics of one")
    if save:
        check_writable(save)
    others: list[ImageSet | Statistics] = []
    labels = None
    if reference:
        others = [open_set(reference, num, seed, device, trust)]
    elif not save:
        data, labels = data_of(samples, trust)
        others = [data]
    sets = [open_set(samples, num, seed, device, trust, labels), *others]
    if save and isinstance(sets[0], Statistics):
        raise UserError(f"--save: {samples} holds statistics already")
    given = {key: value for key, value in (("recipe", recipe), ("weights", weights), ("sha256", sha256)) if value}
    shape = next((one.shape for one in sets if isinstance(one, ImageSet)), ())
    rows: list[dict[str, Any]] = []
    lacking = ""
    try:
        if not shape:
            first, second = (one.gaussian for one in sets if isinstance(one, Statistics))
            rows.append({"space": None, "fd": frechet_distance(first, second)})
        for choice in _choices(features, given, shape) if shape else ():
            choice.check(shape)
            space = choice.open(pick_device(device or "auto"))
            for one in sets:
                if isinstance(one, ImageSet):
                    one.check(space)  # all of them, before images are made of a run
            found = [one.features(space) if isinstance(one, ImageSet) else one.gaussian for one in sets]
            if save and isinstance(found[0], Collected):
                write_statistics(save, found[0].moments)
                click.echo(f"{save}: mean and covariance of {sets[0].name} in the space {space.name}", err=as_json)
            if len(found) > 1:
                rows.append({"space": space.name, **compare(space, found[0], found[1])})
                lacking = too_few(found[0], found[1])
    except ValueError as error:  # too few images, or statistics of other features
        raise UserError(f"{' and '.join(one.name for one in sets)}: {error}") from None
    for one in sets:
        for text in one.left_out if isinstance(one, ImageSet) else ():
            logger.warning("%s: %s", one.name, text)
    if as_json:
        about = {"sets": [one.name for one in sets], "num": [one.num for one in sets]}
        about["unreadable"] = [len(one.unreadable) if isinstance(one, ImageSet) else 0 for one in sets]
        for row in rows:
            click.echo(json.dumps({**about, **row}))
    elif rows:
        click.echo("\nagainst ".join(f"{_count(one.num)} of {one.name}" for one in sets))
        click.echo(_table(rows) if recipe == _ALL else _list(rows[0]))
    if lacking:
        click.echo(lacking, err=True)


def _count(num: int | None) -> str:
    return "statistics" if num is None else f"{num:,} images"


def _choices(use: str | None, options: dict[str, str], shape: tuple[int, ...]) -> list[Features]:
    """Return the features that the options name for images of `shape`: one, or one for each recipe."""
    import attrs

    from hookdiff.authors import Features, usual_features
    from hookdiff.options import Problems, structured

    if ":" in (use or "") and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # for a module of your own
    use = use or ("inception" if options else usual_features(shape).use)
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
    texts = _texts(row)
    wide = max(map(len, texts))
    return "\n".join(f"  {name:<{wide}}  {text}" for name, text in texts.items())


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
    values = {name: value for name, value in row.items() if name != "space"}
    errors = {name.rpartition("/")[0]: value for name, value in values.items() if name.endswith(_ERRORS)}
    texts = {}
    for name, value in values.items():
        if not name.endswith(_ERRORS):
            error = f" +- {errors[name]:.2g}" if name in errors else ""
            texts[name] = f"{value:.6g}{error}" if name == next(iter(values)) else f"{value:.4g}{error}"
    return texts
