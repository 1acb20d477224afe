"""`hookdiff data` on pictures in several sizes: the report, the picture, and shards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from hookdiff import load_config
from hookdiff.data import Feed
from hookdiff.experiment.build import build_feed
from hookdiff.log import panel_layouts, read_info
from tests.conftest import check_refused

# Width and height of the pictures, how many there are, the size that they get, and the share that is cut off. The side
# 32 has the sizes 44x24, 40x24, 36x28, 32x32 and their transposes.
KINDS = [
    (44, 24, 7, "44x24", 0.0),
    (88, 50, 3, "44x24", 1 - 48 / 50),
    (60, 60, 3, "32x32", 0.0),
    (24, 60, 1, "24x44", 1 - 44 / 60),
]
CONFIG = """
[run]
steps = 2
batch_size = 4
device = "cpu"
plugins = []
[data]
source = "folder"
path = "pictures"
labels = "none"
image_size = 32
buckets = true
cache_dir = "cache"
[model]
use = "dit"
patch_size = 4
hidden_size = 16
depth = 1
num_heads = 2
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    (tmp_path / "pictures").mkdir()
    (tmp_path / "config.toml").write_text(CONFIG)
    number, generator = 0, torch.Generator().manual_seed(0)
    for width, height, count, *_ in KINDS:
        for _ in range(count):
            pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(tmp_path / "pictures" / f"{number:02}.png")
            number += 1
    return tmp_path


