"""The files that hookdiff reads: for each format a good file, its reader, and the right outcome for a damaged file."""

import csv
import io
import json
import math
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import click.testing
import numpy
import torch
from attrs import evolve, frozen
from PIL import Image
from safetensors.torch import save_file

from hookdiff import ConfigError, Loop, LossOutput, UserError, builtin_plugins, hookimpl
from hookdiff.data import fashion_mnist
from hookdiff.disk.files import new_file, write_file, writing
from hookdiff.disk.lock import is_locked
from hookdiff.experiment.toml_file import read_toml
from hookdiff.images import Folder, Store, Transforms, feed_of
from hookdiff.log.picture import Picture
from hookdiff.models.load import check_file
from hookdiff.run_dir import History, newest_picture, picture_files, read_picture
from hookdiff.run_dir.lines import Skim, Tail
from hookdiff.run_dir.metrics_jsonl import parse_metrics
from hookdiff.testing.toy import toy_loop, toy_model
from hookdiff_array import Arrays
from hookdiff_checkpoint import Checkpoint, read_checkpoint
from hookdiff_ema import EMA
from hookdiff_ema.snapshots import find_snapshots, plan, reconstruct
from hookdiff_fid.statistics import read_statistics
from hookdiff_nan import NaN
from hookdiff_nan.record import read_record
from hookdiff_runs.cli import command as runs
from hookdiff_samples.film import frames
from hookdiff_shards import shards
from tests.conftest import pixels
from tests.data.test_fashion_mnist import idx
from tests.hostile.mutations import CONTENT, HUGE, KEPT, LINK, THINGS

Outcome = Literal[
    "refused",  # with one of the format's errors, which names the file
    "same",  # as if nothing had happened
    "made again",  # the same, after one warning that names the file
    "left out",  # what `left_out` returns
    "any",  # refused, or what is valid
]
MUTATIONS = (*CONTENT, *THINGS)


@frozen(repr=False)
class Rule:
    """The right outcomes for a damaged file."""

    outcome: Outcome = "refused"  # of mutations that are not among these:
    same: str = ""  # mutations, with ", " between them
    left: str = ""
    any: str = ""
    refused: str = ""
    left_out: Callable[[Path, Any], Any] = lambda path, good: None  # what is read then, given the damaged file
    is_valid: Callable[[Any], bool] = lambda value: True
    errors: tuple[type[Exception], ...] = (UserError,)
    named: str = "{name}"  # in messages and warnings; {name} is that of the file
    changed: Outcome = "any"  # if any bytes are others
    is_read_only: bool = True  # to read changes no file
    mutations: tuple[str, ...] = MUTATIONS

    def right(self, mutation: str) -> Outcome:
        """Return the right outcome of a mutation; a link to the file is the file, if nothing else is said."""
        kinds: dict[Outcome, str] = {"left out": self.left, "any": self.any, "refused": self.refused, "same": self.same}
        said = (outcome for outcome, those in kinds.items() if mutation in those.split(", "))
        return next(said, "same" if mutation == LINK else self.outcome)


@frozen(repr=False)
class Format:
    """A file that is damaged."""

    name: str
    make: Callable[[Path], object]  # makes all that is read, in an empty folder, which is the working directory
    file: str  # that is damaged; it may be a pattern
    read: Callable[[Path], Any]  # returns what the folder has
    rule: Rule = Rule()


# Run directories

STEP, CHECKPOINT = "nan/step-00000002-position-00000002", "run/checkpoints/step-00000004"


class Poison:
    """Makes the third loss a NaN."""

    @hookimpl(wrapper=True)
    def compute_loss(self, loop: Loop) -> Any:
        output: LossOutput = yield
        return evolve(output, loss=output.loss * math.nan) if loop.progress.position == 2 else output


class Pictures:
    """Writes a file at each step, as a plugin with no care of its own."""

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        assert loop.run_dir
        path = loop.run_dir / "samples" / f"{loop.progress.step}.png"
        with writing(path), new_file(path) as partial:
            write_file(partial, b"picture")


