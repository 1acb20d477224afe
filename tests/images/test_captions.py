"""Captions in .txt files beside the pictures of a folder, in a column of its file of labels, and in items."""

import os
import pickle
import random
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from hookdiff import InMemory, UserError
from hookdiff.data.source import AnySource
from hookdiff.images import Folder, Workers, feed_of
from hookdiff.images.item_texts import with_texts
from hookdiff.images.items import ItemKeys
from hookdiff_samples.prompts import read_prompts
from tests.conftest import as_list, refused

NAMES = ("a.png", "b/b.x.png", "c.png")

FILES = [  # the content of a .txt, and the captions in it
    (b"a red disc", ("a red disc",)),
    (b"\xef\xbb\xbf a red disc \r\n\r\n\ttwo, caf\xc3\xa9\r\n", ("a red disc", "two, café")),
    (b"one\rtwo\n\n\nthree\n", ("one", "two", "three")),
    ("one\u2028still\x0b one".encode(), ("one\u2028still\x0b one",)),
    ("one\x85\x1c\x0c\u2029one\n\ufefftwo\ufeff\n\u200b\u2060".encode(), ("one\x85\x1c\x0c\u2029one", "two")),
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
    assert (data.passed_over, data.path_of(1)) == ({".txt": (1, "notes.txt")}, tmp_path / "0.png")


@pytest.mark.parametrize(("content", "captions"), [(one, found) for one, found in FILES if one and found])
def test_a_file_of_prompts_has_the_lines_of_one_of_captions(
    tmp_path: Path, content: bytes, captions: tuple[str, ...]
) -> None:
    (tmp_path / "prompts.txt").write_bytes(content)
    assert read_prompts(tmp_path / "prompts.txt") == captions


@pytest.mark.parametrize("content", [b"", b" \r\n", b"a\0", "a dog".encode("utf-16-le"), b"\xff", b"x" * (2 << 20)])
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "prompts.txt").write_bytes(content)
    with refused(UserError, tmp_path / "prompts.txt"):
        read_prompts(tmp_path / "prompts.txt")


@pytest.mark.parametrize("forms", [("NFC", "NFD"), ("NFD", "NFC")])
def test_a_text_in_the_other_unicode_form_is_beside_its_picture(tmp_path: Path, forms: tuple[Any, Any]) -> None:
    picture, text = (unicodedata.normalize(form, "café") for form in forms)
    (tmp_path / "é").mkdir()
    Image.new("L", (3, 3)).save(tmp_path / "é" / f"{picture}.png")
    (tmp_path / "é" / f"{text}.txt").write_text("a cup")
    data = Folder(str(tmp_path), captions="txt")
    assert (data.texts, data.passed_over) == ({"text": [("a cup",)]}, {})
    assert (data.fingerprint(), Folder(str(tmp_path)).texts) == (Folder(str(tmp_path)).fingerprint(), None)


def too_large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


