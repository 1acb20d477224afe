"""`hookdiff fid`: compare two sets of images."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hookdiff import UserError
from hookdiff.cli import (
    check_exists,
    check_output,
    device_option,
    guidance_option,
    json_option,
    overwrite_option,
    path_argument,
    seed_option,
    settings_option,
    solver_options,
    trust_option,
    weights_option,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hookdiff.features import Features, Space
    from hookdiff_fid.sets import ImageSet, Statistics

logger = logging.getLogger("hookdiff")

_ALL = "all"
_ERRORS = ("/error", "/deviation")  # suffixes: the error of kid/NAME is kid/NAME/error
_FLOOR = "/floor"
_MADE = ("weights", "step", "seed", "sampler", "steps", "guidance", "guidance_scale")  # of a run, in JSON


@click.command()
@path_argument("samples", check_exists, "A")
@path_argument("reference", check_exists, "[B]", required=False)
@click.option("--features", metavar="NAME", help="Space of the features.  [default: by the size of the images]")
@click.option("--recipe", metavar="NAME", help="Resize as this package does; all: a table of all recipes.")
@click.option("--feature-weights", metavar="FILE", help="Weights of the features.  [default: the published ones]")
@click.option("--feature-sha256", metavar="HEX", help="SHA-256 of --feature-weights that are not published.")
@click.option(
    "--num", default=10_000, show_default=True, type=click.IntRange(2), metavar="N", help="Images that a run makes."
)
@solver_options
@guidance_option
@seed_option
@weights_option
@device_option
@settings_option
@click.option(
    "--save", type=click.Path(path_type=Path), metavar="FILE", help="Write mean and covariance of A to this NPZ file."
)
@json_option
@overwrite_option
@trust_option
def command(
    samples: Path,
    reference: Path | None,
    features: str | None,
    recipe: str | None,
    feature_weights: str | None,
    feature_sha256: str | None,
    num: int,
    seed: int,
    weights: str | None,
    device: str | None,
    settings: tuple[str, ...],
    save: Path | None,
    as_json: bool,
    overwrite: bool,
    trust: bool,
    **sampling: Any,
) -> None:
    """Compare the images A with B: Fréchet distance, kernel distance, precision, recall, density and coverage.

    A and B are each a folder of pictures, a run or a checkpoint (which makes the images), an NPZ file of images
    (arr_0), or an NPZ file of published statistics (mu and sigma). Default for B: the training images of the run A.
    --steps, --sampler, --guidance-scale, --seed, --weights and --set apply to the images that a run makes, as in
    `hookdiff sample`. If A or B is a run, pictures of the other set are resized and cropped as the run's data, with
    its channels and its `background`. A run makes images of each size as often as its training data has it.

    In the space "inception" the Fréchet distance is FID. Compare only values of the same space, recipe and number of
    images. The floor is the distance that a perfect model would have with as many images as A. With --json, each recipe
    is a JSON object on a line of its own.
    """
    import json

    from hookdiff.experiment import pick_device
    from hookdiff.features import Collected, frechet_distance
    from hookdiff_fid.compare import compare, floor_of, too_few
    from hookdiff_fid.sets import ImageSet, Making, Statistics, data_of, open_set, open_sets
    from hookdiff_fid.statistics import write_statistics

    if save:
        _check_save(save, recipe, overwrite)
    making = Making(num, seed, device, trust, settings, weights, sampling)
    sets: list[ImageSet | Statistics]
    if reference:
        sets = open_sets([samples, reference], making)
    elif save:
        sets = [open_set(samples, making)]
    else:
        data, labels = data_of(samples, settings, trust)
        sets = [open_set(samples, making, labels), data]
    images = [side for side in sets if isinstance(side, ImageSet)]
    for name, value in {**sampling, "weights": weights}.items():
        if value is not None and not any(side.made for side in images):
            raise UserError(f"--{name.replace('_', '-')}: only for the images of a run; compare a run, or leave it out")
    if save and isinstance(sets[0], Statistics):
        raise UserError(f"--save: {samples} holds statistics already; leave --save out")
    options = {"recipe": recipe, "weights": feature_weights, "sha256": feature_sha256}
    rows: list[dict[str, Any]] = []
    lacking = ""
    try:
        if not images:
            first, second = (side.gaussian for side in sets if isinstance(side, Statistics))
            rows.append({"space": None, "fd": frechet_distance(first, second)})
        # The images of a folder get the sizes of a run that they are compared with.
        shapes = [shape for side in images[:1] + [side for side in images[1:] if side.made] for shape in side.shapes]
        choices = _choices(features, options, shapes) if images else []
        for choice in choices:
            for shape in images[0].shapes:
                choice.check(shape)
        # Errors are raised before the images of a run are made, which takes longest.
        spaces = [choice.open(pick_device(device or "auto")) for choice in choices]
        for space in spaces:
            _check(space, sets)
        by_set = {id(side): side.features(spaces) for side in sorted(images, key=lambda side: bool(side.made))}
        for k, space in enumerate(spaces):
            measured = [by_set[id(side)][k] if isinstance(side, ImageSet) else side.gaussian for side in sets]
            if save and isinstance(measured[0], Collected):
                write_statistics(save, measured[0].moments)
                what = f"mean and covariance of {measured[0].num:,} images of {sets[0].name}"
                click.echo(f"{save}: {what} in the space {space.name}", err=as_json)
            if len(measured) > 1:
                row = {"space": space.name, **compare(space, measured[0], measured[1])}
                if isinstance(measured[0], Collected) and isinstance(measured[1], Collected):
                    row[f"{space.distance}{_FLOOR}"] = floor_of(measured[1], measured[0].num)
                rows.append(row)
                lacking = too_few(measured[0], measured[1])
    except ValueError as error:  # too few images, or statistics of other features
        raise UserError(f"{' and '.join(side.name for side in sets)}: {error}") from None
    for side in images:
        for text in side.remarks:
            logger.warning("%s: %s", side.name, text)
    if as_json:
        about: dict[str, Any] = {"sets": [side.name for side in sets], "num": [side.num for side in sets]}
        about["unreadable"] = [len(side.unreadable) if isinstance(side, ImageSet) else 0 for side in sets]
        made: list[Mapping[str, Any]] = [side.made if isinstance(side, ImageSet) else {} for side in sets]
        about |= {key: [how.get(key) for how in made] for key in _MADE}
        for row in rows:
            click.echo(json.dumps({**about, **row}))
    elif rows:
        click.echo("\nagainst ".join(f"{_count(side.num)} of {side.name}" for side in sets))
        click.echo(_table(rows) if recipe == _ALL else _list(rows[0]))
    if lacking:
        click.echo(lacking, err=True)
    if few := _few(images):
        click.echo(few, err=True)


def _check(space: Space, sets: Sequence[ImageSet | Statistics]) -> None:
    """Raise UserError unless `space` takes the images of `sets`, and has as many features as their statistics."""
    import torch

    from hookdiff_fid.sets import ImageSet

    images = [image_set for image_set in sets if isinstance(image_set, ImageSet)]
    for image_set in images:
        image_set.check(space)
    features, _ = space(torch.zeros(1, *images[0].shapes[0], dtype=torch.uint8))
    for other in sets:
        if not isinstance(other, ImageSet) and len(other.gaussian.mean) != (dim := features.shape[1]):
            has = f"has statistics of {len(other.gaussian.mean):,} features"
            raise UserError(f"{other.name} {has}, the space {space.name!r} has {dim:,}; choose another --features")


def _check_save(save: Path, recipe: str | None, overwrite: bool) -> None:
    if save.suffix != ".npz":
        raise UserError(f"--save {save}: expected a name that ends in .npz")
    if recipe == _ALL:
        raise UserError("--save with --recipe all: name one recipe, since a file holds the statistics of one recipe")
    check_output(save, overwrite)


def _few(images: Sequence[ImageSet]) -> str:
    """Return a warning of sets with few images, except the data of a run; "" without such sets."""
    from hookdiff.features import few_images

    few = [image_set for image_set in images if few_images(image_set.num) and not image_set.is_data]
    way_out = "; set a larger --num" if any(image_set.made for image_set in few) else ""
    return few_images(few[0].num) + way_out if few else ""


def _count(num: int | None) -> str:
    return "statistics" if num is None else f"{num:,} images"


def _choices(use: str | None, options: Mapping[str, str | None], shapes: Sequence[tuple[int, ...]]) -> list[Features]:
    """Return the features that the options name for images of these `shapes`: one, or one for each recipe."""
    import attrs

    from hookdiff.features import named_features, usual_features

    options = {key: value for key, value in options.items() if value}
    use = use or ("inception" if options else usual_features(*shapes).use)
    recipes = [options.pop("recipe", None)]
    if recipes == [_ALL]:
        known: Any = attrs.fields_dict(type(named_features(use))).get("recipe")
        recipes = list(getattr(known and known.validator, "names", ()))  # of `one_of`
        if not recipes:
            raise UserError(f"--recipe all: the features {use!r} have only one recipe; leave --recipe out")
    return [named_features(use, **options, **({"recipe": recipe} if recipe else {})) for recipe in recipes]


def _list(row: dict[str, Any]) -> str:
    """Return the values in a space, one a line, each with its error."""
    texts = _texts(row)
    wide = max(map(len, texts))
    return "\n".join(f"  {name:<{wide}}  {text}" for name, text in texts.items())


def _table(rows: list[dict[str, Any]]) -> str:
    """Return the values in several spaces, one space a line."""
    texts = [{name.partition("/")[0]: text for name, text in _texts(row).items()} for row in rows]
    columns = [["", *(row["space"] for row in rows)]]
    columns += [[name, *(values[name] for values in texts)] for name in texts[0]]
    wide = [max(map(len, column)) for column in columns]
    lines = zip(*columns, strict=True)
    return "\n".join("  ".join([line[0].ljust(wide[0]), *map(str.rjust, line[1:], wide[1:])]) for line in lines)


def _texts(row: dict[str, Any]) -> dict[str, str]:
    """Return the values by name, each with its error or its floor."""
    values = {name: value for name, value in row.items() if name != "space"}
    texts: dict[str, str] = {}
    for name, value in values.items():
        if not name.endswith((*_ERRORS, _FLOOR)):
            errors = [f" +- {values[name + end]:.2g}" for end in _ERRORS if name + end in values]
            floors = [f" (floor {values[name + _FLOOR]:.4g})"] if values.get(name + _FLOOR) is not None else []
            texts[name] = "".join([f"{value:.{4 if texts else 6}g}", *errors, *floors])
    return texts
