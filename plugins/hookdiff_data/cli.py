"""`hookdiff data`: report on the data of a config, draw its first batch, write shards, or measure its autoencoder."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from hookdiff import listed, shown
from hookdiff.cli import check_output, config_argument, json_option, out_option, override_options, overwrite_option
from hookdiff.terminal import byte_size, rate

_LISTED = 10  # the most classes, sizes or files in a list
_SHOWN = 60  # characters of a caption in a list
_SHARD_SIZE = 256.0  # MiB


@click.command()
@config_argument
@override_options
@out_option("Draw the first batch in this PNG file.")
@overwrite_option
@json_option
@click.option("--seconds", default=2.0, type=click.FloatRange(0), metavar="X", help="Time to measure the speed.")
@click.option("--to-shards", type=click.Path(path_type=Path), metavar="DIR", help="Write all samples to tar files.")
@click.option(
    "--shard-size",
    type=click.FloatRange(0, min_open=True),
    metavar="X",
    help=f"Size of a tar file in MiB.  [default: {_SHARD_SIZE:g}]",
)
@click.option("--reconstruction", type=click.IntRange(2), metavar="N", help="Encode and decode N pictures.")
@click.option("--features", metavar="NAME", help="Space of the features.  [default: by the size of the images]")
def command(
    config: Path,
    plugins: tuple[str, ...],
    settings: tuple[str, ...],
    trust: bool,
    out: Path | None,
    overwrite: bool,
    as_json: bool,
    seconds: float,
    to_shards: Path | None,
    shard_size: float | None,
    reconstruction: int | None,
    features: str | None,
) -> None:
    """Report on the data of CONFIG, and with --out, draw its first batch.

    Every sample is read. The report lists sizes, classes, broken files and colour profiles, duplicates and the loading
    speed, and how often captions occur and how many tokens they have. Classes count the samples that can be read, sizes
    and modes the headers. The picture shows the first batch as the model sees it, augmentation included, with the
    captions below.

    If the samples have several sizes, such as aspect-ratio buckets, the report counts the pictures and the batches of
    each size, and says which share of their pixels is cut off. The picture then has a row of each size.

    With --to-shards there is no report: the samples are written in their order into tar files in the folder DIR. The
    pictures are not resized; if CONFIG has encoders, their outputs are written in place of the pictures. Captions are
    written unchanged. The command prints the table [data] that trains on the files.

    With --reconstruction there is no report either: the autoencoder of CONFIG encodes and decodes N samples, evenly
    spread. The command prints the mean PSNR of the decoded pictures, and their Fréchet distance to the pictures of the
    data. Both numbers show how much quality the autoencoder alone loses.
    """
    from hookdiff import load_config
    from hookdiff.experiment import build_feed, pick_device
    from hookdiff_data.captions import captions
    from hookdiff_data.encoded import check_reportable
    from hookdiff_data.picture import draw
    from hookdiff_data.report import report

    if out is not None:
        check_output(out, overwrite)
    _check_options(out, to_shards, shard_size, reconstruction, features)
    checked = load_config(config, plugins, settings, trust=trust)
    if reconstruction is not None:
        _print_reconstruction(checked, reconstruction, features, as_json)
        return
    if to_shards is not None:
        written = _to_shards(checked, to_shards, shard_size or _SHARD_SIZE, overwrite)
        click.echo(json.dumps(written) if as_json else _text(written))
        return
    device = pick_device(checked.run.device)
    feed = build_feed(checked, encode=False)
    check_reportable(feed)
    feed = feed.bind(checked.run.batch_size, checked.run.seed, device)
    about = captions(feed)
    facts = {
        "source": checked.data.use,
        **report(feed, seconds),
        **({"captions": about} if about else {}),
        "picture": None,
    }
    if out is not None:
        facts["picture"] = draw(feed, out)
    click.echo(json.dumps(facts) if as_json else "\n".join(f"{name:<12} {text}" for name, text in _rows(facts)))


def _check_options(
    out: Path | None, to_shards: Path | None, shard_size: float | None, reconstruction: int | None, features: str | None
) -> None:
    """Raise UsageError for options that do not go together."""
    for name, other in {"--to-shards": to_shards, "--reconstruction": reconstruction}.items():
        if other is not None and out is not None:
            raise click.UsageError(f"{name} makes no report and draws no batch: leave out --out")
    if to_shards is not None and reconstruction is not None:
        raise click.UsageError("--to-shards and --reconstruction are two commands: leave out one of them")
    if shard_size is not None and to_shards is None:
        raise click.UsageError("--shard-size: add --to-shards DIR, or leave the option out")
    if features is not None and reconstruction is None:
        raise click.UsageError("--features: add --reconstruction N, or leave the option out")


def _print_reconstruction(config: Any, num: int, features: str | None, as_json: bool) -> None:
    from hookdiff_data.reconstruction import reconstruction

    facts, texts = reconstruction(config, num, features)
    if as_json:
        click.echo(json.dumps(facts))
    else:
        rows = {
            "pictures": f"{facts['num']:,} of {facts['samples']:,}, evenly spread",
            "psnr": f"{facts['psnr']:.2f} dB",
        }
        rows |= {name: f"{value:.6g}" for name, value in facts.items() if "/" in name}
        wide = max(map(len, rows))
        click.echo("\n".join(f"{name:<{wide}}  {text}" for name, text in rows.items()))
    for text in texts:
        click.echo(text, err=True)


def _to_shards(config: Any, folder: Path, size: float, overwrite: bool) -> dict[str, Any]:
    """Write the shards, and return the result of `write_shards`, with all keys of [data] that the config sets."""
    from hookdiff.experiment import build_feed
    from hookdiff.options import as_toml
    from hookdiff_data.encoded import check_sizes, is_encoded
    from hookdiff_data.shards import check_place, write_shards

    check_place(folder, overwrite)  # before the data is read
    check_sizes(config)
    feed = build_feed(config, decode=False, encode="pictures").bind(1, config.run.seed)
    written = write_shards(feed, folder, int(size * 2**20))
    shared = {name: value for keys in config.data.shared.values() for name, value in keys.items()}
    if is_encoded(feed):
        # Latents of several sizes keep their sizes, which the shards list.
        keys = ("image_size", "buckets", "bucket_step", "bucket_ratio") if feed.by_shape else ()
        shared = {name: value for name, value in shared.items() if name not in keys} | {"encoded": True}
    return {**written, "data": as_toml({**written["data"], **shared})}


def _text(written: dict[str, Any]) -> str:
    import tomli_w

    counts = f"{written['samples']:,} samples, {written['shards']:,} shards, {byte_size(written['bytes'])}"
    return f"{counts}; to train on them:\n\n{tomli_w.dumps({'data': written['data']})}"


def _rows(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each line; a line without a name continues the one before."""
    from hookdiff.images import texts_of_kinds

    yield "source", facts["source"]
    broken = facts["unreadable"]["count"]
    unreadable = f", {broken:,} of them unreadable" if broken else ""
    held_out = f", {facts['held_out']:,} of them held out" if facts["held_out"] else ""
    yield "samples", f"{facts['samples']:,}{unreadable}{held_out}"
    if facts["sizes"]:
        headers = sum(facts["modes"].values()) - (facts["samples"] - broken)
        note = f", {headers:,} of them unreadable after the header" if headers else ""
        sizes = listed([f"{width} x {height}: {count:,}" for width, height, count in facts["sizes"]], _LISTED)
        yield "sizes", sizes + note
        yield "modes", listed([f"{mode}: {count:,}" for mode, count in facts["modes"].items()], _LISTED) + note
    yield from _buckets(facts.get("buckets"))
    if counts := facts["classes"]:
        yield "classes", f"{len(counts):,}: {listed([f'{name} {count:,}' for name, count in counts.items()], _LISTED)}"
        most, least = max(counts.values()), min(counts.values())
        ratio = f", ratio {most / least:.1f}" if least else ""
        yield "balance", f"{least:,} to {most:,} samples a class{ratio}"
    else:
        yield "classes", "no labels"
    yield from _captions(facts.get("captions", {}))
    values, store = facts["values"], facts["store"]
    sizes = facts.get("buckets", {}).get("sizes", ())
    shape = f"{facts['shape'][0]} x height x width" if sizes else " x ".join(map(str, facts["shape"]))
    yield "inputs", f"{shape}, from {values['min']:.3g} to {values['max']:.3g}"
    yield "mean", ", ".join(f"{value:.4f}" for value in values["mean"])
    yield "std", ", ".join(f"{value:.4f}" for value in values["std"])
    workers = f"{store['workers']} workers" if store["workers"] else "the training process"
    text = f"decoded in every epoch by {workers}"
    if store["place"] != "none":
        text = f"{byte_size(store['bytes'])} in {store['path'] or store['device']}"
    yield "store", f"{store['place']}: {text}"
    for name, key, note in (("unreadable", "unreadable", ""), ("not finite", "not_finite", " with NaN or infinity")):
        if facts[key]["count"] or name == "unreadable":
            yield name, f"{facts[key]['count']:,}{note}"
            yield from (("", line) for line in facts[key]["files"][:_LISTED])
    if faults := facts["profile_faults"]:
        yield "profiles", f"{len(faults):,} ignored, the colours are read as sRGB"
        yield from (("", line) for line in faults[:_LISTED])
    if kinds := facts["passed_over"]:
        texts = texts_of_kinds({kind: (row["count"], row["first"]) for kind, row in kinds.items()})
        yield "not used", listed(texts, _LISTED)
    duplicates = facts["duplicates"]
    yield "duplicates", f"{duplicates['count']:,} with the same pixels as another" if duplicates["count"] else "0"
    for group in duplicates["groups"]:
        yield "", " = ".join(group[:3]) + (", ..." if len(group) > 3 else "")
    yield "speed", rate(facts["images_per_second"])
    if picture := facts["picture"]:
        images = f"{picture['images']} images" if sizes else f"the first {picture['images']} images"
        yield "picture", f"{picture['path']}: {images} of epoch 0{', a row of each size' if sizes else ''}"
        yield from (("", " ".join(row)) for row in picture["labels"])