def run_of(run: Path, steps: int, extra: Mapping[str, object] = MappingProxyType({}), **options: Any) -> Any:
    """Return a run that writes all that a run directory can have."""
    plugins = {
        **builtin_plugins(signals=False),
        **extra,
        "ema": EMA(std=0.1, snapshot_every=2),
        "nan": NaN(policy="skip"),
        "poison": Poison(),
        "pictures": Pictures(),
        "checkpoint": Checkpoint(every=2, keep_last=2),
    }
    hparams = {"run": {"name": "a long name, so that half of the file is no TOML", "seed": 7}}
    return toy_loop(plugins, run_dir=run, steps=steps, log_every=1, hparams=hparams, **options)


def make_run(folder: Path) -> None:
    run_of(folder / "run", 4).run()


def make_lock(folder: Path) -> None:
    make_run(folder)
    (folder / "run" / ".lock").write_text("host 1\n")


def make_history(folder: Path) -> None:
    """Make a run directory with files that only readers see."""
    make_run(folder)
    distribution = {"low": 0.0, "high": 1.0, "counts": [3, 4], "nonfinite": 0}
    lines = [{"step": step, "time": 2.0, "distributions": {"w": distribution}} for step in range(4)]
    (folder / "run" / "distributions.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    panel = {"title": "", "left": 0, "top": 0, "width": 4, "height": 4, "right": 4, "down": 4, "columns": 2, "num": 4}
    for step in (1, 2):
        info = {"name": "grid", "step": step, "panels": [panel]}
        made = Picture(numpy.arange(64, dtype=numpy.uint8).reshape(8, 8), info)
        made.save(folder / "run" / "grid" / f"step-0000000{step}.png")


def bytes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: value.detach().numpy().tobytes() for name, value in tensors.items()}


def resumed(folder: Path) -> Any:
    """Return the step and the weights with which the run goes on, before its next step."""
    with run_of(folder / "run", 9, resume=True, model=toy_model(3)) as loop:
        return loop.progress.step, bytes_of(loop.model.state_dict())


def saved(folder: Path, step: int = 4) -> Any:
    state = read_checkpoint(folder / "run" / "checkpoints" / f"step-{step:08d}")
    return state["progress"]["step"], bytes_of(state["model"])


def lines_of(path: Path, good: list[Any], needs_end: bool = False) -> list[Any]:
    """Return the values of the lines in a damaged file that are as they were."""
    if not path.is_file():
        return []
    known = dict(zip(Path(KEPT).read_bytes().splitlines(), good, strict=True))
    lines = path.read_bytes().splitlines(keepends=True)
    return [known[line.strip()] for line in lines if line.strip() in known and (line.endswith(b"\n") or not needs_end)]


