"""Test that latents are stored, drawn, flipped, scaled and decoded, and are the same after a resume."""

import hashlib
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import tomli
import torch
from attrs import define
from PIL import Image
from torch import Tensor
from torch.nn import functional

from hookdiff import ConfigError, InMemory, SampleRequest, UserError, load_config, load_run
from hookdiff.encoding import Encoded, PictureEncoder
from hookdiff.experiment.build import build_feed, build_loop
from hookdiff.testing import on_ranks
from tests.conftest import check_facts, check_refused, mostly_wide, refused, wide, write_small
from tests.encoding.test_texts import ENCODED, assert_ranks_train_as_one

ENCODE = '[data.encode.image]\nuse = "tests.encoding.test_latent_reader:Pooled"'
CALLS: list[tuple[int, ...]] = []  # shapes of the encoded pictures


class Pooling:
    """Means of 2 x 2 pixels, with a deviation of a tenth; decoded by repetition."""

    def encode(self, pictures: Tensor) -> tuple[Tensor, Tensor | None]:
        CALLS.append(tuple(pictures.shape))
        mean = 3 + 5 * functional.avg_pool2d(pictures, 2)
        return mean, torch.full_like(mean, 0.1)

    def decode(self, latents: Tensor) -> Tensor:
        return functional.interpolate((latents - 3) / 5, scale_factor=2)


