"""A set of pictures that cannot be trained on is refused before training, with examples and counts."""

import re
import traceback
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from hookdiff import Feed, InMemory, UserError
from hookdiff.images import Folder, Kind, Store, Transforms, feed_of
from hookdiff_array import Arrays
from tests.conftest import as_list, check_facts, refused, warnings, wide
from tests.images.conftest import noise, write_folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "set"


@pytest.fixture(params=["memory", "disk", "none"])
def store(request: pytest.FixtureRequest) -> Any:
    return request.param


def make_feed(path: Path, *, store: Any = "memory", unreadable: Any = "stop", **transforms: Any) -> Feed:
    kept = Store(store=store, unreadable=unreadable, cache_dir=str(path.parent / "cache"))
    return feed_of(Folder(str(path)), transforms=Transforms(**transforms), store=kept)


def refusal(path: Path, **options: Any) -> list[str]:
    """Return the lines of the error."""
    with pytest.raises(UserError) as caught:
        make_feed(path, **options)
    return str(caught.value).splitlines()


def test_images_of_different_sizes_need_an_image_size(root: Path, store: Any) -> None:
    write_folder(root, 6)
    noise(9, 20, 30).save(root / "ant" / "big.png")
    with refused(UserError, "6 of 12 x 9", "1 of 20 x 30", "image_size"):
        make_feed(root, store=store)
    assert make_feed(root, store=store, image_size=9).shape == (3, 9, 9)


def test_grey_among_colour_images_needs_a_number_of_channels(root: Path, store: Any) -> None:
    write_folder(root, 6)
    noise(9, 12, 9, "L").save(root / "bee" / "grey.png")
    counts, grey, colour = refusal(root, store=store)
    check_facts(counts, 1, 6, "channels", 3)
    check_facts(grey, root / "bee" / "grey.png", "12 x 9")
    check_facts(colour, root / "ant" / "000.png", "12 x 9")
    for channels in (1, 3):
        feed = make_feed(root, store=store, channels=channels)
        (batch,) = feed.unaugmented(torch.arange(7))
        assert (batch.inputs.shape, feed.shape) == ((7, channels, 9, 12), (channels, 9, 12))


def test_golden_message_of_images_that_are_too_small(root: Path, store: Any) -> None:
    write_folder(root, 6, size=(20, 16))
    for k in range(7):
        noise(k, 15 - k, 40).save(root / "cat" / f"thin{k}.png")
    assert refusal(root, store=store, image_size=16) == [
        "7 of 13 images are smaller than image_size = 16; upscale = true enlarges them:",
        *(f"  {root}/cat/thin{k}.png ({15 - k} x 40)" for k in range(5)),
        "  and 2 more",
    ]
    with refused(UserError, 13, "resize", 17, "upscale"):
        make_feed(root, store=store, image_size=4, resize=17)
    assert make_feed(root, store=store, image_size=16, upscale=True).shape == (3, 16, 16)


def test_files_that_are_no_images_are_listed_or_left_out(root: Path, store: Any) -> None:
    paths = write_folder(root, 9)
    paths[2].write_bytes(b"no image at all")
    paths[5].write_bytes(b"")
    counts, *lines = refusal(root, store=store)
    check_facts(counts, 2, 9, "unreadable", "'skip'")
    assert [line.split(": ")[0] for line in lines] == [f"  {paths[2]}", f"  {paths[5]}"]
    feed = make_feed(root, store=store, unreadable="skip")
    assert len(feed.reader.source) == 9  # the others keep their positions
    assert feed.training.tolist() == [0, 1, 3, 4, 6, 7, 8]
    feed.bind(7)
    (batch,) = feed.batches(0)
    assert sorted(as_list(batch.indices)) == feed.training.tolist()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-80])


def test_golden_message_of_all_problems_at_once(root: Path, store: Any) -> None:
    paths = write_folder(root, 9)
    paths[1].write_bytes(b"no image at all")
    truncate(paths[2])
    noise(9, 20, 30).save(root / "ant" / "z.png")
    rows = [f"{path.relative_to(root)},{k}" for k, path in enumerate(paths)]
    rows[3:5] = [f"{paths[3].relative_to(root)},-7", "bee/nowhere.png,1"]
    (root / "labels.csv").write_text("\n".join(["file,label", *rows, "ant/z.png,", ""]))
    kept = Store(store=store, cache_dir=str(root.parent / "cache"))
    with pytest.raises(UserError) as caught:
        feed_of(Folder(str(root), "labels.csv"), store=kept)
    assert str(caught.value).replace(str(root), "SET").splitlines() == [
        "5 problems",
        "  2 of 10 images cannot be read (unreadable = 'skip' leaves them out):",
        "    SET/ant/003.png: no picture of a known format",
        "    SET/ant/006.png: image file is truncated",
        "  SET/labels.csv: line 11: ant/z.png has no label",
        "  SET/labels.csv: 1 of its files are not in SET: bee/nowhere.png; did you mean 'bee/007.png'?",
        "  SET/labels.csv: 1 of 10 images have no label: bee/004.png",
        "  the images have 2 sizes (8 of 12 x 9, 1 of 20 x 30): set image_size, the side to train on",
    ]


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_broken_pixels_are_found_when_all_images_are_decoded(root: Path, store: Any) -> None:
    truncate(write_folder(root, 9)[4])
    counts, line = refusal(root, store=store)
    check_facts(counts, 1, 9, "unreadable", "'skip'")
    check_facts(line, "004.png")


