"""`hookdiff data`: a report of the data that a config would train on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hookdiff.cli.options import config_argument, override_options

if TYPE_CHECKING:
    from hookdiff.data import Feed

_MOST = 10  # classes, sizes and files that are listed
_SHOWN = 64  # images of the sheet


@click.command()
@config_argument
@override_options
@click.option("--out", type=click.Path(path_type=Path), help="Path of the sheet, a .png; NAME-data.png by default.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, and draw a sheet only with --out.")
@click.option("--seconds", default=2.0, show_default=True, type=click.FloatRange(0), help="How long to measure speed.")
def command(
    config: Path, plugins: tuple[str, ...], settings: tuple[str, ...], out: Path | None, as_json: bool, seconds: float
) -> None:
    """Read every sample of CONFIG's data once, and report on it.

    The report lists sizes, classes, problems and speed. A sheet shows the first batch as the model will see it.
    """
    import json

    from hookdiff import experiment
    from hookdiff.data.report import report
    from hookdiff.experiment.config import load_config

    checked = load_config(config, plugins, settings)
    device = experiment.pick_device(checked.run.device)
    feed = experiment.build_feed(checked).bind(checked.run.batch_size, checked.run.seed, device)
    found = {"source": checked.data.use, **report(feed, seconds)}
    if out is None and not as_json:
        out = Path(f"{checked.run.name}-data.png")
    sheet = _draw(feed, out) if out else None
    if as_json:
        click.echo(json.dumps({**found, "sheet": sheet}))
        return
    for name, text in _rows(found):
        click.echo(f"{name:<12} {text}")
    if sheet:
        click.echo(f"{'sheet':<12} {sheet['path']}: the first {sheet['images']} images of epoch 0")
        for row in sheet["labels"]:
            click.echo(f"{'':<12} {' '.join(row)}")


def _draw(feed: Feed, out: Path) -> dict[str, Any]:
    """Draw the first batch of epoch 0; return the path, the number of images, and the labels row by row."""
    import math

    from hookdiff.disk import cannot_write, save_grid

    batch = next(feed.batches(0))[:_SHOWN]
    columns = math.ceil(math.sqrt(len(batch)))
    try:
        save_grid(batch.inputs, out, columns)
    except OSError as error:
        raise cannot_write(out, error) from None
    labels = [] if batch.labels is None else batch.labels.tolist()
    names = [feed.classes[label] if feed.classes and label >= 0 else str(label) for label in labels]
    rows = [names[start : start + columns] for start in range(0, len(names), columns)]
    return {"path": str(out), "images": len(batch), "labels": rows}


def _rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each line; a line that goes on with the one before has no name."""
    yield "source", found["source"]
    held_out = f", {found['held_out']:,} of them held out" if found["held_out"] else ""
    yield "samples", f"{found['samples']:,}{held_out}"
    if found["sizes"]:
        yield "sizes", _some([f"{width} x {height}: {count:,}" for width, height, count in found["sizes"]])
        yield "modes", _some([f"{mode}: {count:,}" for mode, count in found["modes"].items()])
    if counts := found["classes"]:
        yield "classes", f"{len(counts):,}: {_some([f'{name} {count:,}' for name, count in counts.items()])}"
        most, least = max(counts.values()), min(counts.values())
        yield "balance", f"{least:,} to {most:,} samples a class" + (f", {most / least:.1f} times" if least else "")
    else:
        yield "classes", "no labels"
    values, store = found["values"], found["store"]
    yield "trained on", f"{' x '.join(map(str, found['shape']))}, from {values['min']:.3g} to {values['max']:.3g}"
    yield "mean", ", ".join(f"{value:.4f}" for value in values["mean"])
    yield "std", ", ".join(f"{value:.4f}" for value in values["std"])
    if store["place"] == "none":
        workers = f"{store['workers']} workers" if store["workers"] else "the training process"
        yield "store", f"none: decoded again in each epoch, by {workers}"
    else:
        yield "store", f"{store['place']}: {store['bytes'] / 2**20:,.1f} MiB in {store['path'] or store['device']}"
    yield from _files("unreadable", found["unreadable"], "")
    if found["not_finite"]["count"]:
        yield from _files("not finite", found["not_finite"], " have a NaN or an infinity")
    duplicates = found["duplicates"]
    yield "duplicates", f"{duplicates['count']:,} have the pixels of another" if duplicates["count"] else "0"
    for group in duplicates["groups"]:
        yield "", " = ".join(group[:3]) + (", ..." if len(group) > 3 else "")
    yield "speed", f"{found['images_per_second']:,.0f} images/s"


def _files(name: str, found: dict[str, Any], text: str) -> Iterator[tuple[str, str]]:
    yield name, f"{found['count']:,}{text}"
    yield from (("", line) for line in found["files"][:_MOST])


def _some(items: Sequence[str]) -> str:
    return ", ".join(items[:_MOST]) + (f", and {len(items) - _MOST} more" if len(items) > _MOST else "")