@define(frozen=True)
class Pooled(PictureEncoder):
    """An autoencoder without weights."""

    version: int = 1

    def digest(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    def open(self, device: torch.device) -> Encoded:
        return Pooling()


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes 40 asymmetric pictures of 16 x 16 in two classes, and a config of them."""

    def write(old: str = "", new: str = "") -> Path:
        for index in range(40):
            place = tmp_path / "pictures" / "ab"[index % 2] / f"{index:02}.png"
            if place.exists():
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            image = numpy.zeros((16, 16, 3), numpy.uint8)
            image[:, : 2 + index % 13] = 6 * index
            Image.fromarray(image).save(place)
        data = {"source": "folder", "path": f"{tmp_path}/pictures", "flip": True, "cache_dir": f"{tmp_path}/cache"}
        data["encode"] = {"image": {"use": f"{__name__}:Pooled"}}
        run = {"steps": 4, "batch_size": 6, "log_every": 2, "plugins": ["checkpoint", "ema"]}
        path = write_small(tmp_path / "latents.toml", run=run, data=data)
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new) if old else text)
        CALLS.clear()
        return path

    return write


def pooled(images: Tensor) -> Tensor:
    return 3 + 5 * functional.avg_pool2d(images, 2)


def test_samples_are_encoded_once_and_the_second_start_encodes_and_opens_nothing(
    write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = build_feed(load_config(write())).bind(6, 0)
    assert [shape[0] for shape in CALLS] == [1, 1, 1, 16, 16, 8, 32, 32, 8, 8]  # trials, then chunks, both sides
    assert (feed.shape, feed.picture_shape, feed.classes) == ((3, 8, 8), (3, 16, 16), ("a", "b"))
    CALLS.clear()
    monkeypatch.setattr(Image, "open", None)
    again = build_feed(load_config(write())).bind(6, 0)
    assert (next(again.batches(0)).inputs.shape, CALLS) == ((6, 3, 8, 8), [])
    assert again.reader._samples is None  # no header was read


@pytest.mark.parametrize("store", ["memory", *wide("disk", "none")])
def test_a_batch_is_drawn_from_the_side_and_the_posterior_of_each_sample(write: Any, store: str) -> None:
    feed = build_feed(load_config(write(), settings=[f"data.store={store}"])).bind(6, 5)
    usual = build_feed(load_config(write())).bind(6, 5)
    pictures = build_feed(load_config(write(ENCODE, ""))).bind(6, 5)
    for ours, plain, same in zip(feed.batches(1), pictures.batches(1), usual.batches(1), strict=True):
        assert torch.equal(ours.inputs, same.inputs)
        assert torch.equal(ours.indices, plain.indices)
        assert torch.equal(ours.labels, plain.labels)
        noise = (ours.inputs - pooled(plain.inputs)) / 0.1
        assert 0.7 < noise.std() < 1.3
        assert noise.abs().max() < 6  # so the sides are the same
    whole = torch.arange(40)
    means = torch.cat([batch.inputs for batch in feed.unaugmented(whole)])
    torch.testing.assert_close(
        means, pooled(torch.cat([b.inputs for b in pictures.unaugmented(whole)])), atol=5e-3, rtol=0
    )


def test_the_scale_is_that_of_the_drawn_training_samples(write: Any) -> None:
    config = load_config(write(), settings=["run.steps=1", "data.held_out=8"])
    with build_loop(config, Path("unused"), hooks=()) as loop:
        seen = [batch.inputs for epoch in range(60) for batch in loop.feed.batches(epoch)]
        scaled = loop.objective.normalize(torch.cat(seen))
    assert scaled.mean((0, 2, 3)).abs().max() < 0.01
    assert (scaled.std((0, 2, 3)) - 1).abs().max() < 0.01


@pytest.mark.slow
def test_a_resumed_run_on_latents_equals_an_uninterrupted_one(write: Any, succeed: Callable[..., str]) -> None:
    assert "bit for bit" in succeed("selftest", "resume", write(), "--steps", "8")


def test_a_run_samples_pictures_without_its_data(write: Any, succeed: Callable[..., str], tmp_path: Path) -> None:
    succeed("run", write(), "--plugins", "samples", "--set", "plugins.samples.num=4", "--out", tmp_path / "run")
    loop = load_run(tmp_path / "run", trust=True).loop
    made, raw = (loop.sample(SampleRequest(4, raw=raw)).images for raw in (False, True))
    assert (made.shape, raw.shape) == ((4, 3, 16, 16), (4, 3, 8, 8))
    torch.testing.assert_close(made, Pooling().decode(raw).clamp(-1, 1))
    with Image.open(tmp_path / "run" / "samples" / "step-00000004.png") as picture:
        assert picture.size[0] > 4 * 16
    (tmp_path / "pictures").rename(tmp_path / "gone")
    succeed(
        "sample", tmp_path / "run", "--trust", "--num", "4", "--each", tmp_path / "each", "--out", tmp_path / "x.npz"
    )
    assert len([*(tmp_path / "each").iterdir()]) == 4
    with refused(ConfigError, "data.encode.image", "another encoder"):
        load_run(tmp_path / "run", ["data.encode.image.version=2"], trust=True).sample(1)


@pytest.mark.parametrize("name", ["image", *wide("small")])
def test_a_run_does_not_go_on_with_another_encoder(
    write: Any, hookdiff: Callable[..., Any], succeed: Callable[..., str], tmp_path: Path, name: str
) -> None:
    succeed("run", write("encode.image", f"encode.{name}"), "--out", tmp_path / "run")
    done = hookdiff("resume", tmp_path / "run", "--steps", "6", "--trust", "--set", f"data.encode.{name}.version=2")
    check_refused(done, f"data.encode.{name}", "another encoder", Pooled(1).digest(), Pooled(2).digest())
    succeed("resume", tmp_path / "run", "--steps", "6", "--trust")


def test_pictures_to_start_from_are_encoded_and_what_is_known_stays(write: Any, tmp_path: Path) -> None:
    with build_loop(load_config(write()), Path("unused"), hooks=("sample",)) as loop:
        images = loop.feed.pictures.examples(lambda num: range(2)).inputs
        mask = torch.zeros(2, 1, 16, 16, dtype=torch.bool)
        mask[:, :, :, 9:] = True
        made = loop.sample(SampleRequest(2, images=images, mask=mask, strength=1.0)).images
    assert torch.equal(made[..., :9], images[..., :9])
    assert not torch.equal(made[..., 9:], images[..., 9:])


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        (["data.color_jitter=[0.1, 0.0, 0.0, 0.0]"], ("color_jitter", "encoded once")),
        (["data.image_size=4", "data.resize=6"], ("resize", "random crop")),
        (["sampling.clipping=clamp"], ("sampling.clipping", "clamp", "none")),
        (["data.encode.image.verison=2"], ("data.encode.image.verison", "'version'")),
    ],
)
def test_what_does_not_fit_is_refused(write: Any, settings: list[str], facts: tuple[str, ...]) -> None:
    path = write()
    with refused(UserError, *facts):
        build_feed(load_config(path, settings=settings))
    assert CALLS == []


class OddPooling(Pooling):
    """Returns wrong latents, of the kind that `name` says."""

    def __init__(self, name: str) -> None:
        self.name = name

    def encode(self, pictures: Tensor) -> Any:
        mean, std = super().encode(pictures)
        is_large = len(pictures) > 1
        is_bright = pictures.amax((1, 2, 3), keepdim=True) > 0.8
        return {
            "tensor": mean,
            "numpy": (mean.numpy(), None),
            "one row": (mean[:1], None),
            "int64": (mean.long(), None),
            "other deviation": (mean, std[:, :1]),
            "sometimes": (mean, std if is_large else None),
            "nan": (mean.where(~is_bright, torch.nan), std),
            "vast": [torch.zeros(1).expand(len(pictures), 4, 1024, 1024)] * 2,
        }.get(self.name, (mean, std))

    def decode(self, latents: Tensor) -> Tensor:
        return torch.zeros(len(latents), 3, 16, 16) if self.name == "vast" else super().decode(latents)


@define(frozen=True)
class OddPictures(PictureEncoder):
    """An encoder with a mistake."""

    name: str = ""

    def digest(self) -> Any:
        return 3 if self.name == "digest" else "odd"

    def open(self, device: torch.device) -> Encoded:
        return OddPooling(self.name)


WRONG = [
    ("tensor", ("Tensor", "pair")),
    ("numpy", ("'mean' of n = 1", "ndarray", "tensor")),
    ("one row", ("'mean' of n = 16", "(1, 3, 8, 8)", "n rows")),
    ("int64", ("'mean'", "int64", "float")),
    ("other deviation", ("deviation", "(1, 8, 8)", "(3, 8, 8)")),
    ("sometimes", ("'std' (3, 8, 8) float16", "digest 'odd'")),
    ("digest", ("digest()", "3", "string")),
]


@pytest.mark.parametrize(("name", "facts"), WRONG)
def test_what_an_encoder_returns_is_checked(write: Any, name: str, facts: tuple[str, ...]) -> None:
    path = write("Pooled", "OddPictures")
    with refused(ConfigError, "data.encode.image: OddPictures", "expected", *facts):
        build_feed(load_config(path, settings=[f"data.encode.image.name={name}"]))


class WithMasks:
    """Pictures with masks, which are asymmetric, and no fingerprint."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = torch.zeros(3, 16, 16, dtype=torch.uint8)
        image[:, :, : 2 + index] = 200
        return {"image": image, "label": index % 3, "mask": image[:1]}


def test_masks_and_a_second_encoder_are_flipped_with_the_inputs(write: Any, caplog: pytest.LogCaptureFixture) -> None:
    settings = [f"data.source={__name__}:WithMasks", "data.encode.means.use=" + f"{__name__}:Pooled"]
    path = write()
    path.write_text(re.sub("^path = .*\n", "", path.read_text(), flags=re.M))
    feed = build_feed(load_config(path, settings=settings)).bind(5, 3)
    assert "no fingerprint" in caplog.text
    path.write_text(path.read_text().replace(ENCODE, ""))
    pictures = build_feed(load_config(path, settings=settings[:1])).bind(5, 3)
    assert sorted(feed.labels.tolist()) == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    flips = set()
    for ours, plain in zip(feed.batches(2), pictures.batches(2), strict=True):
        assert torch.equal(ours.labels, plain.labels)
        assert torch.equal(ours.conditions["mask"], plain.conditions["mask"])
        for latents in (ours.inputs, ours.conditions["means"]):
            assert (latents - pooled(plain.inputs)).abs().max() < 0.6
        assert not torch.equal(ours.inputs, ours.conditions["means"])  # each draws for itself
        flips |= {bool(one[0, 0, 0] < 0) for one in plain.conditions["mask"]}
    assert flips == {False, True}


@pytest.mark.parametrize("store", ["memory", *wide("none")])
def test_pictures_may_be_trained_on_beside_an_encoded_condition(write: Any, store: str) -> None:
    path = write("encode.image", "encode.means")
    feed = build_feed(load_config(path, settings=[f"data.encode.means.store={store}"])).bind(6, 5)
    path.write_text(path.read_text().replace(ENCODE.replace("image", "means"), ""))
    assert (feed.codec, feed.shape, feed.are_pictures) == (None, (3, 16, 16), True)
    for ours, plain in zip(feed.batches(1), build_feed(load_config(path)).bind(6, 5).batches(1), strict=True):
        assert torch.equal(ours.inputs, plain.inputs)
        assert (ours.conditions["means"] - pooled(plain.inputs)).abs().max() < 0.6


@pytest.mark.parametrize("store", ["memory", *wide("none")])
def test_a_picture_that_cannot_be_decoded_is_left_out(write: Any, tmp_path: Path, store: str) -> None:
    path = write()
    broken = tmp_path / "pictures" / "a" / "38.png"  # the last of its class
    content = bytearray(broken.read_bytes())
    content[50] ^= 255  # a byte of the pixels
    broken.write_bytes(content)
    for _ in range(2):  # encoded, then from the table
        feed = build_feed(load_config(path, settings=["data.unreadable=skip", f"data.store={store}"])).bind(6, 0)
        seen = {int(index) for batch in feed.batches(0) for index in batch.indices}
        assert not any("38.png" in feed.describe(index) for index in seen)
        for batch in feed.batches(0):
            assert [feed.classes[label] for label in batch.labels] == [
                Path(feed.describe(int(index))).parent.name for index in batch.indices
            ]
        assert store == "none" or len(feed.usable) == 39


class Items:
    """Pictures with a condition and two numbers; either number may be the label."""

    def __init__(self, dtype: str = "float32") -> None:
        self.dtype = getattr(torch, dtype)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "image": torch.full((3, 16, 16), 10 * index, dtype=torch.uint8),
            "label": index % 2,
            "kind": index % 3,
            "size": torch.full((2,), index, dtype=self.dtype),
        }

    def fingerprint(self) -> str:
        return f"items of {self.dtype}"


