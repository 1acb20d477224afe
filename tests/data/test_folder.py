import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image

from hookdiff import UserError
from hookdiff.data import Feed, Folder, Store

Write = Callable[..., list[Path]]


def test_the_first_folder_is_the_class(tmp_path: Path, write_folder: Write) -> None:
    paths = write_folder(tmp_path, 7)
    deep = tmp_path / "bee" / "more" / "b.JPEG"
    deep.parent.mkdir()
    Image.new("L", (3, 3)).save(deep)
    data = Folder(str(tmp_path))
    assert [data.describe(index) for index in range(len(data))] == sorted([*map(str, paths), str(deep)])
    assert data.classes == ("ant", "bee", "cat")
    assert data.labels is not None
    assert data.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    with data.load(0) as image:
        assert numpy.array_equal(numpy.array(image), numpy.array(Image.open(paths[0])))


@pytest.mark.parametrize("suffix", ["png", "jpg", "jpeg", "webp", "bmp", "tif", "tiff", "gif", "PNG"])
def test_every_kind_is_found(tmp_path: Path, suffix: str) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / f"a.{suffix}")
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / f".hidden.{suffix}").write_text("nor this")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / f"b.{suffix}").write_text("nor this")
    data = Folder(str(tmp_path))
    assert [data.describe(index) for index in range(len(data))] == [str(tmp_path / f"a.{suffix}")]


@pytest.mark.parametrize("folders", [(), ("all",)])
def test_without_two_folders_there_are_no_classes(
    tmp_path: Path, write_folder: Write, folders: tuple[str, ...]
) -> None:
    write_folder(tmp_path, 4, classes=folders or ("",))
    data = Folder(str(tmp_path))
    assert (len(data), data.labels, data.classes) == (4, None, None)


def test_labels_may_be_left_out(tmp_path: Path, write_folder: Write) -> None:
    write_folder(tmp_path, 4)
    Image.new("L", (3, 3)).save(tmp_path / "alone.png")
    assert Folder(str(tmp_path), "none").labels is None
    with pytest.raises(
        ValueError, match=r"1 of 5 images are in no class folder but in .* \(alone.png\): move them, or"
    ):
        Folder(str(tmp_path))


def test_links_are_followed_once(tmp_path: Path, write_folder: Write) -> None:
    write_folder(tmp_path / "real", 4)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "ant").symlink_to(tmp_path / "real" / "ant")
    (tmp_path / "set" / "back").symlink_to(tmp_path / "set")
    assert len(Folder(str(tmp_path / "set"))) == 2


@pytest.mark.parametrize(
    ("labels", "expected", "classes"),
    [
        (["dog", "ape", "dog"], [1, 0, 1], ("ape", "dog")),
        ([3, 0, 3], [3, 0, 3], None),
        (["3", "-1", "3"], [3, -1, 3], None),
        (["1", "2x", "1"], None, "some labels are whole numbers and some are not, as '2x'"),
    ],
)
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.parametrize("column", ["file", "file_name"])
def test_labels_from_a_file(
    tmp_path: Path, write_folder: Write, kind: str, column: str, labels: Any, expected: Any, classes: Any
) -> None:
    write_folder(tmp_path, 3, classes=("in",))
    rows = [(f"./in/{k:03}.png", label) for k, label in enumerate(labels)][::-1]
    if kind == "csv":
        text = f"\ufeff{column},label,more\n" + "".join(f"{name},{label},x\n" for name, label in rows)
    else:
        text = "\n\n".join(json.dumps({column: name, "label": label}) for name, label in rows)
    (tmp_path / f"labels.{kind}").write_text(text, "utf-8")
    if expected is None:
        with pytest.raises(ValueError, match=classes):
            Folder(str(tmp_path), f"labels.{kind}")
        return
    data = Folder(str(tmp_path), f"labels.{kind}")
    assert data.labels is not None
    assert (data.labels.tolist(), data.classes) == (expected, classes)


