"""Captions of a folder: in .txt files beside the pictures, and in a column of the file of labels."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hookdiff import UserError
from hookdiff.images import feed_of
from hookdiff.images.folder import Folder
from tests.conftest import as_list, check_facts, refused

NAMES = ("a.png", "b/b.x.png", "c.png")

FILES = [  # the content of a .txt, and the captions in it
    (b"a red disc", ("a red disc",)),
    (b"\xef\xbb\xbf a red disc \r\n\r\n\ttwo, caf\xc3\xa9\r\n", ("a red disc", "two, café")),
    (b"one\rtwo\n\n\nthree\n", ("one", "two", "three")),
    ("one\u2028still\x0b one".encode(), ("one\u2028still\x0b one",)),
    (b" \n\t\r\n", ()),
    (b"", ()),
    (b"x" * (1 << 20), ("x" * (1 << 20),)),
    (None, ()),
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "b").mkdir()
    for name in NAMES:
        Image.new("L", (3, 3)).save(tmp_path / name)
    return tmp_path


def texts(data: Folder) -> list[tuple[str, ...]]:
    assert data.texts is not None
    (found,) = data.texts.values()
    return [tuple(one) for one in found]


def test_the_lines_of_a_text_beside_a_picture_are_its_captions(tmp_path: Path) -> None:
    for number, (content, _) in enumerate(FILES):
        Image.new("L", (3, 3)).save(tmp_path / f"{number}.png")
        if content is not None:
            (tmp_path / f"{number}{'.TXT' if number == 1 else '.txt'}").write_bytes(content)
    Image.new("L", (3, 3)).save(tmp_path / "0.jpg")  # two pictures of one name have one .txt
    (tmp_path / "notes.txt").write_text("of no picture")
    data = Folder(str(tmp_path), captions="txt")
    assert data.texts == {"text": [FILES[0][1], *(captions for _, captions in FILES)]}
    assert data.passed_over == {".txt": (1, "notes.txt")}
    assert data.path_of(1) == tmp_path / "0.png"
    assert data.fingerprint() == Folder(str(tmp_path)).fingerprint()
    assert Folder(str(tmp_path)).texts is None


def too_large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


BROKEN: list[tuple[Callable[[Path], Any], str]] = [
    (lambda path: path.write_bytes(b"caf\xe9"), "utf-8"),
    (lambda path: path.write_text("x", "utf-16"), "utf-8"),
    (lambda path: path.write_bytes(b"x" * (1 << 20) + b"y"), "1,048,576"),
    (too_large, "1,048,576"),
    (os.mkfifo, "pipe"),
    (lambda path: path.symlink_to("nowhere"), "No such file"),
]


@pytest.mark.parametrize(("spoil", "why"), BROKEN)
def test_a_text_that_is_none_is_refused_when_it_is_read(root: Path, spoil: Callable[[Path], Any], why: str) -> None:
    (root / "a.txt").write_text("fine")
    spoil(root / "c.txt")
    data = Folder(str(root), "none", captions="txt")
    assert len(feed_of(data).usable) == 3  # which needs no captions
    with refused(UserError, root / "c.txt", why) as caught:
        data.texts  # noqa: B018
    assert "\n" not in str(caught.value)


def test_texts_that_are_none_are_refused_together(tmp_path: Path) -> None:
    for number in range(300):
        Image.new("L", (3, 3)).save(tmp_path / f"{number:03}.png")
        (tmp_path / f"{number:03}.txt").write_bytes(b"fine" if number % 100 else b"\xff")
    (tmp_path / "299.txt").write_bytes(b"\xff" * (2 << 20))
    with refused(UserError, 4, *(tmp_path / f"{number}.txt" for number in ("000", "100", "200", "299")), "1,048,576"):
        Folder(str(tmp_path), captions="txt").texts  # noqa: B018


COLUMNS = [  # a file of labels, the captions in its column, and the labels
    (
        "l.csv",
        '\ufefffile,label,text\r\na.png,1," a red, or\nblue disc "\r\nb/b.x.png,0,\r\nc.png,2,café\r\n',
        [("a red, or\nblue disc",), (), ("café",)],
        [1, 0, 2],
    ),
    ("l.csv", "file_name,text\na.png,one\na.png,two\n", [("one", "two"), (), ()], None),
    (
        "l.jsonl",
        '\ufeff{"file": "a.png", "text": ["one", " ", "two "], "label": "x"}\n{"file": "b/b.x.png", "label": "y"}\n'
        '{"file": "c.png", "text": null, "label": "x"}\n',
        [("one", "two"), (), ()],
        [0, 1, 0],
    ),
    (
        "l.jsonl",
        '{"file": "c.png", "text": "three"}\n{"file": "a.png", "text": []}\n{"file": "c.png", "text": ["four"]}',
        [(), (), ("three", "four")],
        None,
    ),
]


@pytest.mark.parametrize(("name", "text", "captions", "labels"), COLUMNS)
def test_a_column_beside_the_labels_has_captions(
    root: Path, name: str, text: str, captions: list[Any], labels: list[int] | None
) -> None:
    (root / name).write_bytes(text.encode())
    data = Folder(str(root), name, captions="text")
    assert (data.problems, as_list(data.labels)) == ([], labels)
    assert texts(data) == captions
    assert len(feed_of(data).usable) == 3


@pytest.mark.parametrize(
    ("labels", "captions", "text", "facts"),
    [
        ("folder", "tx", "", ("captions", "'tx'", "did you mean 'txt'", "labels")),
        ("none", "text", "", ("captions", "'text'", "'txt'", "labels")),
        ("folder", "txt", "", ("captions", "no image", ".txt")),
        ("l.csv", "txet", "file,label,text\na.png,1,x\nb/b.x.png,1,x\nc.png,1,x\n", ("'txet'", "did you mean 'text'")),
        ("l.jsonl", "text", '{"file": "a.png"}', ("l.jsonl", "'text'", "it has file")),
        ("l.jsonl", "text", "", ("l.jsonl", "'text'", "it has none")),
        ("l.jsonl", "text", '{"file": "a.png", "text": 5}', ("l.jsonl", "line 1", "caption", 5)),
        ("l.jsonl", "text", '{"file": "a.png", "text": ["x", ["y"]]}', ("line 1", "caption", "['x', ['y']]")),
        ("l.jsonl", "text", '{"file": "a.png", "text": "\\ud800"}', ("line 1", "surrogates")),
        ("l.jsonl", "text", '{"text": "x"}', ("line 1", "expected file", "{'text': 'x'}")),
        ("l.csv", "text", "file,text\nd.png,x\n", (1, "d.png")),
        ("l.csv", "text", "file,text,label\na.png,x,1\n", (2, "of 3 images", "c.png", "label")),
    ],
)
def test_captions_that_are_not_there_are_refused(
    root: Path, labels: str, captions: str, text: str, facts: tuple[Any, ...]
) -> None:
    (root / labels).write_text(text, "utf-8")
    with pytest.raises((UserError, ValueError)) as caught:
        feed_of(Folder(str(root), labels, captions))
    check_facts(caught.value, *facts)