def kept_items(value: float = 0.0) -> InMemory:
    """Return the same pictures with a condition of `value`."""
    return InMemory(torch.zeros(12, 3, 16, 16, dtype=torch.uint8), conditions={"size": torch.full((12, 2), value)})


def source(path: Path, name: str) -> Path:
    """Let the config at `path` train on a source of this module."""
    path.write_text(
        re.sub("^source = .*\npath = .*\n", f'source = "{__name__}:{name}"\n', path.read_text(), flags=re.M)
    )
    return path


def test_what_the_samples_have_beside_their_pictures_is_that_of_the_config(write: Any) -> None:
    path = source(write(), "Items")
    for _ in range(2):
        for settings, classes in (((), 2), (("data.label_key=kind",), 3)):
            assert build_feed(load_config(path, settings=settings)).labels.tolist() == [i % classes for i in range(12)]
    path = source(write(), "kept_items")
    for value in (1.0, 2.0, 1.0):
        feed = build_feed(load_config(path, settings=[f"data.value={value}"])).bind(6, 0)
        assert next(feed.batches(0)).conditions["size"].eq(value).all()


@pytest.mark.parametrize("dtype", mostly_wide(1, ["float64", "int32", "bool"]))
def test_a_condition_beside_encoded_pictures_keeps_its_dtype(write: Any, dtype: str) -> None:
    path = source(write(), "Items")
    for _ in range(2):
        batch = next(build_feed(load_config(path, settings=[f"data.dtype={dtype}"])).bind(6, 0).batches(0))
        assert batch.conditions["size"].dtype == getattr(torch, dtype)
        assert torch.equal(batch.conditions["size"][:, 0], batch.indices.to(getattr(torch, dtype)))
    assert len(CALLS) == 6  # trials and one chunk, both sides, of the first start


