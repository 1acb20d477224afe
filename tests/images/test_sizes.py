"""The sizes of pictures as their source has them, read once and from headers alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from hookdiff import InMemory, UserError
from hookdiff.images import Folder, Store, Transforms, feed_of
from tests.conftest import as_list, refused
from tests.images.conftest import noise

SIZES = [[9, 12], [30, 7], [21, 33], [40, 40]]  # height and width
SMALL = Transforms(image_size=6)


class Counted(Folder):
    """A folder that notes which pictures are opened."""

    def load(self, index: int) -> Any:
        self.__dict__.setdefault("opened", []).append(index)
        return super().load(index)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Pictures of `SIZES`; that of 30 x 7 lies on its side in its file, and the last has lost the end of its pixels."""
    folder = tmp_path / "set"
    folder.mkdir()
    for k, (height, width) in enumerate(SIZES):
        image, exif = noise(k, width, height), Image.Exif()
        if k == 1:
            image, exif[0x0112] = image.transpose(Image.Transpose.ROTATE_90), 6
        image.save(folder / f"{k}.jpg", exif=exif)
    (folder / "3.jpg").write_bytes((folder / "3.jpg").read_bytes()[:-400])
    return folder


def test_a_survey_gives_the_sizes_and_no_picture_is_opened_again(folder: Path) -> None:
    source = Counted(str(folder))
    reader = feed_of(source, SMALL, Store(store="none")).reader
    assert (as_list(reader.sizes()), source.opened) == (SIZES, [0, 1, 2, 3])
    (folder / "0.jpg").write_bytes(b"no picture")
    reader = feed_of(Folder(str(folder)), SMALL, Store(store="none", unreadable="skip")).reader
    assert as_list(reader.sizes()[1:]) == SIZES[1:]


def test_the_headers_are_read_if_the_survey_is_of_an_earlier_run(folder: Path, tmp_path: Path) -> None:
    store = Store(store="disk", cache_dir=str(tmp_path / "cache"), unreadable="skip")
    assert as_list(feed_of(Counted(str(folder)), SMALL, store).reader.sizes()) == SIZES
    source = Counted(str(folder))
    assert (as_list(feed_of(source, SMALL, store).reader.sizes()), source.opened) == (SIZES, [0, 1, 2, 3])


class Drawings(list[Any]):
    """A map-style source."""


def items() -> Drawings:
    tensor = torch.zeros(3, *SIZES[2], dtype=torch.uint8)
    return Drawings([noise(0, 12, 9), {"image": noise(1, 7, 30)}, (tensor, 1), noise(3, 40, 40)])


def test_other_sources_have_the_size_of_what_they_store() -> None:
    assert as_list(feed_of(items(), SMALL).reader.sizes()) == SIZES
    for channels, transforms in ((3, SMALL), (8, Transforms())):
        images = torch.zeros(2, channels, 9, 12, dtype=torch.uint8 if channels == 3 else torch.float32)
        assert as_list(feed_of(InMemory(images), transforms).reader.sizes()) == [[9, 12]] * 2
    with refused(UserError, "sample 1", "int"):
        feed_of(Drawings([noise(0, 12, 9), [1]]), SMALL).reader.sizes()
