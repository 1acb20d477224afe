import io
import json
import os
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image

from hookdiff import UserError
from hookdiff.images import PICTURE_FORMATS, Folder, Store, Transforms, feed_of, passed_over_text
from tests.conftest import as_list, check_facts, refused
from tests.images.conftest import write_folder


def test_the_first_folder_is_the_class(tmp_path: Path) -> None:
    paths = write_folder(tmp_path, 7)
    deep = tmp_path / "bee" / "more" / "b.JPEG"
    deep.parent.mkdir()
    Image.new("L", (3, 3)).save(deep)
    data = Folder(str(tmp_path))
    assert [data.describe(index) for index in range(len(data))] == sorted([*map(str, paths), str(deep)])
    assert (data.classes, as_list(data.labels)) == (("ant", "bee", "cat"), [0, 0, 0, 1, 1, 1, 2, 2])
    with data.load(0) as image:
        assert numpy.array_equal(numpy.array(image), numpy.array(Image.open(paths[0])))


def test_every_format_is_found_and_the_rest_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = []
    for one in PICTURE_FORMATS:
        content = io.BytesIO(b"\0\0\0\x18ftypheic" + bytes(20))
        if not one.package:
            Image.new("RGB", (4, 4)).save(content, one.names[0])
        for suffix in (*one.suffixes, one.suffixes[0].upper(), "", "."):
            name = f"{one.names[0]}-of{suffix}"
            (tmp_path / name).write_bytes(content.getvalue())
            expected += [] if one.package else [str(tmp_path / name)]
    others = {".txt": (2, "b/x.txt"), ".csv": (1, "labels.csv"), "without a suffix": (7, "HEIF-of")}
    others |= {".heic": (2, "HEIF-of.HEIC"), ".heif": (1, "HEIF-of.heif")}
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("notes.txt", "b/x.txt", "labels.csv", "README", "P5", "bitmap", "z", "b/pipe"):
        (tmp_path / name).write_text({"P5": "P5 is a car", "bitmap": "BMW is another", "z": ""}.get(name, "no image"))
    (tmp_path / "b" / "pipe").unlink()
    os.mkfifo(tmp_path / "b" / "pipe")
    for name in ("PNG-of.txt", "PNG-of.caption", ".hidden.png", ".DS_Store", "Thumbs.db", ".git/a.png", ".git/config"):
        (tmp_path / name).write_text("not worth a word")
    data = Folder(str(tmp_path), "none")
    assert ([data.describe(index) for index in range(len(data))], data.passed_over) == (sorted(expected), others)
    check_facts(passed_over_text(data)[0], 13, "not used: 2 .heic (HEIF-of.HEIC", "pip install pillow-heif), 1 .heif")
    assert len(feed_of(data, Transforms(channels=3), Store(store="none")).usable) == len(expected)
    monkeypatch.setitem(Image.OPEN, "HEIF", (None, None))  # as a package with a reader does
    assert len(Folder(str(tmp_path), "none")) == len(expected) + 5


@pytest.mark.parametrize("name", ["labels.csv", "./labels.csv"])
def test_the_file_of_the_labels_is_not_passed_over(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path, 1, classes=("in",))
    (tmp_path / "labels.csv").write_text("file,label\nin/000.png,3\n")
    assert Folder(str(tmp_path), name).passed_over == {}
    assert Folder(str(tmp_path), str(tmp_path / name)).passed_over == {}
    assert Folder(str(tmp_path)).passed_over == {".csv": (1, "labels.csv")}


@pytest.mark.parametrize("folders", [(), ("all",)])
def test_without_two_folders_there_are_no_classes(tmp_path: Path, folders: tuple[str, ...]) -> None:
    write_folder(tmp_path, 4, classes=folders or ("",))
    data = Folder(str(tmp_path))
    assert (len(data), data.labels, data.classes) == (4, None, None)


def test_labels_may_be_left_out(tmp_path: Path) -> None:
    write_folder(tmp_path, 4)
    Image.new("L", (3, 3)).save(tmp_path / "alone.png")
    assert Folder(str(tmp_path), "none").labels is None
    with refused(UserError, 1, 5, tmp_path, "alone.png"):
        feed_of(Folder(str(tmp_path)))


def test_links_are_followed_once(tmp_path: Path) -> None:
    write_folder(tmp_path / "real", 4)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "ant").symlink_to(tmp_path / "real" / "ant")
    (tmp_path / "set" / "back").symlink_to(tmp_path / "set")
    (tmp_path / "set" / "loop").symlink_to(tmp_path / "set" / "loop")
    (tmp_path / "set" / "again.png").symlink_to(tmp_path / "real" / "bee" / "001.png")
    assert len(Folder(str(tmp_path / "set"))) == 3


@pytest.mark.parametrize(
    ("labels", "expected", "classes"),
    [
        (["dog", "ape", "dog"], [1, 0, 1], ("ape", "dog")),
        ([3, 0, 3], [3, 0, 3], None),
        (["3", "-1", "3"], [3, -1, 3], None),
        (["1", "2x", "1"], None, "'2x'"),
    ],
)
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.parametrize("column", ["file", "file_name"])
def test_labels_are_read_from_a_file(
    tmp_path: Path, kind: str, column: str, labels: Any, expected: Any, classes: Any
) -> None:
    write_folder(tmp_path, 3, classes=("in",))
    rows = [(f"./in/{k:03}.png", label) for k, label in enumerate(labels)][::-1]
    if kind == "csv":
        text = f"\ufeff{column},label,more\n" + "".join(f"{name},{label},x\n" for name, label in rows)
    else:
        text = "\n\n".join(json.dumps({column: name, "label": label}) for name, label in rows)
    (tmp_path / f"labels.{kind}").write_text(text, "utf-8")
    if expected is None:
        with refused(UserError, f"labels.{kind}", classes):
            feed_of(Folder(str(tmp_path), f"labels.{kind}"))
        return
    data = Folder(str(tmp_path), f"labels.{kind}")
    assert (as_list(data.labels), data.classes) == (expected, classes)