def test_a_condition_that_no_table_holds_is_refused_before_anything_is_encoded(write: Any) -> None:
    path = source(write(), "Items")
    with refused(ConfigError, "conditions", "'size'", "bfloat16", "float16"):
        build_feed(load_config(path, settings=["data.dtype=bfloat16"]))
    assert len(CALLS) == 3  # trials


@pytest.mark.parametrize("store", ["memory", *wide("none")])
def test_a_sample_that_becomes_not_finite_is_named(write: Any, tmp_path: Path, store: str) -> None:
    path = write("Pooled", "OddPictures")
    with refused(UserError, "data.encode.image", "39.png", "mean", "not finite"):
        feed = build_feed(load_config(path, settings=[f"data.store={store}", "data.encode.image.name=nan"])).bind(6, 0)
        [*feed.unaugmented(torch.arange(40))]
    assert not [*tmp_path.glob("cache/encoded/*/about.json")]


class Many:
    """A million samples, which are pictures of 16 x 16."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(3, 16, 16)

    def fingerprint(self) -> str:
        return "many"


def test_a_table_without_room_is_refused_before_anything_is_encoded(write: Any) -> None:
    path = source(write("Pooled", "OddPictures"), "Many")
    with refused(ConfigError, "data", "needs", "31,250.0 GiB", "are free"):
        build_feed(load_config(path, settings=["data.encode.image.name=vast"]))
    assert len(CALLS) == 3  # trials


@pytest.fixture
def shards(write: Any, succeed: Callable[..., str], tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes the latents of a config as shards, and a config that trains on the shards."""

    def shards(*extra: str, without: str = "", keys: str = "", diffusion: str = "") -> Path:
        path = write(without)
        path.write_text(path.read_text().replace("[diffusion]", f"[diffusion]\n{diffusion}"))
        path.write_text(path.read_text().replace("flip = true", f"flip = true\n{keys}"))
        path.write_text(path.read_text().replace("[model]", "\n".join([*extra, "[model]"])))
        printed = succeed("data", path, "--to-shards", tmp_path / "shards", "--shard-size", "0.05")
        before, _, after = path.read_text().partition("[data]")
        made = tmp_path / "made.toml"
        made.write_text(before + printed[printed.index("[data]") :] + after[after.index("[model]") :])
        CALLS.clear()
        return made

    return shards


