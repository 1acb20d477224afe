"""Latents of pictures in several sizes: a table each, the same batches on any ranks and in any store, exact resume."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from hookdiff import ConfigError, load_config
from hookdiff.experiment.build import build_feed
from tests.conftest import Succeed, wide, write_small
from tests.encoding.test_latent_reader import CALLS, ENCODE, pooled
from tests.encoding.test_texts import assert_ranks_train_as_one, done, train_config

SIDES = [(32, 32), (40, 24), (24, 40), (64, 64), (45, 27)]  # width, height


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Write 25 asymmetric pictures of five sizes in two classes, and a config that trains on their latents."""
    for index in range(25):
        place = tmp_path / "pictures" / "ab"[index % 2] / f"{index:02}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        width, height = SIDES[index % 5]
        image = numpy.zeros((height, width, 3), numpy.uint8)
        image[:, : 2 + index % 13] = 9 * index
        Image.fromarray(image).save(place)
    data: dict[str, Any] = {"source": "folder", "path": f"{tmp_path}/pictures", "cache_dir": f"{tmp_path}/cache"}
    data |= {"image_size": 32, "buckets": True, "flip": True}
    data["encode"] = {"image": {"use": "tests.encoding.test_latent_reader:Pooled"}}
    run = {"steps": 10, "batch_size": 4, "log_every": 2, "plugins": ["checkpoint", "ema"]}
    CALLS.clear()
    return write_small(tmp_path / "latents.toml", run=run, data=data)


def tables(path: Path) -> set[str]:
    return {each.name for each in (path.parent / "cache" / "encoded").iterdir() if each.is_dir()}


def contents(path: Path) -> dict[str, bytes]:
    """Return the files of all tables."""
    folder = path.parent / "cache" / "encoded"
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def test_a_table_a_size_is_made_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = build_feed(load_config(path)).bind(4, 0)
    assert (feed.shape, feed.picture_shape) == ((3, 16, 16), (3, 32, 32))
    assert {*feed.shapes} == {(3, 16, 16), (3, 12, 20), (3, 20, 12)}
    assert feed.shapes[0] == (3, 12, 20) or feed.by_shape.counts[3, 16, 16] == 10
    before = tables(path)
    assert len(before) == 3
    CALLS.clear()
    monkeypatch.setattr(Image, "open", None)
    again = build_feed(load_config(path)).bind(4, 0)
    assert len(list(again.batches(0))) == again.num_batches()
    assert CALLS == []  # nothing is encoded, and no header is read
    monkeypatch.undo()
    changed = build_feed(load_config(path, settings=["data.bucket_step=8"])).bind(4, 0)
    assert changed.num_batches() > 0
    assert len(tables(path) - before) == 0  # 40x24 and 24x40 are there with a step of 8, too
    assert CALLS == []


@pytest.mark.parametrize("store", ["memory", *wide("disk", "none")])
def test_a_batch_has_the_latents_of_its_pictures(path: Path, store: str) -> None:
    feed = build_feed(load_config(path, settings=[f"data.store={store}"])).bind(4, 5)
    config = load_config(path)
    pictures = build_feed(config, encode=False).bind(4, 5)
    for ours, plain in zip(feed.batches(1), pictures.batches(1), strict=True):
        assert torch.equal(ours.indices, plain.indices)
        assert torch.equal(ours.labels, plain.labels)
        noise = (ours.inputs - pooled(plain.inputs)) / 0.1
        assert 0.7 < noise.std() < 1.3
        assert noise.abs().max() < 6  # so the sides are the same


@pytest.mark.parametrize("encodes", wide(True, False))
def test_ranks_train_as_one_and_make_the_same_tables(path: Path, tmp_path: Path, encodes: bool) -> None:
    if not encodes:
        path.write_text(path.read_text().replace(ENCODE, ""))
    loss = assert_ranks_train_as_one(path, tmp_path)
    alone = contents(path) if encodes else None
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    three = done(tmp_path, 3, train_config, {"path": path, "plugins": ("ddp",), "out": tmp_path / "three"})
    assert three["loss"] == pytest.approx(loss, rel=1e-5)
    assert not encodes or contents(path) == alone


