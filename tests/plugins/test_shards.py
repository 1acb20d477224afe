"""Samples in shards, with real tar files."""

import io
import json
import pickle
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from hookdiff import Feed, UserError
from hookdiff.data.source import AnySource
from hookdiff.images import Folder, Store, Transforms, feed_of
from hookdiff.images.survey import survey
from hookdiff_shards import Items, Shards, shards
from tests.conftest import as_list, check_facts, output, pixels, records, refused, two_ranks, wide

Members = Mapping[str, bytes]


def encoded(seed: int, kind: str = "PNG", side: int = 10) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels(seed, side)).save(file, kind)
    return file.getvalue()


def array(values: Any) -> bytes:
    file = io.BytesIO()
    numpy.save(file, numpy.asarray(values))
    return file.getvalue()


def write(path: Path, members: Members, **options: Any) -> Path:
    """Write a tar with these members, in order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **options) as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def sample(number: int, **more: bytes) -> Members:
    return {f"{number:04}.png": encoded(number), **{f"{number:04}.{name}": each for name, each in more.items()}}


def labelled(numbers: range) -> Members:
    return {name: each for k in numbers for name, each in sample(k, cls=str(k % 3).encode()).items()}


@pytest.fixture
def made(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with 24 pictures of three classes in the shards set/000.tar to set/002.tar; return it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    for number in range(3):
        write(here / "set" / f"{number:03}.tar", labelled(range(8 * number, 8 * number + 8)))
    return here


def is_picture(data: Any, index: int, seed: int | None = None) -> bool:
    """Return whether a sample has the pixels of this seed, which is usually its number."""
    return numpy.array_equal(numpy.asarray(data.load(index)), pixels(index if seed is None else seed))


def assert_is_whole(data: Any, num: int = 24) -> None:
    assert isinstance(data, Shards)
    assert len(data) == num
    assert as_list(data.labels) == [k % 3 for k in range(num)]
    for index in range(num):
        assert is_picture(data, index)


@pytest.mark.parametrize(
    "path",
    ["set", "set/", "set/*.tar", "set/{000..002}.tar", "set/00{0,1,2}.tar", ["set/000.tar", "set/{001..002}.tar"]],
)
def test_shards_are_found(made: Path, path: Any) -> None:
    assert_is_whole(shards(path))


def test_a_name_with_braces_is_taken_as_it_is(made: Path) -> None:
    write(made / "set" / "{0..9}*.tar", sample(0))
    assert len(shards("set/{0..9}*.tar")) == 1


@pytest.mark.parametrize(
    ("path", "facts"),
    [
        ("ste", ["ste", "'set'"]),
        ("set/003.tar", ["set/003.tar", "'002.tar'"]),
        ("set/{000..012}.tar", [10, "set/003.tar", "set/004.tar"]),
        ("set/*.tra", ["set/*.tra", "000.tar"]),
        ("no/*.tar", ["no/*.tar", "no is no folder"]),
        ("s{et,}/00[0-2].tar", ["s/00[0-2].tar", "s is no folder"]),
        ("set/{0..99999999}.tar", ["1,000,000"]),
        ("set/{9..0}.tar", ["{9..0}"]),
        ([], ["empty"]),
        ("cache", ["cache", ".tar", "empty"]),
        ("packed", ["packed", "2 .tar.gz", "unpacked"]),
        ("packed/a.tar.gz", ["packed/a.tar.gz", "gzip", ".tar"]),
        ("text", ["text", "no tar"]),
        ("nothing", ["nothing", "empty"]),
        ("mixed", ["mixed", "b.tar.gz", "unpack"]),
        ("", ["path", "empty"]),
        ("hidden.tar", ["hidden.tar", "no sample", "0001.png"]),
    ],
)
def test_what_is_no_shard_is_refused(made: Path, path: Any, facts: list[Any]) -> None:
    (made / "cache").mkdir()
    for name in ("a", "b"):
        write(made / "packed" / f"{name}.tar", sample(0))
        with tarfile.open(made / "packed" / f"{name}.tar.gz", "w:gz") as tar:
            tar.add(made / "packed" / f"{name}.tar")
        (made / "packed" / f"{name}.tar").unlink()
    write(made / "mixed" / "a.tar", sample(0))
    (made / "mixed" / "b.tar.gz").write_bytes((made / "packed" / "b.tar.gz").read_bytes())
    write(made / "hidden.tar", {".0.png": encoded(0)})
    (made / "text").write_text("hello " * 200)
    (made / "nothing").write_bytes(b"")
    with refused(ValueError, *facts):
        shards(path)


def make_feed(source: Any, workers: int = 0, **options: Any) -> Feed:
    transforms = Transforms(resize=9, image_size=8, flip=True)
    return feed_of(source, transforms, Store(store="none"), workers=workers, held_out=0.2, balanced=True, **options)


Batches = list[tuple[Any, Any, Any]]


def taken(feed: Feed, *, ranks: tuple[int, int] = (0, 1), start: int = 0) -> Batches:
    """Return the batches of two epochs; the first one begins after `start` samples."""
    feed.bind(4, 7, rank=ranks[0], num_ranks=ranks[1])
    made = [batch for epoch in (0, 1) for batch in feed.batches(epoch, start if epoch == 0 else 0)]
    feed.close()
    return [(batch.inputs, batch.labels, batch.indices) for batch in made]


def assert_same_batches(found: Batches, expected: Batches) -> None:
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("workers", "ranks", "start"), [(0, (0, 1), 8), (2, (1, 2), 8), *wide((0, (0, 2), 0), (2, (0, 1), 8))]
)
def test_the_shards_of_a_folder_give_the_batches_of_the_folder(
    hookdiff: Any, pictures: Path, workers: int, ranks: tuple[int, int], start: int
) -> None:
    with Image.open("pictures/ant/04.png") as picture:
        picture.save("pictures/ant/04.jpg")
    Path("pictures/ant/04.png").unlink()
    output(hookdiff("data", "config.toml", "--to-shards", "out", "--shard-size", "0.02"))
    assert len(list(Path("out").glob("*.tar"))) > 2
    folder, ours = make_feed(Folder("pictures")), make_feed(shards("out"), workers)
    assert folder.classes == ours.classes == ("ant", "bee")
    assert torch.equal(folder.held_out_indices, ours.held_out_indices)
    found = taken(ours, ranks=ranks, start=start)
    assert len(found) > 4
    assert_same_batches(found, taken(folder, ranks=ranks, start=start))


def test_a_run_trains_on_shards_as_on_the_folder_and_labels_can_be_switched_off(hookdiff: Any, pictures: Path) -> None:
    out = output(hookdiff("data", "config.toml", "--to-shards", "out", "--json"))
    assert json.loads(out)["data"]["path"] == "out"
    ours = (pictures / "config.toml").read_text().replace('"folder"', '"shards"').replace('"pictures"', '"out"')
    (pictures / "ours.toml").write_text(ours)
    losses = []
    for config in ("config", "ours"):
        output(hookdiff("run", f"{config}.toml", "--out", config))
        losses.append([line["loss"] for line in records(pictures / config)])
    assert losses[0] == losses[1]
    for value, classes in (("auto", 2), ("cls", 2), ("none", 0)):
        out = output(hookdiff("data", "ours.toml", "--set", f"data.label={value}", "--json", "--seconds", 0))
        assert len(json.loads(out)["classes"] or []) == classes, value


def test_every_store_gives_the_same_batch(made: Path) -> None:
    found: list[Any] = []
    store: Any
    for store, workers in (("memory", 0), ("disk", 0), ("none", 2)):
        feed = feed_of(shards("set"), Transforms(image_size=6), Store(store=store, cache_dir="kept"), workers=workers)
        batch = next(feed.bind(24).batches(0))
        feed.close()
        found.append(batch.inputs)
    assert all(torch.equal(one, found[0]) for one in found[1:])


def test_a_pickle_reads_the_files_again(made: Path) -> None:
    data = shards("set")
    assert is_picture(data, 20)  # which opens a file
    assert_is_whole(pickle.loads(pickle.dumps(data)))


def test_an_index_is_made_once_and_again_for_a_shard_that_changes(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    def indexed(path: str, **options: Any) -> list[str]:
        caplog.clear()
        with caplog.at_level("INFO", "hookdiff"):
            shards(path, **options)
        return [line for line in caplog.messages if "index" in line]

    (line,) = indexed("set")
    check_facts(line, 3, made / "cache" / "hookdiff" / "shards")
    assert indexed("set/*.tar", image="png", label="none") == indexed(str(made / "set")) == []
    write(made / "set" / "001.tar", labelled(range(9)))
    write(made / "set" / "003.tar", labelled(range(2)))
    (line,) = indexed("set")
    check_facts(line, 2)
    (line,) = indexed("set", index_dir="here")
    check_facts(line, 4, "here")
    assert len(list(Path("here").glob("*.index"))) == 4


@pytest.mark.wide
def test_processes_that_start_together_have_the_same_samples(made: Path) -> None:
    code = f"from hookdiff_shards import shards\nresult = shards({str(made / 'set')!r}).labels.tolist()"
    assert two_ranks(code, made) == [[k % 3 for k in range(24)]] * 2


@pytest.mark.wide
def test_more_shards_than_files_that_may_be_open(made: Path) -> None:
    for number in range(150):
        write(made / "many" / f"{number:03}.tar", sample(number))
    data = shards("many", label="none")
    for index in (*range(150), 0, 149, 3):
        assert is_picture(data, index)


# How members make samples


def test_members_of_a_name_make_a_sample_wherever_they_stand(made: Path) -> None:
    members = {
        "__notes__": b"of webdataset",
        "b/x.a.b.png": b"no picture of a sample: its extension has dots",
        "b/x.PNG": encoded(0),
        "a/y.cls": b"1",
        "./z.jpg": encoded(2, "JPEG"),
        "b/x.cls": b" 0\n",
        ".hidden": b"",
        "b/.x.png": b"",
        "noextension": b"",
        "a/y.png": encoded(1),
        "./z.cls": b"-1",
        "./z.txt": b"a caption",
    }
    write(made / "one.tar", members)
    data = shards("one.tar")
    assert [data.describe(index) for index in range(3)] == ["one.tar[b/x.png]", "one.tar[a/y.png]", "one.tar[./z.jpg]"]
    assert as_list(data.labels) == [0, 1, -1]
    assert is_picture(data, 1)


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_format_of_tar_is_read(made: Path, kind: int) -> None:
    folder = "/".join(["long" * 12] * 3)
    name = f"{folder}/{'x' * 90}" if kind == tarfile.USTAR_FORMAT else f"{folder}/{'é' * 99}/y"
    members = {f"{name}.png": encoded(5), f"{name}.cls": b"2", "z.png": encoded(6), "z.cls": b"0"}
    write(made / "one.tar", members, format=kind)
    data = shards("one.tar")
    assert data.describe(0) == f"one.tar[{name}.png]"
    assert is_picture(data, 1, 6)


@pytest.mark.parametrize("zeros", [0, 10_240, 1 << 20])
def test_archives_that_were_joined_byte_by_byte_are_refused(made: Path, zeros: int) -> None:
    one, other = (made / "set" / f"{number:03}.tar" for number in range(2))
    Path("filled.tar").write_bytes(one.read_bytes() + bytes(zeros))
    assert len(shards("filled.tar")) == 8
    Path("both.tar").write_bytes(one.read_bytes() + bytes(zeros) + other.read_bytes())
    with refused(ValueError, "both.tar", "after its end mark", "tar --concatenate"):
        shards("both.tar")


def test_folders_in_a_tar_are_passed_over(made: Path) -> None:
    (made / "in" / "x.png").mkdir(parents=True)
    (made / "in" / "y.png").write_bytes(encoded(1))
    with tarfile.open("one.tar", "w") as tar:
        tar.add("in")
    assert len(shards("one.tar")) == 1


@pytest.mark.parametrize(
    ("members", "options", "facts"),
    [
        ({"a.cls": b"1"}, {}, [".png", ".cls"]),
        ({"a.png": b"", "a.jpg": b""}, {}, ["one.tar[a]", 2, "image"]),
        ({"a.png": b""}, {"image": "pgn"}, [".pgn", "'png'"]),
        ({"a.pth": b""}, {"image": "pth"}, ["image", ".pth", "pickled"]),
        ({"a.png": b"", "a.pkl": b""}, {"label": ".PKL"}, ["label", ".pkl", "pickled"]),
        ({"a.png": b""}, {"label": "cls"}, [".cls", ".png"]),
        ({"a.png": b"", "a.pt": b""}, {"conditions": {"x": "pt"}}, ["conditions.x", ".pt", "pickled"]),
        ({"a.png": b"", "a.npyy": b""}, {"conditions": {"x": "npyy"}}, ["conditions.x", "'npy'"]),
        ({"a.png": b"", "a.npy": b""}, {"conditions": {"x": "npy:k"}}, ["conditions.x", "'npy:k'", ".json"]),
        ({"a.png": b"", "a.npy": b""}, {"conditions": {"label": "npy"}}, ["conditions", "'label'"]),
        ({"a.png": b""}, {"conditions": {"x": "npy"}}, [".npy", ".png"]),
        ({"a": b""}, {}, ["one.tar"]),
        ({"a.png": b"", "a.cls": b"0"}, {"classes": "names.txt"}, ["names.txt"]),
        ({"a.png": b"", "a.cls": b"0"}, {"classes": "names.csv"}, ["names.csv", ".txt", ".json"]),
        ({"a.png": b"", "a.cls": b"0"}, {"classes": "bad.json"}, ["bad.json", "list"]),
    ],
)
def test_members_that_cannot_be_samples_are_refused(made: Path, members: Members, options: Any, facts: Any) -> None:
    write(made / "one.tar", members)
    (made / "names.csv").write_text("a\n")
    (made / "bad.json").write_text('{"a": 1}')
    with refused(ValueError, *facts):
        shards("one.tar", **options)


def test_what_is_wrong_with_samples_is_reported_together(made: Path) -> None:
    members = {**sample(0, cls=b"1"), "0001.cls": b"1", **sample(2), "0003.png": b"nothing", "0003.cls": b"0"}
    write(made / "one.tar", members)
    facts = ["2 of 4", "one.tar[0001]", "no .png", "one.tar[0003.png]", "1 of 4 samples have no .cls", "one.tar[0002]"]
    with refused(UserError, *facts):
        survey(AnySource(shards("one.tar", image="png")), Transforms(), skip=False)
    with refused(UserError, "2 of 4", "one.tar[0001]", "no picture", "one.tar[0003.png]"):
        feed_of(shards("one.tar", label="none"))
    skipping = feed_of(shards("one.tar", label="none"), store=Store(unreadable="skip"))
    assert sorted(skipping.training.tolist()) == [0, 2]


# Labels and classes


@pytest.mark.parametrize(
    ("texts", "options", "labels", "classes"),
    [
        ([b"2", b"0", b"-1"], {}, [2, 0, -1], None),
        ([b"cat", b"ant", b"cat"], {}, [1, 0, 1], ("ant", "cat")),
        ([b"2", b"0", b"1"], {"classes": ["x", "y", "z"]}, [2, 0, 1], ("x", "y", "z")),
        ([b"cat", b"ant", b"cat"], {"classes": ["cat", "bee", "ant"]}, [0, 2, 0], ("cat", "bee", "ant")),
        ([b"2", b"0", b"1"], {"classes": "lines.txt"}, [2, 0, 1], ("a b", "", " c")),
        ([b"2", b"0", b"1"], {"label": "none"}, None, None),
    ],
)
def test_labels_are_numbers_or_names(made: Path, texts: list[bytes], options: Any, labels: Any, classes: Any) -> None:
    (made / "lines.txt").write_bytes(b"a b\n\n c\n")
    write(made / "one.tar", {k: v for n, text in enumerate(texts) for k, v in sample(n, cls=text).items()})
    data = shards("one.tar", **options)
    assert (as_list(data.labels), data.classes) == (labels, classes)


@pytest.mark.parametrize("name", ["classes.txt", "classes.json"])
def test_names_beside_the_shards_are_those_of_the_classes(made: Path, name: str) -> None:
    (made / "set" / name).write_text('["x", "y\u2028", "z"]' if name.endswith("json") else "x\ny\u2028\r\nz\n", "utf-8")
    assert shards("set").classes == ("x", "y\u2028", "z")
    assert shards("set", label="none").classes is None
    (made / "set" / name).write_text('["x"]' if name.endswith("json") else "x\n")
    with refused(UserError, "labels", 2):
        feed_of(shards("set"))


@pytest.mark.parametrize(
    ("texts", "options", "facts"),
    [
        ([b"1", b"cat"], {}, ["one.tar[0000.cls]", "one.tar[0001.cls]", "cat", "names"]),
        ([b"1", b"-2"], {"classes": ["a", "b"]}, ["one.tar[0001.cls]", -2]),
        ([b"1", b""], {}, ["one.tar[0001.cls]", "empty"]),
        ([b"1", b"\xff"], {}, ["one.tar[0001.cls]"]),
        ([b"1", b"x" * 65], {}, ["one.tar[0001.cls]", 65, 64]),
        ([b"99999999", b"1"], {}, [99999999]),
        ([b"ant", b"bea"], {"classes": ["ant", "bee"]}, ["bea", "'bee'"]),
        ([b"1", b"1"], {"label": "png"}, ["one.tar[0000.png]", 64]),
    ],
)
def test_labels_that_are_none_are_refused(made: Path, texts: list[bytes], options: Any, facts: list[Any]) -> None:
    write(made / "one.tar", {k: v for n, text in enumerate(texts) for k, v in sample(n, cls=text).items()})
    with refused(UserError, *facts):
        feed_of(shards("one.tar", **options))


# Conditions


@pytest.mark.parametrize("conditions", [None, {"age": "txt"}])
def test_the_sizes_of_pictures_are_in_the_index(made: Path, conditions: Any) -> None:
    numbers = [sample(1, txt=b"1"), {"0002.png": encoded(2, side=14), "0002.txt": b"2"}]
    path = write(made / "one.tar", {**numbers[0], **numbers[1]})
    reader = feed_of(shards("one.tar", conditions=conditions), Transforms(image_size=8), Store(store="none")).reader
    path.unlink()
    assert as_list(reader.sizes()) == [[10, 10], [14, 14]]


@pytest.mark.parametrize("workers", [0, 2])
def test_conditions_are_read_with_the_picture(made: Path, workers: int) -> None:
    def one(number: int) -> Members:
        more = {
            "t5.npy": array(numpy.full((2, 3), number, "float32")),
            "json": json.dumps({"size": [number, 7], "text": "a caption"}).encode(),
            "txt": str(number / 2).encode(),
            "mask.png": encoded(number + 50),
            "pth": b"never read",
        }
        return sample(number, cls=str(number).encode(), **more)

    write(made / "one.tar", {name: each for number in range(8) for name, each in one(number).items()})
    conditions = {"text": "t5.npy", "size": "json:size", "age": "txt", "Mask": "mask.png"}
    data = shards("one.tar", conditions=conditions)
    assert isinstance(data, Items)
    feed = feed_of(data, Transforms(image_size=8), workers=workers).bind(8)
    (batch,) = feed.batches(0)
    feed.close()
    order = as_list(batch.indices)
    assert sorted(order) == list(range(8))
    assert as_list(batch.labels) == order
    assert {name: (each.dtype, each[:, ...].shape[1:]) for name, each in batch.conditions.items()} == {
        "text": (torch.float32, (2, 3)),
        "size": (torch.int64, (2,)),
        "age": (torch.float32, ()),
        "Mask": (torch.float32, (3, 8, 8)),
    }
    assert batch.conditions["text"][:, 1, 2].tolist() == order
    assert batch.conditions["size"].tolist() == [[number, 7] for number in order]
    assert batch.conditions["age"].tolist() == [number / 2 for number in order]
    pairs = feed_of(shards("one.tar", image="mask.png"), Transforms(image_size=8))
    assert torch.equal(next(pairs.unaugmented(torch.tensor(order))).inputs, batch.conditions["Mask"])


def test_arrays_are_inputs_as_they_are(made: Path) -> None:
    latents = [torch.randn(4, 5, 5) for _ in range(4)]
    write(made / "one.tar", {f"{k}.npy": array(each) for k, each in enumerate(latents)})
    (batch,) = feed_of(shards("one.tar", image="npy")).unaugmented(torch.arange(4))
    assert torch.equal(batch.inputs, torch.stack(latents))


@pytest.mark.parametrize(
    ("content", "condition", "facts"),
    [
        (b"a cat", "txt", ["one.tar[0000.txt]", "'a cat'"]),
        (b"true", "txt", ["one.tar[0000.txt]", "'true'"]),
        (b"[1", "json", ["one.tar[0000.json]"]),
        (b"[" * 100_000, "json", ["one.tar[0000.json]"]),
        (b'{"size": 1}', "json:sise", ["one.tar[0000.json]", "'sise'", "'size'"]),
        (b"[1]", "json:size", ["one.tar[0000.json]", "'size'"]),
        (b"nothing", "npy", ["one.tar[0000.npy]"]),
        (array([1, 2, 3])[:-4], "npy", ["one.tar[0000.npy]", 24, 20]),
        (b"nothing", "mask.png", ["one.tar[0000.mask.png]"]),
    ],
)
def test_conditions_that_cannot_be_read_are_refused(made: Path, content: bytes, condition: str, facts: Any) -> None:
    write(made / "one.tar", sample(0, **{condition.partition(":")[0]: content}))
    with refused(UserError, *facts):
        next(feed_of(shards("one.tar", conditions={"x": condition})).bind(1).batches(0))