@pytest.mark.parametrize("store", ["memory", *wide("none")])
@pytest.mark.parametrize("name", ["image", "small"])
def test_shards_of_what_was_encoded_train_as_the_pictures_do(
    write: Any, shards: Any, tmp_path: Path, store: str, name: str
) -> None:
    both = '[data.encode.small]\nuse = "tests.encoding.test_latent_reader:Pooled"\nversion = 2\n'
    made = shards(both, diffusion='conditions = ["small"]') if name == "small" else shards()
    pictures = build_feed(load_config(tmp_path / "latents.toml")).bind(6, 5)
    CALLS.clear()
    ours = build_feed(load_config(made, settings=[f"data.store={store}"])).bind(6, 5)
    assert ours.reader.scale(ours.training) == pictures.reader.scale(pictures.training)
    assert_same_batches(ours, pictures)
    assert CALLS == []


def assert_same_batches(ours: Any, pictures: Any) -> None:
    assert (ours.shape, ours.picture_shape, ours.classes) == (pictures.shape, pictures.picture_shape, pictures.classes)
    for one, other in zip(ours.batches(1), pictures.batches(1), strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.labels, other.labels)
        assert one.conditions.keys() == other.conditions.keys()
        assert all(torch.equal(one.conditions[key], other.conditions[key]) for key in one.conditions)


@pytest.mark.parametrize("of_pictures", [ENCODE, ""], ids=["latents", "pictures"])
def test_captions_are_in_the_shards_as_the_source_has_them(
    write: Any, shards: Any, tmp_path: Path, of_pictures: str
) -> None:
    write()
    for index in range(39):  # the last picture has none
        lines = [f"ü {index}", *[f"{index} of a picture"] * (index % 3 == 0)]
        (tmp_path / "pictures" / "ab"[index % 2] / f"{index:02}.txt").write_text("\n".join(lines), "utf-8")
    text = '[data.encode.text]\nuse = "tests.encoding.test_texts:Bytes"'
    keys = 'captions = "txt"\nprefix = "a "\nmissing = "empty"'
    ENCODED.clear()
    made = shards(text, *[ENCODE] * bool(of_pictures), without=ENCODE, keys=keys)
    assert ENCODED == []
    table = tomli.loads(made.read_text())["data"]
    assert (table["source"], table["captions"], table["prefix"]) == ("shards", "txt", "a ")
    assert table["encode"]["text"]["use"] == "tests.encoding.test_texts:Bytes"
    with tarfile.open(tmp_path / "shards" / "shard-000000.tar") as tar:
        member = tar.extractfile("000000000.txt")
        assert member is not None
        assert member.read() == "ü 0\n0 of a picture".encode()
    assert_same_batches(*(build_feed(load_config(path)).bind(6, 5) for path in (made, tmp_path / "latents.toml")))