def row(folder: Path) -> Any:
    """Return what `hookdiff runs` shows of the run."""
    done = click.testing.CliRunner().invoke(runs, [str(folder / "run"), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    (shown,) = json.loads(done.output)
    assert shown["state"] != "damaged" or any(file in shown["problem"] for file in ("config.toml", ".jsonl"))
    return shown["state"], shown["step"], shown["loss"]


def read_config(folder: Path) -> dict[str, Any]:
    return read_toml(folder / "run" / "config.toml")


def reason(folder: Path) -> str | None:
    return History(folder / "run").outcome.reason


def tail(folder: Path) -> Tail[Any]:
    return Tail(folder / "run" / "metrics.jsonl", parse_metrics)


def newest(folder: Path) -> Path | None:
    return newest_picture(folder / "run", "grid")


def record(folder: Path) -> dict[str, bytes]:
    return bytes_of(read_record(folder / "run" / STEP).parts["model"])


def average(folder: Path) -> dict[str, bytes]:
    return bytes_of(reconstruct(plan(find_snapshots(folder / "run"), 0.1)))


def only_pixels(folder: Path) -> bytes | None:
    found = read_picture(folder / "run" / "grid" / "step-00000002.png")
    return found.tobytes() if found else None


def history(name: str) -> Callable[[Path], Any]:
    return lambda folder: getattr(History(folder / "run"), name)


def skimmed(folder: Path) -> list[Any]:
    return list(Skim(folder / "run" / "metrics.jsonl", parse_metrics).backwards())[::-1]


def sheets(folder: Path) -> list[int]:
    return [frame.step for frame in frames(picture_files(folder / "run", "grid"), 10)]


PNG, SNAPSHOT = "run/grid/step-00000002.png", "run/ema/step-00000004-std=0.1.safetensors"
NOT_READ = "without the last byte, a byte more, a bit at the end"  # of a PNG file
FIRST = lambda path, good: path.with_name("step-00000001.png")  # noqa: E731
TOML = Rule(
    same="without the last byte", any="text for numbers, another number", left="empty", left_out=lambda path, good: {}
)
SHOWN = Rule(
    "left out",
    "without the last byte, text for numbers, another number",
    left_out=lambda path, good: ("damaged", *good[1:]),
)
NO_FILES = "pipe, socket, device, zero, folder, unreadable"
NO_DAMAGE = evolve(SHOWN, outcome="same", left=f"{NO_FILES}, a link to itself")  # to the rest of what is shown
LINES = Rule("left out", any="another number", left_out=lines_of, refused=NO_FILES, errors=(OSError,))
# A line without an end is not read.
ENDED = Rule("left out", any="another number", left_out=partial(lines_of, needs_end=True))
SKIMMED = evolve(ENDED, refused=f"{NO_FILES}, gone, nothing outside, a link to itself", errors=(OSError,))
CRASHED = Rule("left out", "without the last byte", any=TOML.any, left_out=lambda path, good: ("crashed", None))
DIGEST = Rule(named="step-00000004 {name}", changed="refused")
KEPT_STEP = Rule(refused=LINK, changed="refused")
EARLIER = Rule("left out", left_out=lambda path, good: saved(path.parents[3], 2), is_read_only=False)
TENSORS = [f"{name}.safetensors" for name in ("model", "optimizers", "ema")]
RUN = [
    Format("config", make_run, "run/config.toml", history("config"), TOML),
    Format("config of a command", make_run, "run/config.toml", read_config, evolve(TOML, errors=(ConfigError,))),
    Format("config in a table", make_run, "run/config.toml", row, SHOWN),
    *(
        Format(name, make_history, f"run/{name}.jsonl", history(name), LINES)
        for name in ("metrics", "events", "texts", "distributions")
    ),
    Format("skimmed metrics", make_history, "run/metrics.jsonl", skimmed, SKIMMED),
    Format("followed metrics", make_history, "run/metrics.jsonl", lambda folder: tail(folder).read()[1], ENDED),
    Format("metrics in a table", make_run, "run/metrics.jsonl", lambda folder: row(folder)[:1], NO_DAMAGE),
    Format("events in a table", make_run, "run/events.jsonl", row, NO_DAMAGE),
    Format("outcome", make_run, "run/outcome.json", lambda folder: (row(folder)[0], reason(folder)), CRASHED),
    Format("lock", make_lock, "run/.lock", lambda folder: (is_locked(folder / "run"), row(folder)), Rule("same")),
    Format("newest picture", make_history, PNG, newest, Rule("left out", NOT_READ, left_out=FIRST)),
    Format("pixels of a picture", make_history, PNG, only_pixels, Rule("left out", NOT_READ)),
    Format("sheet of a film", make_history, PNG, sheets, Rule("left out", NOT_READ, left_out=lambda path, good: [1])),
    *(
        Format(f"{file} in a checkpoint", make_run, f"{CHECKPOINT}/{file}", saved, evolve(DIGEST, refused=LINK))
        for file in TENSORS
    ),
    Format("manifest", make_run, f"{CHECKPOINT}/manifest.json", saved, DIGEST),
    Format("manifest of a resumed run", make_run, f"{CHECKPOINT}/manifest.json", resumed, EARLIER),
    Format("weights of a resumed run", make_run, f"{CHECKPOINT}/{TENSORS[0]}", resumed, evolve(EARLIER, left=LINK)),
    *(
        Format(f"{file} of a kept step", make_run, f"run/{STEP}/{file}", record, KEPT_STEP)
        for file in ("step.json", "report.txt", "config.toml", "model.safetensors", "batch.safetensors")
    ),
    Format("snapshot of an average", make_run, SNAPSHOT, average, Rule(any="a bit at the end, gone")),
]


# Data

KINDS = {"png": "PNG", "jpg": "JPEG", "webp": "WEBP", "bmp": "BMP", "tif": "TIFF", "gif": "GIF", "tiff": "TIFF"}
KINDS["jpeg"] = "MPO"
MODES = {"PNG": ["RGB", "L", "P", "RGBA", "I;16"], "TIFF": ["RGB", "L", "P", "F", "I", "CMYK"], "JPEG": ["RGB", "CMYK"]}
RGB = numpy.random.default_rng(0).integers(0, 256, (7, 5, 6, 3), dtype=numpy.uint8)
LABELS = numpy.arange(7)
NUM = 6  # pictures in a set


def picture(kind: str, mode: str = "RGB", seed: int = 3) -> bytes:
    """Return a whole file."""
    out = io.BytesIO()
    image = Image.fromarray(pixels(seed, 24))
    if mode == "I;16":
        image = Image.fromarray(numpy.arange(576, dtype=numpy.uint16).reshape(24, 24))
    else:
        image = (image.convert("L") if mode in ("I", "F") else image).convert(mode)
    options: dict[str, Any] = {"compression": "tiff_deflate"} if kind == "tiff" else {}
    image.save(out, KINDS[kind], **options)
    return out.getvalue()


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    numpy.save(out, array, allow_pickle=True)
    return out.getvalue()


def npz(compression: int = zipfile.ZIP_DEFLATED, **members: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), content, compression)  # without the time of day
    return out.getvalue()


def member(name: str, content: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, content


def tar(*members: tuple[tarfile.TarInfo, bytes], kind: int = tarfile.USTAR_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=kind) as archive:
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def shard(kind: int = tarfile.USTAR_FORMAT, seeds: range = range(NUM)) -> bytes:
    pairs = [(member(f"{k}.png", picture("png", seed=k)), member(f"{k}.cls", b"1")) for k in seeds]
    return tar(*(each for pair in pairs for each in pair), kind=kind)


def samples(source: Any, image_size: int | None = None, **options: Any) -> Any:
    """Return all samples of a source as an array; those that are left out are missing."""
    kept = Store(**{"store": "none", "cache_dir": "cache", **options})
    feed = feed_of(source, Transforms(image_size=image_size, upscale=True), kept)
    return torch.cat([batch.inputs for batch in feed.unaugmented(feed.usable)])


def is_image(batch: Any) -> bool:
    return batch.dtype == torch.float32 and batch.shape[1] in (1, 3) and -1 <= batch.min() <= batch.max() <= 1


def in_file(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def make_set(folder: Path, kind: str = "png") -> None:
    (folder / "set").mkdir()
    for k in range(NUM):
        (folder / "set" / f"{k}.{kind}").write_bytes(picture(kind, seed=k))


def make_labels(folder: Path) -> None:
    make_set(folder)
    rows = [(f"{k}.png", k % 3) for k in range(NUM)]
    with (folder / "l.csv").open("w") as file:
        csv.writer(file).writerows([("file", "label"), *rows])
    (folder / "l.jsonl").write_text("\n".join(json.dumps({"file": name, "label": label}) for name, label in rows))


def make_arrays(folder: Path) -> None:
    (folder / "a.npy").write_bytes(npy(RGB))
    (folder / "y.npy").write_bytes(npy(LABELS))


def make_mnist(folder: Path) -> None:
    raw = folder / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        (raw / f"{part}-images-idx3-ubyte").write_bytes(idx(torch.arange(5 * 28 * 28).view(5, 28, 28) % 251))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(idx([3, 1, 9, 0, 3]))


def numpy_reads(path: Path, found: Any, name: str = "images") -> bool:
    """Return whether samples are those that numpy reads in a file of bytes."""
    if path.suffix == ".npy":
        expected = numpy.load(path)
    else:  # numpy takes a zip with a damaged first byte for another format
        expected = numpy.load(io.BytesIO(zipfile.ZipFile(path).read(f"{name}.npy")))
    if expected.dtype != numpy.uint8 or expected.shape[-1] in (2, 4):
        return True
    read = (found.double() + 1).mul(127.5).round().numpy()
    is_last = expected.ndim == 4 and expected.shape[-1] == read.shape[1] and expected.shape[1:] != read.shape[1:]
    return numpy.array_equal((read.transpose(0, 2, 3, 1) if is_last else read).reshape(expected.shape), expected)


def in_set(store: str, **options: Any) -> Any:
    return lambda folder: samples(Folder("set"), 8, store=store, **options)


def read_shard(folder: Path) -> Any:
    return samples(shards("a.tar", index_dir="index"), store="memory", unreadable="skip")


def read_mnist(folder: Path) -> Any:
    return fashion_mnist(str(folder)).images


def make_weights(folder: Path) -> None:
    save_file(toy_model().state_dict(), folder / "w.safetensors")


def read_weights(folder: Path) -> Any:
    return check_file(folder / "w.safetensors")


def read_labels(kind: str) -> Any:
    return lambda folder: feed_of(Folder("set", f"l.{kind}"), store=Store(store="none")).labels


def make_captions(folder: Path) -> None:
    make_set(folder)
    for k in range(NUM):
        (folder / "set" / f"{k}.txt").write_text(f"picture {k}\n")


def read_captions(folder: Path) -> Any:
    return list((Folder("set", captions="txt").texts or {})["text"])


def read_shard_captions(folder: Path) -> Any:
    return list((shards("a.tar", captions="cls", index_dir="index").texts or {})["text"])


def read_array(name: str) -> Any:
    return lambda folder: (Path(name), samples(Arrays(name)))


FLIPS = "a bit in the middle, a bit at the end, zeros from the middle"  # that nothing but a digest could find
HUGE_TOO = (*MUTATIONS, HUGE)
BOTH = (UserError, ValueError)  # the table [data] turns a ValueError of a source into a UserError
ARRAYS = {"images": npy(RGB), "labels": npy(LABELS)}
STATISTICS = npz(mu=npy(numpy.zeros(3)), sigma=npy(numpy.eye(3)))
MNIST = [f"FashionMNIST/raw/train-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1")]
PICTURE = Rule(
    any=f"without the last byte, {FLIPS}",
    same="a byte more",
    left="gone, folder",
    left_out=lambda path, good: torch.cat([good[:1], good[2:]]),
    is_valid=is_image,
    is_read_only=False,
)
SKIPPED = evolve(PICTURE, outcome="left out", same=NOT_READ, any="half, a bit in the middle, zeros from the middle")
CACHE = Rule("made again", named="cache", changed="made again", is_read_only=False, mutations=HUGE_TOO)
INDEX = Rule("made again", "gone", named="{name} a.tar", changed="same", is_read_only=False)
INDEX_FILE = evolve(INDEX, mutations=tuple(mutation for mutation in HUGE_TOO if mutation != "folder"))
CAPTIONS = Rule(
    "any",
    same="without the last byte",
    refused="no UTF-8, a surrogate, a bit in the middle, pipe, socket, device, zero",
    is_valid=lambda texts: texts[0] == ("picture 0",) and len(texts) == NUM,
    mutations=HUGE_TOO,
)
NO_LOCK = "pipe, socket, device, zero, folder, nothing outside, a link to itself"
NO_CACHE = Rule("same", refused=NO_LOCK, is_read_only=False, mutations=THINGS)
ARRAY = Rule(same="a byte more", errors=BOTH, is_valid=lambda read: is_image(read[1]) and numpy_reads(*read))
ZIP = evolve(ARRAY, same="a byte more, a bit at the end")
SHARD = Rule(
    any="a bit in the middle",
    same="without the last byte, huge",
    errors=BOTH,
    is_valid=is_image,
    is_read_only=False,
    mutations=HUGE_TOO,
)
DATA = [
    *(
        Format(f"{kind} in a folder", partial(make_set, kind=kind), f"set/1.{kind}", in_set(store), PICTURE)
        for kind, store in zip(KINDS, ["none", "memory", "disk"] * 3, strict=False)
    ),
    *(
        Format(f"picture left out, {store}", make_set, "set/1.png", in_set(store, unreadable="skip"), SKIPPED)
        for store in ("memory", "none", "disk")
    ),
    Format("pixels of a cache", make_set, "cache/*/pixels", in_set("disk"), CACHE),
    Format("facts of a cache", make_set, "cache/*/about.json", in_set("disk"), CACHE),
    Format("cache", make_set, "cache/*[!k]", in_set("disk"), evolve(CACHE, mutations=THINGS[1:])),  # no .lock
    Format("lock of a cache", make_set, "cache/*.lock", in_set("disk"), NO_CACHE),
    Format(
        "labels, csv",
        make_labels,
        "l.csv",
        read_labels("csv"),
        Rule(same="without the last byte", any="another number", errors=BOTH),
    ),
    Format("labels, jsonl", make_labels, "l.jsonl", read_labels("jsonl"), Rule(any="another number", errors=BOTH)),
    Format("captions, txt", make_captions, "set/1.txt", read_captions, CAPTIONS),
    Format("npy", make_arrays, "a.npy", read_array("a.npy"), evolve(ARRAY, any=FLIPS)),
    Format("stored npz", in_file("a.npz", npz(zipfile.ZIP_STORED, **ARRAYS)), "a.npz", read_array("a.npz"), ZIP),
    Format("deflated npz", in_file("a.npz", npz(**ARRAYS)), "a.npz", read_array("a.npz"), ZIP),
    Format(
        "labels, npy",
        make_arrays,
        "y.npy",
        lambda folder: Arrays("a.npy", labels="y.npy").labels,
        Rule(same="a byte more", errors=BOTH, is_valid=lambda labels: -1 <= labels.min() <= labels.max() < 2**24),
    ),
    Format(
        "statistics",
        in_file("s.npz", STATISTICS),
        "s.npz",
        lambda folder: read_statistics(Path("s.npz")).mean,
        Rule(same=ZIP.same, is_valid=lambda mean: mean.shape == (3,)),
    ),
    Format("shard, ustar", in_file("a.tar", shard(tarfile.USTAR_FORMAT)), "a.tar", read_shard, SHARD),
    Format("shard, gnu", in_file("a.tar", shard(tarfile.GNU_FORMAT)), "a.tar", read_shard, SHARD),
    Format("shard, pax", in_file("a.tar", shard(tarfile.PAX_FORMAT)), "a.tar", read_shard, SHARD),
    Format("index of a shard", in_file("a.tar", shard()), "index/*.index", read_shard, INDEX_FILE),
    Format("captions of a shard", in_file("a.tar", shard()), "index/*.captions", read_shard_captions, INDEX_FILE),
    *(
        Format(file, make_mnist, file, read_mnist, Rule(any=f"{FLIPS}, {TOML.any}", errors=BOTH, named=""))
        for file in MNIST
    ),
    Format(
        "weights to start from", make_weights, "w.safetensors", read_weights, Rule(same=FLIPS, errors=(ConfigError,))
    ),
]
FORMATS = [*RUN, *DATA]