ROWS = "file,label\nant/000.png,a\nbee/001.png,b\ncat/002.png,c\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("l.csv", "name,class\na.png,3\n", "l.csv: line 2: expected file and label, got name, class"),
        ("l.csv", ROWS + "x.png,3\n", "l.csv names 1 files that are not in .*: x.png"),
        ("l.csv", ROWS + "ant/00.png,3\n", "not in .*: ant/00.png; did you mean 'ant/000.png'"),
        ("l.csv", ROWS[:25], "l.csv has no label for 2 of 3 images: bee/001.png, cat/002.png"),
        ("l.csv", ROWS[:23], "l.csv: line 2: ant/000.png has no label"),
        ("l.csv", ROWS + "ant/000.png,b\n", "l.csv: line 5: ant/000.png has been given another label before"),
        ("l.csv", b"file,label\n\xff\xfe,3\n", "l.csv: not UTF-8"),
        ("l.jsonl", '{"file": "ant/000.png", "label": 1.5}', "expected a name or a number from 0 on as label, got 1.5"),
        ("l.jsonl", '{"file": "ant/000.png", "label": true}', "label, got True"),
        ("l.jsonl", '{"file": "ant/000.png", "label": -2}', "label, got -2"),
        ("l.jsonl", '{"file": "ant/000.png", "label": null}', "l.jsonl: line 1: ant/000.png has no label"),
        ("l.jsonl", '\n{"file": ', "l.jsonl: line 2: not JSON"),
        ("l.jsonl", "[1]", r"l.jsonl: line 1: expected an object, got \[1\]"),
        ("l.txt", ROWS, "l.txt: expected labels in a .csv or a .jsonl"),
        ("label.csv", ROWS, "there is no 'l.csv', in .* or here; did you mean 'label.csv'"),
    ],
)
def test_a_broken_file_of_labels_is_told_with_its_line(
    tmp_path: Path, write_folder: Write, name: str, text: str | bytes, message: str
) -> None:
    write_folder(tmp_path, 3)
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message):
        Folder(str(tmp_path), "l.csv" if name == "label.csv" else name)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "pictures" / "x").mkdir(parents=True)
    for wrong, message in [
        ("pictuers", f"{tmp_path} has no 'pictuers'; did you mean 'pictures'"),
        ("picture/x", f"{tmp_path} has no 'picture'; did you mean 'pictures'"),
        ("pictures/y", f"{tmp_path}/pictures has no 'y'"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            Folder(str(tmp_path / wrong))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is no folder"):
        Folder(str(tmp_path / "file"))


def test_a_folder_without_images(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no image \(.png, .*\); it is empty"):
        Folder(str(tmp_path))
    for name in ("a.heic", "b.heic", "c.txt"):
        (tmp_path / name).write_text("")
    with pytest.raises(ValueError, match=r"has no image \(.*\); found: 2 .heic, 1 .txt"):
        Folder(str(tmp_path))


def test_a_link_to_nothing_is_an_image_that_cannot_be_read(tmp_path: Path, write_folder: Write) -> None:
    write_folder(tmp_path / "set", 3)
    (tmp_path / "set" / "bee" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    place: Any
    for place in ("memory", "disk"):
        kept = Store(store=place, cache_dir=str(tmp_path / "cache"))
        with pytest.raises(UserError, match=r"1 of 4 images cannot be read .*\n.*gone.png: No such file or directory"):
            Feed(Folder(str(tmp_path / "set")), store=kept)


def test_the_fingerprint_changes_with_the_files(tmp_path: Path, write_folder: Write) -> None:
    paths = write_folder(tmp_path, 4)
    before = Folder(str(tmp_path)).fingerprint()
    assert Folder(str(tmp_path)).fingerprint() == before
    os.utime(paths[0], ns=(0, 1))
    after = Folder(str(tmp_path)).fingerprint()
    paths[1].write_bytes(paths[1].read_bytes() + b"x")
    longer = Folder(str(tmp_path)).fingerprint()
    paths[2].rename(paths[2].with_name("z.png"))
    assert len({before, after, longer, Folder(str(tmp_path)).fingerprint()}) == 4