def report(succeed: Any, *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(succeed("data", "config.toml", "--json", "--seconds", "0", *words))
    return found


def test_the_report_has_what_is_in_each_size_and_what_is_cut_off(succeed: Any) -> None:
    found = report(succeed)["buckets"]
    rows = {row.pop("size"): row for row in found.pop("sizes")}
    assert [*rows] == ["44x24", "32x32", "24x44"]
    for size, row in rows.items():
        own = [(count, cut) for _, _, count, of, cut in KINDS if of == size]
        total = sum(count for count, _ in own)
        mean = sum(count * cut for count, cut in own) / total
        assert row == {"training": total, "held_out": 0, "batches": total / 4, "cut_off": pytest.approx(mean, abs=1e-9)}
    assert found == {
        "cut_off": pytest.approx(sum(count * cut for *_, count, _, cut in KINDS) / 14, abs=1e-9),
        "worst": {"name": "pictures/13.png", "cut_off": pytest.approx(1 - 44 / 60)},
        "enlarged": 0,
        "below_batch_size": ["32x32", "24x44"],
    }


def test_held_out_enlarged_and_smaller_batches_are_counted(succeed: Any) -> None:
    options = ("data.held_out=5", "data.drop_last=false", "data.upscale=true", "data.image_size=64")
    found = report(succeed, *(word for option in options for word in ("--set", option)))["buckets"]
    rows = {row["size"]: row for row in found["sizes"]}
    assert found["enlarged"] == 7 + 3 + 1  # 60x60 are too small, too, 88x50 are not
    assert (sum(row["training"] for row in rows.values()), sum(row["held_out"] for row in rows.values())) == (9, 5)
    assert all(row["batches"] == -(-row["training"] // 4) for row in rows.values())


def test_golden_lines_of_a_report(succeed: Any) -> None:
    lines = succeed("data", "config.toml", "--seconds", "0", "--out", "drawn.png").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("buckets"))
    assert lines[start : start + 7] == [
        "buckets      3 sizes; 2.76% of the pixels are cut off, of the worst picture 26.7%: pictures/13.png",
        "             size             training       held out  batches/epoch        cut off",
        "             44x24                  10              0           2.50           1.2%",
        "             32x32                   3              0           0.75             0%",
        "             24x44                   1              0           0.25          26.7%",
        "             with fewer pictures to train on than batch_size: 32x32, 24x44",
        "enlarged     0",
    ]
    assert any(line.startswith("inputs       3 x height x width, from -1") for line in lines)
    assert lines[-1] == "picture      drawn.png: 12 images of epoch 0, a row of each size"


def test_the_picture_has_a_row_of_each_size(succeed: Any) -> None:
    found = report(succeed, "--out", "drawn.png", "--set", "data.flip=1.0")["picture"]
    assert found == {"path": "drawn.png", "images": 8 + 3 + 1, "sizes": ["44x24", "32x32", "24x44"], "labels": []}
    with Image.open("drawn.png") as picture:
        panels = [*panel_layouts(read_info(picture))]
        first = picture.crop(panels[0].box(0)).convert("RGB")
    assert [(panel.title, panel.num) for panel in panels] == [("44x24: 10", 8), ("32x32: 3", 3), ("24x44: 1", 1)]
    with Image.open("pictures/00.png") as original:
        mirrored = _pixels(original.transpose(Image.Transpose.FLIP_LEFT_RIGHT))  # augmented, as in training
    twice = torch.nn.functional.interpolate(mirrored, scale_factor=2, mode="bicubic").round().clamp(0, 255)
    assert torch.equal(_pixels(first), twice)


def _pixels(image: Image.Image) -> torch.Tensor:
    content = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return content.view(1, image.height, image.width, 3).permute(0, 3, 1, 2).float()


@pytest.mark.parametrize("store", ["memory", "disk", "none"])
def test_the_bytes_of_the_store_are_those_of_all_sizes(succeed: Any, folder: Path, store: str) -> None:
    found = report(succeed, "--set", f"data.store={store}")["store"]
    pixels = 3 * (10 * 44 * 24 + 3 * 32 * 32 + 44 * 24)
    assert found["place"] == store
    assert found["bytes"] == (0 if store == "none" else pixels)
    assert found["path"] == ("cache" if store == "disk" else None)
    if store == "disk":
        reader = opened(store=store).reader
        assert reader.prepared.bytes_on_disk == pixels
        assert sum(path.stat().st_size for path in (folder / "cache").glob("*/pixels")) == pixels


def test_pictures_of_other_sizes_are_no_duplicates(succeed: Any, folder: Path) -> None:
    for number, size in enumerate([(44, 24), (24, 44), (44, 24)]):
        Image.new("RGB", size, "white").save(folder / "pictures" / f"white{number}.png")
    duplicates = report(succeed)["duplicates"]
    assert duplicates == {"count": 1, "groups": [["pictures/white0.png", "pictures/white2.png"]]}


def opened(text: str = CONFIG, **keys: str) -> Feed:
    Path("opened.toml").write_text(text)
    config = load_config(Path("opened.toml"), (), [f"data.{key}={value}" for key, value in keys.items()])
    return build_feed(config).bind(4)


@pytest.mark.parametrize("store", ["memory", "disk", "none"])
def test_pictures_in_shards_come_back_in_their_sizes(succeed: Any, store: str) -> None:
    written = succeed("data", "config.toml", "--to-shards", "out", "--shard-size", "0.02")
    _, _, table = written.partition("[data]")
    head, _, rest = CONFIG.partition("[data]")
    text = f"{head}[data]{table}\n[model]{rest.partition('[model]')[2]}"
    known, read = opened(), opened(text, store=store)
    assert len([*Path("out").glob("*.tar")]) > 1
    assert read.by_shape is not None
    for epoch in range(2):
        for one, other in zip(known.batches(epoch), read.batches(epoch), strict=True):
            assert torch.equal(one.inputs, other.inputs)
    assert read.by_shape.counts == {(3, 24, 44): 10, (3, 32, 32): 3, (3, 44, 24): 1}


def save_for_huggingface(folder: Path) -> str:
    from datasets import Dataset, Image as Column

    names = [str(path) for path in sorted((folder / "pictures").iterdir())]
    Dataset.from_dict({"image": names}).cast_column("image", Column()).save_to_disk(str(folder / "saved"))
    return 'source = "huggingface"\npath = "saved"'


def save_for_torchvision(folder: Path) -> str:
    (folder / "classes").mkdir()
    (folder / "pictures").rename(folder / "classes" / "a")
    return 'source = "torchvision:ImageFolder"\nroot = "classes"'


@pytest.mark.parametrize("save", [save_for_huggingface, save_for_torchvision])
@pytest.mark.parametrize("store", ["memory", "none"])
def test_other_sources_give_the_same_samples(folder: Path, save: Callable[[Path], str], store: str) -> None:
    batches = [*opened().batches(0)]
    text = CONFIG.replace('source = "folder"\npath = "pictures"\nlabels = "none"', save(folder))
    for one, other in zip(batches, opened(text, store=store, workers="1").batches(0), strict=True):
        assert torch.equal(one.inputs, other.inputs)


def test_latents_of_several_sizes_have_no_report(hookdiff: Any, succeed: Any, folder: Path) -> None:
    encoder = '[data.encode.image]\nuse = "tests.encoding.test_latent_reader:Pooled"\n'
    (folder / "config.toml").write_text(CONFIG + encoder)
    keys = succeed("data", "config.toml", "--to-shards", "out", "--trust").partition("[data]")[2]
    head, tail = CONFIG.partition("[data]")[0], CONFIG[CONFIG.index("[model]") :]
    (folder / "config.toml").write_text(f"{head}[data]{keys}\n{tail}")
    result = hookdiff("data", "config.toml", "--trust")
    check_refused(result, "data.encoded", "latents of pictures in several sizes", "the config with the pictures")


def test_an_array_has_one_size(folder: Path) -> None:
    numpy.save(folder / "array.npy", numpy.zeros((6, 40, 60, 3), numpy.uint8))
    feed = opened(CONFIG.replace('"folder"\npath = "pictures"\nlabels = "none"', '"array"\npath = "array.npy"'))
    assert feed.shapes == [(3, 24, 40)]


def test_pictures_of_several_sizes_are_not_written_with_latents_beside_them(hookdiff: Any, folder: Path) -> None:
    encoder = '[data.encode.depth]\nuse = "autoencoder"\npath = "vae"\n'
    (folder / "config.toml").write_text(CONFIG + encoder)
    check_refused(hookdiff("data", "config.toml", "--to-shards", "out"), "--to-shards", "data.encode.depth", "buckets")
    assert not (folder / "out").exists()