ROWS = "file,label\nant/000.png,a\nbee/001.png,b\ncat/002.png,c\n"


@pytest.mark.parametrize(
    ("name", "text", "facts"),
    [
        ("l.csv", "name,class\na.png,3\n", ("line 2", "file", "label", "'name'", "'class'")),
        ("l.csv", ROWS + "x.png,3\n", (1, "x.png")),
        ("l.csv", ROWS + "ant/00.png,3\n", ("ant/00.png", "'ant/000.png'")),
        ("l.csv", ROWS[:25], (2, 3, "bee/001.png", "cat/002.png")),
        ("l.csv", ROWS[:23], ("line 2", "ant/000.png")),
        ("l.csv", ROWS + "ant/000.png,b\n", ("line 5", "ant/000.png")),
        ("l.jsonl", '{"file": "ant/000.png", "label": 1.5}', (0, 1.5)),
        ("l.jsonl", '{"file": "ant/000.png", "label": true}', (True,)),
        ("l.jsonl", '{"file": "ant/000.png", "label": -2}', (-2,)),
        ("l.jsonl", '{"file": "ant/000.png", "label": null}', ("line 1", "ant/000.png")),
        ("l.jsonl", '\n{"file": ', ("line 2", "JSON")),
        ("l.jsonl", "[1]", ("line 1", "[1]")),
        (
            "l.csv",
            ROWS + "ant/000.png,z\nbee/001.png,\n" + "x,\n" * 5,
            ("7 lines", "line 5", "line 6", "line 9", "2 more", 1, "x"),
        ),
    ],
)
def test_wrong_labels_are_refused_together(tmp_path: Path, name: str, text: str, facts: Any) -> None:
    write_folder(tmp_path, 3)
    (tmp_path / name).write_text(text)
    with refused(UserError, name, *facts) as caught:
        feed_of(Folder(str(tmp_path), name))
    assert caught.value.args[0].count("bee/001.png") < 2  # a wrong label is not a missing one as well


@pytest.mark.parametrize(
    ("name", "text", "facts"),
    [
        ("l.csv", b"file,label\n\xff\xfe,3\n", ("utf-8",)),
        ("l.txt", ROWS.encode(), (".csv", ".jsonl")),
        ("label.csv", ROWS.encode(), ("'label.csv'",)),
    ],
)
def test_a_file_without_labels_is_refused(tmp_path: Path, name: str, text: bytes, facts: Any) -> None:
    write_folder(tmp_path, 3)
    (tmp_path / name).write_bytes(text)
    asked = "l.csv" if name == "label.csv" else name
    with refused(ValueError, asked, *facts):
        Folder(str(tmp_path), asked)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pictures" / "x").mkdir(parents=True)
    for wrong, *facts in [
        ("pictuers", tmp_path, "'pictuers'", "'pictures'"),
        ("picture/x", tmp_path, "'picture'", "'pictures'"),
        ("pictures/y", tmp_path / "pictures", "'y'"),
    ]:
        with refused(ValueError, *facts):
            Folder(str(tmp_path / wrong))
    (tmp_path / "file").write_text("")
    with refused(ValueError, tmp_path / "file"):
        Folder(str(tmp_path / "file"))


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    with refused(ValueError, tmp_path, ".png", "empty"):
        Folder(str(tmp_path))
    for name in ("a.heic", "b.heic", "c.txt"):
        (tmp_path / name).write_text("")
    with refused(ValueError, tmp_path, "2 .heic", "pip install pillow-heif", "1 .txt"):
        Folder(str(tmp_path))


def test_the_fingerprint_changes_with_the_files(tmp_path: Path) -> None:
    paths = write_folder(tmp_path, 4)
    before = Folder(str(tmp_path)).fingerprint()
    assert Folder(str(tmp_path)).fingerprint() == before
    os.utime(paths[0], ns=(0, 1))
    after = Folder(str(tmp_path)).fingerprint()
    paths[1].write_bytes(paths[1].read_bytes() + b"x")
    longer = Folder(str(tmp_path)).fingerprint()
    paths[2].rename(paths[2].with_name("z.png"))
    assert len({before, after, longer, Folder(str(tmp_path)).fingerprint()}) == 4


def test_names_match_whatever_their_unicode_form(tmp_path: Path) -> None:
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    for name in (decomposed, "b"):
        Image.new("L", (3, 3)).save(tmp_path / f"{name}.png")
    (tmp_path / "l.csv").write_text(f"file,label\n{composed}.png,{decomposed}\nb.png,{composed}\n", "utf-8")
    data = Folder(str(tmp_path), "l.csv")
    assert (data.problems, as_list(data.labels), data.classes) == ([], [0, 0], (composed,))
    Image.new("L", (3, 3)).save(tmp_path / f"{composed}.png")
    with refused(UserError, "l.csv", f"{composed}.png", f"{decomposed}.png", ascii(composed)[1:-1], "cafe\\u0301"):
        feed_of(Folder(str(tmp_path), "l.csv"))
    for folder in (composed, decomposed, "b"):
        (tmp_path / "set" / folder).mkdir(parents=True)
        Image.new("L", (3, 3)).save(tmp_path / "set" / folder / "0.png")
    assert Folder(str(tmp_path / "set")).classes == ("b", composed)