@pytest.mark.wide
def test_a_run_on_shards_of_latents_samples_pictures_and_asks_for_a_reference(
    shards: Any, hookdiff: Callable[..., Any], succeed: Callable[..., str], tmp_path: Path
) -> None:
    succeed("run", shards(), "--out", tmp_path / "run")
    shutil.rmtree(tmp_path / "shards")
    assert load_run(tmp_path / "run", trust=True).sample(2).shape == (2, 3, 16, 16)


BAD_ENCODED = [
    ("data.encode.image.version=3", ("data: encode.image", "another encoder")),
    ("data.image_size=32", ("data: image_size", "3 x 16 x 16")),
    ("data.encoded=false", ("no pictures", "set encoded = true")),
    ("data.conditions={}", ("conditions", 'add "image.std" = "image.std.npy"')),
    ("plugins.fid.features=tests.plugins.test_autoencoder:mean_colours", ("fid", "reference")),
    ("plugins.diversity.features=tests.plugins.test_autoencoder:mean_colours", ("diversity", "data.encoded")),
]


@pytest.mark.parametrize("bad", [BAD_ENCODED[:4], *wide(BAD_ENCODED[4:])])
def test_encoded_samples_that_do_not_fit_are_refused(
    shards: Any, hookdiff: Callable[..., Any], tmp_path: Path, bad: list[tuple[str, tuple[str, ...]]]
) -> None:
    path = shards()
    for setting, facts in bad:
        extra = [word for name in ("fid", "diversity") if name in setting for word in ("--plugins", name)]
        check_refused(hookdiff("run", path, *extra, "--set", setting, "--out", tmp_path / "r"), *facts)


def batch_of(path: Path) -> Tensor:
    return next(build_feed(load_config(path)).bind(6, 0).batches(0)).inputs


def test_a_table_with_one_wrong_byte_is_made_again(
    write: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = batch_of(write())
    (table,) = (tmp_path / "cache" / "encoded").glob("*/mean")
    content = bytearray(table.read_bytes())
    content[len(content) // 2] ^= 1
    table.write_bytes(content)
    assert torch.equal(batch_of(write()), first)
    check_facts(caplog.text, "damaged", "made again", table.parent)


def test_two_ranks_share_the_work_and_write_the_same_file(write: Any, tmp_path: Path) -> None:
    def contents_of_table() -> list[bytes]:
        (table,) = (tmp_path / "cache" / "encoded").glob("*/about.json")
        return [file.read_bytes() for file in sorted(table.parent.iterdir())]

    path = write()
    alone = batch_of(path)
    known = contents_of_table()
    shutil.rmtree(tmp_path / "cache")
    CALLS.clear()
    batches = on_ranks(2, lambda rank: batch_of(path))
    assert contents_of_table() == known
    assert sorted(shape[0] for shape in CALLS) == [1, 1, 1, 1, 8, 8, 8, 16, 16, 32, 32]  # each once, after trials
    assert torch.equal(torch.stack(batches, 1).flatten(0, 1), alone)  # the samples alternate


@pytest.mark.wide
def test_two_ranks_train_on_latents_as_one_does(write: Any, tmp_path: Path) -> None:
    assert_ranks_train_as_one(write(), tmp_path)


class Latents:
    """Means that another program has made, of pictures of 16 x 16."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((3, 8, 8), float(index)), index % 2


@pytest.mark.parametrize("store", ["memory", *wide("none")])
def test_means_of_another_program_are_trained_on_and_decoded(write: Any, store: str) -> None:
    path = source(write(), "Latents")
    settings = ["data.encoded=true", f"data.store={store}"]
    with refused(ConfigError, "data: flip", "mirror images"):
        build_feed(load_config(path, settings=settings))
    feed = build_feed(load_config(path, settings=[*settings, "data.flip=false"])).bind(6, 0)
    batch = next(feed.batches(0))
    assert torch.equal(batch.inputs[:, 0, 0, 0], batch.indices.float())
    assert torch.equal(batch.labels, batch.indices % 2)
    assert feed.picture_shape == (3, 16, 16)