@pytest.mark.parametrize("workers", [0, *wide(2)])
def test_broken_pixels_that_are_met_later_stop_the_run(root: Path, workers: int) -> None:
    path = write_folder(root, 9)[4]
    truncate(path)
    feed = feed_of(Folder(str(root)), store=Store(store="none"), workers=workers)
    feed.bind(3)
    with refused(UserError, path) as caught:
        list(feed.batches(0))
    traceback.clear_frames(caught.tb)  # otherwise the workers end seconds later, at a garbage collection
    assert "Traceback" not in str(caught.value)


def test_another_sample_replaces_one_that_cannot_be_decoded(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = write_folder(root, 12)
    for k in (3, 4, 11):
        truncate(paths[k])
    found = []
    place: Any
    for place, workers in (("memory", 0), ("disk", 0), ("none", 0), ("none", 2)):
        kept = Store(store=place, unreadable="skip", cache_dir=str(root.parent / "cache"))
        feed = feed_of(Folder(str(root)), store=kept, held_out=3, workers=workers, transforms=Transforms(flip=True))
        feed.bind(3)
        with closing(feed):
            batches = list(feed.batches(1))
        indices = [index for batch in batches for index in as_list(batch.indices)]
        labels = as_list(feed.labels)
        assert [label for batch in batches for label in as_list(batch.labels)] == [labels[index] for index in indices]
        assert len(indices) == 9
        assert set(indices) <= set(feed.training.tolist()) - {3, 4, 11}
        found.append((torch.cat([batch.inputs for batch in batches]), indices))
    for inputs, indices in found[1:]:
        assert torch.equal(inputs, found[0][0])
        assert indices == found[0][1]
    counts = [message for message in warnings(caplog) if {"3", "12"} <= set(message.split())]
    assert len(counts) == 2  # the stores "memory" and "disk" decode all images at once
    met = [message for message in warnings(caplog) if message not in counts]
    assert met
    assert all(any(str(paths[k]) in message for k in (3, 4, 11)) for message in met)


def test_a_set_without_a_readable_image_is_refused_even_with_skip(root: Path, store: Any) -> None:
    for path in write_folder(root, 7):
        path.write_bytes(b"GIF89a")
    counts, *lines, rest = refusal(root, store=store, unreadable="skip")
    check_facts(counts, 7)
    assert len(lines) == 5
    check_facts(rest, 2)


class Blank:
    """A source of `num` images that cannot be loaded."""

    labels, classes, shape = None, None, (3, 4, 5)

    def __init__(self, num: int) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def load(self, index: int) -> Tensor:
        raise AssertionError

    def describe(self, index: int) -> str:
        return f"blank {index}"


class HalfKnown(Folder):
    """A folder that knows the headers of its first four pictures, and says that they are larger than the others."""

    opened: list[int]

    def known_kinds(self) -> tuple[list[Kind], list[int]]:
        self.opened = []
        return [Kind("RGB", 20, 20, 4, self.describe(0))], [4, 5]

    def load(self, index: int) -> Any:
        self.opened.append(index)
        return super().load(index)


def test_only_headers_that_are_not_known_are_read(tmp_path: Path) -> None:
    write_folder(tmp_path / "set", 6)
    source = HalfKnown(str(tmp_path / "set"))
    feed = feed_of(source, Transforms(image_size=9), Store(store="none"))
    kinds = [(kind.width, kind.height, kind.count) for kind in feed.reader.prepared.survey.kinds]
    assert (kinds, source.opened) == ([(20, 20, 4), (12, 9, 2)], [4, 5])
    with refused(UserError, "4 of 20 x 20", "2 of 12 x 9", "image_size"):
        feed_of(source, store=Store(store="none"))


def test_images_of_a_known_shape_are_not_opened() -> None:
    feed = feed_of(Blank(7), store=Store(store="none"))
    assert (feed.shape, feed.describe(3), len(feed.training)) == ((3, 4, 5), "blank 3", 7)


def test_a_source_without_samples_is_refused(tmp_path: Path) -> None:
    with refused(UserError, "samples"):
        feed_of(Blank(0))
    numpy.save(tmp_path / "none.npy", numpy.zeros((0, 3, 8, 8), numpy.uint8))
    with refused(ValueError, "none.npy", (0, 3, 8, 8)):
        Arrays(str(tmp_path / "none.npy"))


def test_auto_keeps_a_set_that_fits_in_memory(tmp_path: Path) -> None:
    write_folder(tmp_path, 10, size=(64, 64))
    size = 10 * 3 * 64 * 64 / 2**30
    for limit, place in ((size, "memory"), (size * 0.99, "none")):
        assert feed_of(Folder(str(tmp_path)), store=Store(memory_limit=limit)).reader.prepared.place == place


@pytest.mark.parametrize("store", ["disk", "none"])
def test_another_store_for_a_set_in_memory_is_refused(store: Any) -> None:
    with refused(UserError, "store", f"'{store}'", "memory"):
        feed_of(InMemory(torch.zeros(4, 1, 2, 2)), store=Store(store=store))


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_a_store_for_items_that_may_change_is_refused(store: Any) -> None:
    with refused(UserError, "store", f"'{store}'", "list"):
        feed_of([torch.zeros(1, 2, 2)], store=Store(store=store))


def test_a_source_without_fingerprint_has_no_cache(tmp_path: Path) -> None:
    write_folder(tmp_path / "set", 3)

    class Plain(Folder):
        fingerprint: Any = property()

    with refused(UserError, "store", "'disk'", "Plain"):
        feed_of(Plain(str(tmp_path / "set")), store=Store(store="disk", cache_dir=str(tmp_path)))


def test_a_tensor_is_resized_too() -> None:
    images = torch.randint(0, 256, (5, 1, 8, 12), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    feed = feed_of(images, transforms=Transforms(image_size=4, channels=3))
    assert feed.shape == (3, 4, 4)
    (batch,) = feed.unaugmented(torch.arange(5))
    expected = torch.stack([Transforms(image_size=4, channels=3).fit(image) for image in images])
    assert float((batch.inputs - (expected.float() / 127.5 - 1)).abs().max()) < 2.1 / 127.5
    with refused(UserError, "12 x 8", "image_size", 9, "upscale"):
        feed_of(images, transforms=Transforms(image_size=9))
    with refused(UserError, "image_size", "channels", "uint8", 1, 3, "7 x 8 x 8"):
        feed_of(torch.zeros(3, 7, 8, 8), transforms=Transforms(image_size=4))


def test_latents_may_be_mirrored_but_have_no_colour() -> None:
    latents = torch.randn(4, 7, 3, 3)
    feed = feed_of(latents, transforms=Transforms(flip=1.0)).bind(4)
    (batch,) = feed.batches(0)
    assert torch.equal(batch.inputs, latents[feed.order(0)].flip(-1))
    with refused(UserError, "color_jitter", 1, 3, 7):
        feed_of(latents, transforms=Transforms(color_jitter=(0.1, 0.0, 0.0, 0.0)))
    with refused(UserError, 4):
        feed_of(torch.zeros(9, 4), transforms=Transforms(flip=True)).bind(4)


def test_items_may_be_pictures_of_pillow() -> None:
    items = [(noise(k, 9 + k, 9), k % 2) for k in range(6)]
    feed = feed_of(items, transforms=Transforms(image_size=8), drop_last=False)
    (batch,) = feed.bind(6).batches(0)
    assert (feed.shape, batch.inputs.shape) == ((3, 8, 8), (6, 3, 8, 8))
    with refused(UserError, "uint8", "image_size") as caught:
        list(feed_of(items).bind(6).batches(0))
    sizes = {int(width) for width in re.findall(r"3 x 9 x (\d+)", str(caught.value))}
    assert len(sizes) == 2
    assert sizes <= set(range(9, 15))
    small = feed_of([noise(0, 9, 9)] * 4, transforms=Transforms(image_size=10))
    with refused(UserError, "9 x 9", "10 x 10"):
        list(small.bind(4).batches(0))


def test_a_feed_has_the_metadata_of_its_source(tmp_path: Path) -> None:
    paths = write_folder(tmp_path, 6)
    feed = feed_of(Folder(str(tmp_path)))
    assert (feed.num_classes, feed.classes, feed.describe(1)) == (3, ("ant", "bee", "cat"), str(paths[1]))
    assert as_list(feed.labels) == [0, 0, 1, 1, 2, 2]
    foreign = feed_of([torch.zeros(1, 2, 2)] * 3)
    assert (foreign.num_classes, foreign.classes, foreign.labels, foreign.describe(2)) == (None, None, None, "sample 2")
    numbers = Feed(InMemory(torch.zeros(3, 1), torch.tensor([4, -1, 0])))
    assert (numbers.num_classes, numbers.describe(0)) == (5, "sample 0")


def test_a_copy_of_a_feed_decodes_nothing_again(tmp_path: Path) -> None:
    paths = write_folder(tmp_path, 6)
    feed = feed_of(Folder(str(tmp_path)))
    for path in paths:
        path.unlink()
    copy = Feed.of(feed)
    assert copy.samples is feed.samples
    (one,), (other,) = feed.unaugmented(torch.arange(6)), copy.unaugmented(torch.arange(6))
    assert torch.equal(one.inputs, other.inputs)
    assert numpy.isfinite(one.inputs.numpy()).all()
