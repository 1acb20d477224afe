"""Pictures in several sizes: what each becomes, where it is kept, and what is refused or replaced."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from hookdiff import UserError
from hookdiff.data import Feed
from hookdiff.images import Folder, Store, Transforms, feed_of, sized as sized_module

SIDES = [(40, 90), (90, 40), (50, 50), (41, 93), (100, 100), (300, 300), (48, 64)]  # width, height


def write(folder: Path, sides: list[tuple[int, int]] = SIDES, times: int = 3) -> None:
    generator = torch.Generator().manual_seed(0)
    for number, (width, height) in enumerate(sides * times):
        pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / f"{number:03}.png")


def opened(folder: Path, store: str = "memory", **options: Any) -> Feed:
    keys = {"image_size": 32, "buckets": True, **options.pop("transforms", {})}
    kept = Store(store=store, cache_dir=str(folder.parent / "cache"), **options.pop("kept", {}))  # type: ignore[arg-type]
    return feed_of(Folder(str(folder)), Transforms(**keys), kept, **options).bind(2, seed=1)


def by_index(feed: Feed, rows: torch.Tensor | None = None) -> dict[int, torch.Tensor]:
    rows = feed.usable if rows is None else rows
    batches = list(feed.unaugmented(rows, 4))
    return {i: row for batch in batches for i, row in zip(batch.indices.tolist(), batch.inputs, strict=True)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "pictures"
    path.mkdir()
    write(path)
    return path


def test_a_picture_is_resized_to_cover_its_size_and_cut_at_the_centre(folder: Path) -> None:
    feed = opened(folder)
    for index, inputs in by_index(feed).items():
        with Image.open(folder / f"{index:03}.png") as image:
            _, height, width = inputs.shape
            scale = max(height / image.height, width / image.width)
            wide, high = int(image.width * scale + 1e-9), int(image.height * scale + 1e-9)
            resized = image.convert("RGB").resize((wide, high), Image.Resampling.BICUBIC)
        left, top = round((wide - width) / 2), round((high - height) / 2)
        expected = numpy.array(resized.crop((left, top, left + width, top + height)))
        assert torch.equal(inputs, torch.from_numpy(expected).permute(2, 0, 1).float().div(127.5).sub(1))
    sizes = {tuple(row.shape[1:]) for row in by_index(feed).values()}
    assert sizes == {(44, 24), (24, 44), (32, 32), (36, 28)}
    assert feed.shape == (3, 32, 32)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_pixels_are_the_same_wherever_they_are_kept(folder: Path, workers: int) -> None:
    feeds = [opened(folder, store, workers=workers, transforms={"flip": 0.5}) for store in ("memory", "disk", "none")]
    for epoch in range(2):
        first, *others = [list(feed.batches(epoch)) for feed in feeds]
        for other in others:
            for one, two in zip(first, other, strict=True):
                assert torch.equal(one.indices, two.indices)
                assert torch.equal(one.inputs, two.inputs)
    for feed in feeds:
        feed.close()


def test_a_changed_step_decodes_only_the_sizes_that_change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tables() -> set[str]:
        return {path.name for path in (folder.parent / "cache").iterdir() if path.is_dir()}

    opened(folder, "disk")
    before = tables()
    assert len(before) == 5  # four sizes, and the table of the original sizes

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a header was read")

    monkeypatch.setattr(sized_module, "survey", refuse)
    assert {*by_index(opened(folder, "disk"))} == {*range(21)}
    assert tables() == before
    opened(folder, "disk", transforms={"bucket_step": 8})  # 40x24, 32x32, 24x40: the squares stay
    assert len(tables() - before) == 3


def test_several_sides_take_the_largest_that_a_picture_fills(folder: Path) -> None:
    feed = opened(folder, transforms={"image_size": (32, 128), "buckets": False})
    sizes = {index: tuple(row.shape[1:]) for index, row in by_index(feed).items()}
    assert {index for index, size in sizes.items() if size == (128, 128)} == {5, 12, 19}
    assert {*sizes.values()} == {(128, 128), (32, 32)}
    assert feed.shape == (3, 128, 128)


def test_small_pictures_are_refused_by_name_or_enlarged_and_counted(folder: Path) -> None:
    write(folder, [(20, 20), (90, 20)], 1)
    with pytest.raises(UserError, match=r"2 of 21 images are smaller than their size(.|\n)*000.png \(20 x 20\)"):
        opened(folder)
    feed = opened(folder, transforms={"upscale": True})
    assert feed.reader.prepared.sized.enlarged.nonzero().flatten().tolist() == [0, 1]
    assert tuple(by_index(feed)[1].shape) == (3, 24, 44)


@pytest.mark.parametrize("store", ["memory", "disk", "none"])
def test_a_broken_picture_is_replaced_by_one_of_its_size(folder: Path, store: str) -> None:
    content = (folder / "007.png").read_bytes()
    (folder / "007.png").write_bytes(content[: len(content) // 2])  # the header is whole
    (folder / "002.png").write_bytes(b"no picture")
    feed = opened(folder, store, kept={"unreadable": "skip"})
    assert 2 not in feed.usable.tolist()
    batch = next(feed.unaugmented(torch.tensor([7, 0]), 2))
    replaced = sorted(batch.indices.tolist())
    assert 7 not in replaced
    assert batch.inputs.shape[1:] == (3, 44, 24)
    assert all(SIDES[index % 7] in ((40, 90), (41, 93)) for index in replaced)


@pytest.mark.parametrize("store", ["memory", "disk", "none"])
def test_a_shape_without_a_readable_picture_stops_no_run(folder: Path, store: str) -> None:
    for name in (0, 3, 7, 10, 14, 17):  # all of 24x44
        content = (folder / f"{name:03}.png").read_bytes()
        (folder / f"{name:03}.png").write_bytes(content[: len(content) // 2])
    feed = opened(folder, store, kept={"unreadable": "skip"}, held_out=3)
    for epoch in range(4):
        batches = list(feed.batches(epoch))
        assert len(batches) == feed.num_batches(epoch + 1, epoch)
    if store == "none":  # where only reading shows it; other pictures are cut to the shape
        batch = next(feed.unaugmented(torch.tensor([3, 0]), 2))
        assert batch.inputs.shape[1:] == (3, 44, 24)
        assert batch.inputs.std() > 0.1
        assert not {*batch.indices.tolist()} & {0, 3, 7, 10, 14, 17}
    else:
        assert not {*feed.usable.tolist()} & {0, 3, 7, 10, 14, 17}
    assert sum(map(len, feed.unaugmented(feed.held_out_indices, 4))) == len(feed.held_out_indices)


def test_if_no_picture_can_be_read_the_error_names_one(folder: Path) -> None:
    feed = opened(folder, "none", kept={"unreadable": "skip"}, held_out=1)
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:60])  # after the header was read
    with pytest.raises(UserError, match=r"000\.png"):
        next(feed.unaugmented(torch.tensor([0])))
    held_out = feed.held_out_indices
    with pytest.raises(UserError, match=feed.describe(int(held_out))):
        next(feed.unaugmented(held_out))


def test_the_fingerprint_covers_the_pictures_of_all_sizes() -> None:
    class Pictures:
        labels = classes = None

        def __init__(self, last: int) -> None:
            self.last = last

        def __len__(self) -> int:
            return 4

        def load(self, index: int) -> torch.Tensor:
            sides = (40, 90) if index < 3 else (90, 40)
            return torch.full((3, *sides), self.last if index == 3 else index, dtype=torch.uint8)

        def describe(self, index: int) -> str:
            return str(index)

    one, same, other = (feed_of(Pictures(last), Transforms(image_size=32, buckets=True)) for last in (7, 7, 8))
    assert one.reader.fingerprint() == same.reader.fingerprint() != other.reader.fingerprint()


class Items:
    """Items with a mask beside each picture; the size of one of them changes."""

    def __init__(self, sides: list[tuple[int, int]]) -> None:
        self.sides, self.labels = sides, torch.zeros(len(sides), dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.sides)

    def __getitem__(self, index: int) -> dict[str, Any]:
        width, height = self.sides[index]
        pixels = torch.full((3, height, width), 100 + index, dtype=torch.uint8)
        mask = torch.zeros(height, width, dtype=torch.uint8)
        mask[:, : width // 2] = 255
        return {"image": pixels, "mask": mask, "level": float(index)}


def test_items_and_their_masks_are_cut_together_and_must_keep_their_size() -> None:
    source = Items([*SIDES, *SIDES])
    feed = feed_of(source, Transforms(image_size=32, buckets=True, flip=1.0)).bind(2)
    for batch in feed.batches(0):
        assert batch.conditions["mask"].shape[1:] == batch.inputs.shape[2:]
        half = batch.inputs.shape[-1] // 2
        assert (batch.conditions["mask"][:, :, half + 1 :] == 1).all()  # mirrored with the picture
        assert (batch.conditions["mask"][:, :, : half - 1] == -1).all()
    assert feed.blank(3, (3, 44, 24)).conditions["mask"].shape == (3, 44, 24)
    source.sides[3] = (60, 60)
    with pytest.raises(UserError, match="sample 3 of the data: its picture is 60 x 60, and was 41 x 93"):
        list(feed.unaugmented(torch.tensor([3])))


@pytest.mark.parametrize(
    ("item", "fact"),
    [
        (torch.zeros(5), "sample 0 of the data has 5; only pictures"),
        (torch.zeros(()), "sample 0 of the data has no sides; only pictures"),
        (torch.zeros(3, 0, 8), "sample 0 of the data has 3 x 0 x 8; only pictures"),
        (torch.zeros(2, 3, 64, 64, dtype=torch.uint8), "sample 0 of the data has 2 x 3 x 64 x 64; only pictures"),
        (torch.zeros(16, 64, 64), "sample 0 of the data: 16 x 64 x 64 of torch.float32: only uint8"),
    ],
)
def test_items_that_are_no_pictures_have_no_size(item: torch.Tensor, fact: str) -> None:
    with pytest.raises(UserError, match=fact):
        feed_of([item] * 4, Transforms(image_size=32, buckets=True))


def test_pictures_in_a_tensor_have_one_size() -> None:
    with pytest.raises(UserError, match="pictures of one size"):
        feed_of(torch.zeros(8, 3, 40, 40, dtype=torch.uint8), Transforms(image_size=32, buckets=True))


def test_exif_turns_a_picture_before_it_gets_its_size(tmp_path: Path) -> None:
    path = tmp_path / "pictures"
    path.mkdir()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(numpy.zeros((400, 900, 3), numpy.uint8)).save(path / "a.jpg", exif=exif)
    feed = feed_of(Folder(str(path)), Transforms(image_size=32, buckets=True), Store(store="memory"))
    assert feed.reader.shapes == [(3, 44, 24)]
    assert os.listdir(path) == ["a.jpg"]
