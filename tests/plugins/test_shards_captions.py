"""Captions in shards: read once, and kept beside the index."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy
import pytest

from hookdiff import StorageError, UserError
from hookdiff.images import feed_of
from hookdiff_shards import shards
from hookdiff_shards.stored import load_arrays, save_arrays
from tests.conftest import check_facts, refused, warnings
from tests.plugins.test_shards import Members, sample, write

CONTENTS = [b"one\r\n\r\n two \n", b"\xef\xbb\xbfcaf\xc3\xa9", None, b" \n", b"x" * 100]
CAPTIONS = [("one", "two"), ("café",), (), (), ("x" * 100,)]


def with_text(number: int) -> Members:
    """Return the members of a sample with these captions, which repeat after five samples."""
    content = CONTENTS[number % 5]
    return sample(number, cls=str(number % 3).encode(), **({} if content is None else {"txt": content}))


@pytest.fixture
def made(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with 24 samples in the shards set/0.tar to set/2.tar, the second of which has none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    for number, own in enumerate((range(10), range(0), range(10, 24))):
        write(here / "set" / f"{number}.tar", {k: v for one in own for k, v in with_text(one).items()})
    return here


def texts(data: Any) -> list[Any]:
    (found,) = data.texts.values()
    assert len(found) == len(data)
    return list(found)


WHOLE = [CAPTIONS[number % 5] for number in range(24)]


def test_captions_are_read_when_they_are_asked_for_and_once(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hookdiff")
    assert shards("set").texts is None
    data = shards("set", captions="txt", index_dir="index")
    assert data.fingerprint() == shards("set").fingerprint()
    assert len(feed_of(data).usable) == 24
    assert not list(Path("index").glob("*.captions"))
    caplog.clear()
    assert texts(data) == WHOLE
    (line,) = caplog.messages
    check_facts(line, 3, "captions", "index")
    found = data.texts["text"]  # type: ignore[index]
    assert (found[-1], found[8:11]) == (WHOLE[-1], WHOLE[8:11])
    with pytest.raises(IndexError):
        found[24]
    assert texts(pickle.loads(pickle.dumps(data))) == WHOLE
    caplog.clear()
    again = shards(["set/2.tar", "set/0.tar"], captions="txt", index_dir="index")
    assert texts(again) == WHOLE[10:] + WHOLE[:10]
    assert not caplog.messages
    assert texts(shards("set", captions="cls", index_dir="index")) == [(str(number % 3),) for number in range(24)]
    assert len(list(Path("index").glob("*.captions"))) == 6


def kept() -> Path:
    """Return the file with the captions of set/0.tar, which has the most texts but for set/2.tar."""
    return sorted(Path("index").glob("*.captions"), key=lambda path: path.stat().st_size)[1]


def forged(**values: Any) -> Any:
    """Return a function that writes other arrays, with their digest, to a file."""

    def forge(path: Path) -> None:
        found = load_arrays(path, {})
        assert found
        save_arrays(path, found[0], {**found[1], **{name: numpy.array(value) for name, value in values.items()}})

    return forge


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes().replace(b"one", b"two")),
        lambda path: path.write_bytes(path.read_bytes().replace(b'\\"format\\": 2', b'\\"fromat\\": 1')),
        forged(numbers=[5]),
        forged(numbers=numpy.full(10, 1 << 40)),
        forged(ends=[0, 9, 3]),
        forged(ends=numpy.zeros((2, 2), int)),
        forged(texts=[0.5]),
    ],
)
def test_a_damaged_file_is_reported_and_made_again(made: Path, caplog: pytest.LogCaptureFixture, damage: Any) -> None:
    assert texts(shards("set", captions="txt", index_dir="index")) == WHOLE
    damage(kept())
    for count in (1, 0):
        caplog.clear()
        assert texts(shards("set", captions="txt", index_dir="index")) == WHOLE
        lines = warnings(caplog)
        assert len(lines) == count
        check_facts("".join(lines), *[kept(), "set/0.tar", "captions"] * count)


def test_a_forged_text_hides_no_other(made: Path) -> None:
    texts(shards("set", captions="txt", index_dir="index"))
    before = load_arrays(kept(), {})
    assert before
    forged(texts=numpy.where(before[1]["texts"] == ord("o"), 255, before[1]["texts"]).astype("uint8"))(kept())
    assert texts(shards("set", captions="txt", index_dir="index"))[1:5] == WHOLE[1:5]


def test_the_captions_of_a_shard_that_changes_are_read_again(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hookdiff")
    data = shards("set", captions="txt")
    assert texts(data) == WHOLE
    write(made / "set" / "0.tar", {k: v for one in (4, 3, 0) for k, v in with_text(one).items()})
    os.utime("set/0.tar", ns=(1, 1))
    caplog.clear()
    assert texts(shards("set", captions="txt")) == [*(CAPTIONS[one] for one in (4, 3, 0)), *WHOLE[10:]]
    assert not warnings(caplog)
    check_facts(caplog.messages[-1], 1, 3, "captions")
    changing = shards("set", captions="txt", index_dir="new")
    os.utime("set/0.tar", ns=(2, 2))
    with refused(StorageError, "set/0.tar", "changed"):
        texts(changing)


@pytest.mark.parametrize(
    ("captions", "value", "expected"),
    [
        ("json", "a text ", ("a text",)),
        (".JSON", ["one", "", " two"], ("one", "two")),
        ("json:caption", {"caption": "one\ntwo"}, ("one\ntwo",)),
        ("json:a:b", {"a:b": ["x"]}, ("x",)),
        ("json:caption", {"caption": None}, ()),
        ("meta.json:caption", {"caption": "x"}, ("x",)),
    ],
)
def test_json_has_captions(made: Path, captions: str, value: Any, expected: Any) -> None:
    extension = captions.lower().removeprefix(".").partition(":")[0]
    write(made / "one.tar", sample(0, **{extension: json.dumps(value).encode()}))
    assert texts(shards("one.tar", captions=captions)) == [expected]


def test_another_txt_stays_a_number(made: Path) -> None:
    write(made / "one.tar", sample(0, txt=b"1.5", caption=b"a disc"))
    data: Any = shards("one.tar", captions="caption", conditions={"age": "txt"})
    assert (texts(data), data[0]["age"]) == ([("a disc",)], 1.5)


@pytest.mark.parametrize(
    ("captions", "facts"),
    [
        ("tx", [".tx", "did you mean 'txt'"]),
        ("png", ["captions", ".png", "no text"]),
        ("t5.npy", ["captions", ".npy", "no text"]),
        ("pkl", ["captions", ".pkl", "pickled"]),
        ("txt:caption", ["captions", "'txt:caption'", ".json"]),
        ("", ["no sample"]),
    ],
)
def test_members_that_are_no_captions_are_refused(made: Path, captions: str, facts: list[str]) -> None:
    with refused(ValueError, *facts):
        shards("set", captions=captions)


@pytest.mark.parametrize(
    ("captions", "content", "facts"),
    [
        ("txt", b"caf\xe9", ["one.tar", "0001.txt", "utf-8"]),
        ("txt", b"x" * ((1 << 20) + 1), ["one.tar", "0001.txt", "1,048,577", "1,048,576"]),
        ("json", b"{", ["0001.json"]),
        ("json", b"[" * 100_000, ["0001.json"]),
        ("json", b"5", ["0001.json", "caption", 5]),
        ("json:text", b'{"txet": "x"}', ["0001.json", "'text'", "did you mean 'txet'"]),
        ("json:text", b'{"text": "x", "text": "y"}', ["0001.json", "'text'", "twice"]),
        ("txt", "a dog".encode("utf-16-le"), ["0001.txt", "UTF-16"]),
        ("json:text", b'{"text": "\\ud800"}', ["0001.json", "surrogates"]),
    ],
)
def test_captions_that_cannot_be_read_are_refused(made: Path, captions: str, content: bytes, facts: list[Any]) -> None:
    extension = captions.partition(":")[0]
    fine = b'{"text": "x"}' if ":" in captions else b'"x"'
    for number, bad in enumerate(([1], [1, 2], [1])):
        members = [sample(one, **{extension: content if one in bad else fine}) for one in range(3)]
        write(made / f"{number}" / "one.tar", {name: each for one in members for name, each in one.items()})
    with refused(UserError, "0/one.tar", *facts) as caught:
        texts(shards("0", captions=captions))
    assert "\n" not in str(caught.value)
    with refused(UserError, "1/one.tar", 2, "captions", *facts):
        texts(shards("1", captions=captions))
    with refused(UserError, 3, "0/one.tar", "1/one.tar", "2/one.tar", *facts):
        texts(shards(["0", "1", "2"], captions=captions))


def test_captions_by_url_take_one_request_for_many(made: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    from tests.plugins.test_shards_url import Counted

    fsspec.register_implementation("counted", Counted, clobber=True)
    for number in range(3):
        fsspec.filesystem("memory").pipe(f"/set/{number}.tar", Path(f"set/{number}.tar").read_bytes())
    data = shards("counted://set/{0..2}.tar", captions="txt")
    Counted.reads = 0
    assert texts(data) == WHOLE
    assert Counted.reads == 2