BROKEN: list[tuple[Callable[[Path], Any], str]] = [
    (lambda path: path.write_bytes(b"caf\xe9"), "utf-8"),
    (lambda path: path.write_text("x", "utf-16"), "utf-8"),
    (lambda path: path.write_text("a red disc", "utf-16-le"), "UTF-16 without a mark"),
    (lambda path: path.write_text("a red disc", "utf-16-be"), "UTF-16 without a mark"),
    (lambda path: path.write_text("шар", "utf-16-le"), "UTF-16 without a mark"),
    (lambda path: path.write_bytes(b"a red\0 disc"), "NUL"),
    (lambda path: path.write_text("a “red” disc", "cp1252"), "utf-8"),
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
    assert (data.problems, as_list(data.labels), texts(data), len(feed_of(data).usable)) == ([], labels, captions, 3)


@pytest.mark.parametrize(
    ("labels", "captions", "text", "facts"),
    [
        ("folder", "tx", "", ("captions", "'tx'", "did you mean 'txt'", "labels")),
        ("none", "text", "", ("captions", "'text'", "'txt'", "labels")),
        ("folder", "txt", "", ("captions", "no image", ".txt")),
        ("l.csv", "txet", "file,label,text\na.png,1,x\nb/b.x.png,1,x\nc.png,1,x\n", ("'txet'", "did you mean 'text'")),
        ("l.jsonl", "text", '{"file": "a.png"}', ("l.jsonl", "'text'", "it has file")),
        (
            "l.csv",
            "text",
            "file,text\na.png,a red, round disc\n",
            ("line 2", "a.png,a red, round disc", 3, 2, "quotes"),
        ),
        ("l.csv", "text", "file,text\na.png,x\nc.png\n", ("line 3", "c.png", 1, 2)),
        ("l.csv", "text", 'file,text\na.png,"x\nc.png,y\n', ("l.csv", "line 3", "quote")),
        ("l.csv", "text", "file,text,text\na.png,x,y\n", ("l.csv", "line 1", "'text'", "twice")),
        ("l.csv", "text", "file;text\na.png;x\n", ("l.csv", "line 1", "';'", "commas")),
        ("l.csv", "text", "file\ttext\na.png\tx\n", ("l.csv", "line 1", r"'\t'", "commas")),
        ("l.csv", "text", "file,Text\na.png,x\n", ("l.csv", "'text'", "'Text'")),
        ("l.csv", "text", "file,text\na.png,x\0\n", ("l.csv", "line 2", "NUL")),
        ("l.csv", "text", "file,text\na.png,x\n".encode("utf-16-le").decode(), ("l.csv", "UTF-16")),
        ("l.jsonl", "text", '{"file": "a.png", "text": "x", "text": "y"}', ("l.jsonl", "line 1", "'text'", "twice")),
        ("l.jsonl", "text", '{"file": "a.png", "text": "x\\u0000"}', ("l.jsonl", "line 1", "NUL")),
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
    with refused((UserError, ValueError), *facts):
        feed_of(Folder(str(root), labels, captions))


PICTURE = torch.zeros(1, 2, 2)
ITEMS: list[tuple[list[Any], dict[str, Any], dict[str, Any]]] = [  # items, their captions, and their other values
    ([{"image": PICTURE, "label": 1, "text": " a red disc ", "size": 3}], {"text": [("a red disc",)]}, {"size": 3}),
    (
        [
            {"inputs": PICTURE, "text": one}
            for one in (["one", " ", "two"], "three", ("four",), [], None, "", ["", "5"])
        ],
        {"text": [("one", "two"), ("three",), ("four",), (), (), (), ("5",)]},
        {},
    ),
    ([{"image": PICTURE, "a": "", "b": ["b"]}], {"a": [()], "b": [("b",)]}, {}),
    ([(PICTURE, "one", 7), (PICTURE, ["two", "three"], 7)], {"item1": [("one",), ("two", "three")]}, {"item2": 7}),
    ([(PICTURE, 1, "one", 5, "two")] * 130, {"item2": [("one",)] * 130, "item4": [("two",)] * 130}, {"item3": 5}),
]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("items", "texts", "others"), ITEMS)
def test_texts_in_items_are_captions_and_all_else_stays(
    items: list[Any], texts: dict[str, Any], others: dict[str, Any], workers: int
) -> None:
    given = with_texts(AnySource(items), ItemKeys(), Workers(workers=workers))
    assert dict(given.texts) == texts
    (batch,) = feed_of(given, workers=workers).bind(len(items)).batches(0)
    assert {name: set(column.tolist()) for name, column in batch.conditions.items()} == {
        name: {value} for name, value in others.items()
    }
    assert batch.inputs.shape[1:] == PICTURE.shape


class Drawn:
    """Items with other keys, that draw their caption by all generators and have attributes of their own."""

    labels, classes = torch.tensor([0, 1, 0]), ("a", "b")

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(index)
        number = f"{random.random()} {numpy.random.rand()} {float(torch.rand(()))}"
        return {"pixels": PICTURE, "kind": index, "label": 0.5, "text": number}

    def describe(self, index: int) -> str:
        return f"picture {index}"


def test_items_are_read_once_for_their_texts_if_these_are_asked_for() -> None:
    source, keys = Drawn(), ItemKeys(image_key="pixels", label_key="kind")
    draws = random.Random(0), numpy.random.RandomState(0), torch.Generator().manual_seed(0)
    expected = draws[0].random(), draws[1].rand(), torch.rand((), generator=draws[2])
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
    given = with_texts(AnySource(source), keys, Workers())
    assert (list(given.texts), source.read) == (["text"], [0])
    assert given.texts["text"] is given.texts["text"]
    assert source.read == [0, 0, 1, 2]
    assert given.texts["text"] == with_texts(AnySource(Drawn()), keys, Workers()).texts["text"]
    assert len({*given.texts["text"]}) == 3
    assert (random.random(), numpy.random.rand(), torch.rand(())) == expected  # the generators of a run are left alone
    feed = feed_of(pickle.loads(pickle.dumps(given)), image_key="pixels", label_key="kind").bind(3)
    assert (feed.classes, feed.describe(1)) == (("a", "b"), "picture 1")
    assert feed.samples[0].keys() == {"pixels", "kind", "label"}
    (batch,) = feed.batches(0)
    assert batch.conditions.keys() == {"label"}


@pytest.mark.parametrize(
    "source",
    [
        [PICTURE],
        [(PICTURE, 1)],
        [{"image": PICTURE, "text": [1, 2]}],
        [],
        InMemory(PICTURE[None], texts={"t": [["a"]]}),
    ],
)
def test_a_source_without_texts_in_its_items_stays_as_it_is(source: Any) -> None:
    given = AnySource(source)
    assert with_texts(given, ItemKeys(), Workers()) is given


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("broken", "facts"),
    [
        ({"text": 5}, ("'text'", "a caption or a list of captions", 5)),
        ({"text": torch.zeros(2)}, ("'text'", "a caption or a list of captions")),
        ({"text": ["a", 5]}, ("'text'", "a caption or a list of captions", "['a', 5]")),
        ({"text": "\ud800"}, ("'text'", "surrogates")),
        ({"txet": "a"}, ("no 'text'", "as in sample 0")),
    ],
)
def test_items_without_the_text_of_the_first_are_refused(broken: Any, facts: tuple[Any, ...], workers: int) -> None:
    items = [{"image": PICTURE, "text": "a"}, {"image": PICTURE, **broken}]
    with refused(UserError, "sample 1 of the data", *facts):
        with_texts(AnySource(items), ItemKeys(), Workers(workers=workers)).texts["text"]