def _buckets(facts: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    from hookdiff.log import percent

    if facts is None:
        return
    worst, sizes = facts["worst"], facts["sizes"]
    lost = f"{percent(facts['cut_off'])} of the pixels are cut off, of the worst picture {percent(worst['cut_off'])}"
    yield "buckets", f"{len(sizes):,} size{'s' * (len(sizes) != 1)}; {lost}: {worst['name']}"
    heads = ("size", "training", "held out", "batches/epoch", "cut off")
    yield "", _row(heads)
    for row in sizes:
        counts = (f"{row['training']:,}", f"{row['held_out']:,}", f"{row['batches']:,.2f}")
        yield "", _row((row["size"], *counts, percent(row["cut_off"])))
    if small := facts["below_batch_size"]:
        yield "", f"with fewer pictures to train on than batch_size: {listed(small, _LISTED)}"
    yield "enlarged", f"{facts['enlarged']:,}"


def _row(cells: tuple[str, ...]) -> str:
    return f"{cells[0]:<10}" + "".join(f"{cell:>15}" for cell in cells[1:])


def _captions(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, about in facts.items():
        yield "captions", f"{shown(name)}: {about['count']:,}, {about['unique']:,} different, {about['empty']:,} empty"
        for text, count in about["frequent"]:
            yield "", f"{count:,} x {shown(text if len(text) <= _SHOWN else f'{text[:_SHOWN]}...') or '(empty)'}"
        for encoder, tokens in about["tokens"].items():
            cut = f"{tokens['cut']:,} truncated at {tokens['limit']:,}" if tokens["limit"] else "none is truncated"
            if tokens["unknown"]:
                cut += f"; {tokens['unknown']:,} of the different ones have hardly a word that the tokenizer knows"
            if tokens["same"]:
                cut += f"; {tokens['same']:,} of the different ones have the same tokens as another"
            yield "tokens", f"{encoder}: {tokens['min']:,} to {tokens['max']:,}, median {tokens['median']:,}; {cut}"