def test_a_size_that_does_not_fit_the_encoder_is_refused_with_the_step(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.bucket_step must be multiples of 2, .* nearest: 40x24"):
        build_feed(load_config(path, settings=["data.buckets=['32x32', '40x25']", "data.upscale=true"]))


def test_an_interrupted_table_does_not_lose_the_others(path: Path) -> None:
    build_feed(load_config(path))
    kept = {name: (path.parent / "cache" / "encoded" / name / "about.json").stat().st_mtime_ns for name in tables(path)}
    gone = min(kept)
    (path.parent / "cache" / "encoded" / gone / "about.json").write_text("broken")
    CALLS.clear()
    build_feed(load_config(path))
    now = {name: (path.parent / "cache" / "encoded" / name / "about.json").stat().st_mtime_ns for name in tables(path)}
    assert {name for name in now if now[name] != kept.get(name)} == {gone}


@pytest.mark.parametrize("store", ["memory", *wide("none")])
def test_shards_of_latents_list_the_size_of_each_sample(path: Path, succeed: Succeed, store: str) -> None:
    before = build_feed(load_config(path)).bind(4, 3)
    printed = succeed("data", path, "--to-shards", path.parent / "shards")
    text = path.read_text()
    encode = text[text.index("[data.encode.image]") :].partition("\n\n")[0]
    head, tail = text.partition("[data]")[0], text[text.index("[model]") :]
    keys = printed[printed.index("[data]") :].replace("[data]", f'[data]\nstore = "{store}"')
    path.write_text(head + keys.partition("[data.encode")[0] + f"\n{encode}\n\n{tail}")
    after = build_feed(load_config(path)).bind(4, 3)
    assert (after.shape, after.picture_shape, after.shapes) == (before.shape, before.picture_shape, before.shapes)
    for epoch in range(2):
        for ours, theirs in zip(after.batches(epoch), before.batches(epoch), strict=True):
            assert torch.equal(ours.indices, theirs.indices)
            assert torch.equal(ours.inputs, theirs.inputs)
    with pytest.raises(ConfigError, match="leave out buckets and image_size"):
        build_feed(load_config(path, settings=["data.image_size=32", "data.buckets=true"]))


@pytest.mark.parametrize("buckets", [False, True])
def test_several_sides_are_encoded(path: Path, buckets: bool) -> None:
    settings = ["data.image_size=[16, 32]", f"data.buckets={str(buckets).lower()}"]
    feed = build_feed(load_config(path, settings=settings)).bind(4, 0)
    assert feed.shape == (3, 16, 16)
    assert {(3, 8, 8), (3, 16, 16)} & {*feed.shapes}
    assert len(list(feed.batches(0))) == feed.num_batches()


def test_a_size_whose_pictures_are_all_broken_is_left_out(path: Path) -> None:
    for index in range(4, 25, 5):  # all of 45 x 27
        place = path.parent / "pictures" / "ab"[index % 2] / f"{index:02}.png"
        image = numpy.random.default_rng(0).integers(0, 255, (70, 32, 3), dtype=numpy.uint8)
        Image.fromarray(image).save(place)
        place.write_bytes(place.read_bytes()[:2000])
    settings = ["data.unreadable='skip'", "data.buckets=['32x32', '40x24', '24x40', '24x52']"]
    for store in ("memory", "none"):
        own = [*settings, f"data.encode.image.store='{store}'"]
        feed = build_feed(load_config(path, settings=own)).bind(4, 0)
        for epoch in range(5):
            assert all(batch.inputs.isfinite().all() for batch in feed.batches(epoch))
        if store == "memory":
            used = {int(Path(feed.describe(index)).stem) for index in feed.usable.tolist()}
            assert used == {*range(25)} - {*range(4, 25, 5)}


def test_a_rare_size_that_does_not_fit_is_refused_without_a_table_too(path: Path) -> None:
    settings = ["data.encode.image.store='none'", "data.buckets=['32x32', '40x25']", "data.upscale=true"]
    with pytest.raises(ConfigError, match=r"in data.buckets; nearest: 40x24"):
        build_feed(load_config(path, settings=settings))


def test_the_scale_is_measured_in_full_batches(path: Path) -> None:
    feed = build_feed(load_config(path, settings=["data.encode.image.store='none'"])).bind(4, 0)
    CALLS.clear()
    feed.reader.scale(feed.training)
    assert sum(shape[0] for shape in CALLS) == 2 * len(feed.training)  # with the mirror images
    assert len(CALLS) == 2 * len(feed.shapes)
