"""Hostile names and labels among the data: no name reaches the terminal as it is."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image

from hookdiff import UserError
from hookdiff.images import Folder, Store, Transforms, feed_of
from tests.conftest import PICTURES, check_facts, pixels, refused
from tests.hostile.mutations import HERE, in_time, remove

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")


def write(folder: Path, num: int = 6) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for k in range(num):
        Image.fromarray(pixels(k)).save(folder / f"{k}.png")


def assert_clean(text: str) -> None:
    assert re.search(r"[^\x20-\x7e\n\u00a1-\ud7ff\uf900-\U0001ffff]", text) is None, ascii(text)


CHARACTER = st.sampled_from("\x1b\n\r\t\b\x7f\x9b\u202e\u2028\udcff\udc80'\"\\[]m31;") | st.characters(codec="utf-8")
NAME = st.text(CHARACTER, min_size=1, max_size=20).map(lambda name: name.replace("/", "").replace("\0", "").strip(". "))


@given(
    names=st.lists(NAME.filter(bool), min_size=2, max_size=4, unique_by=lambda name: name.casefold()),
    store=st.sampled_from(["memory", "disk", "none"]),
    broken=st.booleans(),
)
@HERE
def test_hostile_names_of_pictures_and_classes(tmp_path: Path, names: list[str], store: Any, broken: bool) -> None:
    root = tmp_path / "set"
    for path in tmp_path.iterdir():
        remove(path)
    for k, name in enumerate(names):
        (root / name).mkdir(parents=True)
        Image.fromarray(pixels(k)).save(root / name / f"{name}.png")
    kept = Store(store=store, cache_dir=str(tmp_path / "cache"))
    feed = feed_of(Folder(str(root)), Transforms(image_size=4), kept)
    assert feed.classes is not None
    assert len(feed.classes) == len(feed.training) == len(names)
    for text in (*feed.classes, *map(feed.describe, range(len(names)))):
        assert text.isprintable()
    assert len({batch.inputs.sum().item() for batch in feed.unaugmented(torch.arange(len(names)), 1)}) == len(names)
    if broken:
        (root / names[0] / f"{names[0]}.png").write_bytes(b"nothing")
        with pytest.raises(UserError) as caught:
            feed_of(Folder(str(root)), Transforms(image_size=4), kept)
        assert all(line.isprintable() for line in str(caught.value).split("\n"))
        check_facts(caught.value, root, 1, len(names))


EVIL = ["\x1b[31mred\n", "two\nlines", "\udcff\udcfe", "\u202ecod", "quote'\"\\"]


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, itself with such a name, with classes and pictures of hostile names and a config."""
    here = tmp_path / "\x1b]0;\udcffx"
    here.mkdir()
    monkeypatch.chdir(here)
    for k in range(20):
        folder = here / "pictures" / EVIL[k % len(EVIL)]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(k // 2)).save(folder / f"{EVIL[k % 3]}{k}.png")  # pairs of duplicates
    (here / "config.toml").write_text(PICTURES)
    return here


def test_reports_escape_names(hookdiff: Any, evil: Path) -> None:
    (evil / "pictures" / EVIL[0] / f"{EVIL[1]}9.png").write_bytes(b"nothing")
    code, out, err = hookdiff("data", "config.toml", "--seconds", "0")
    assert code == 2
    assert_clean(err)
    settings = ("--seconds", "0", "--set", "data.unreadable=skip")
    code, out, err = hookdiff("data", "config.toml", *settings)
    assert code == 0
    assert_clean(out)
    assert_clean(err)
    code, out, err = hookdiff("data", "config.toml", "--json", *settings)
    found = json.loads(out)
    names = [
        *found["classes"],
        *found["unreadable"]["files"],
        *(name for g in found["duplicates"]["groups"] for name in g),
    ]
    assert (len(found["classes"]), found["unreadable"]["count"]) == (len(EVIL), 1)
    assert all(name.isprintable() for name in names)


@pytest.mark.wide
def test_the_doctor_escapes_names(hookdiff: Any, evil: Path) -> None:
    code, out, err = hookdiff("doctor", "config.toml", "--steps", "2")
    assert code in (0, 1)
    assert_clean(out + err)


def test_a_run_trains_on_files_with_any_name(hookdiff: Any, evil: Path, tmp_path: Path) -> None:
    words = ("--set", "data.store=disk", "--set", f"data.cache_dir={tmp_path / 'cache'}", "--set", "run.import_from=/")
    code, out, err = hookdiff("run", "config.toml", "--out", tmp_path / "run", *words)
    assert code == 0, err
    assert_clean(out + err)


def test_labels_of_files_with_any_name(tmp_path: Path) -> None:
    write(tmp_path, 2)
    names = [f"{name}.png" for name in EVIL if "\\" not in name]
    for name in names:
        Image.fromarray(pixels(9)).save(tmp_path / name)
    every = ["0.png", "1.png", *names]
    lines = [json.dumps({"file": name, "label": k}) for k, name in enumerate(every)]
    (tmp_path / "l.jsonl").write_text("\n".join(lines))
    data = Folder(str(tmp_path), "l.jsonl")
    assert data.labels is not None
    assert {name: every.index(name) for name in data.files} == dict(zip(data.files, data.labels.tolist(), strict=True))
    (tmp_path / "l.csv").write_text("file,label\n0.png,1\n1.png,0\n")
    with pytest.raises(UserError) as caught:
        feed_of(Folder(str(tmp_path), "l.csv"))
    check_facts(caught.value, tmp_path / "l.csv", len(names))
    assert all(line.isprintable() for line in str(caught.value).split("\n"))


@pytest.mark.parametrize("label", [2**24, 2**63 - 1, 2**63, 2**70, 10**400, -2, -(2**70)])
@pytest.mark.parametrize("name", ["l.csv", "l.jsonl"])
def test_labels_that_are_no_classes_are_refused(tmp_path: Path, name: str, label: int) -> None:
    write(tmp_path, 2)
    text = f'{{"file": "0.png", "label": {label}}}\n{{"file": "1.png", "label": 0}}\n'
    (tmp_path / name).write_text(text if "json" in name else f"file,label\n0.png,{label}\n1.png,0\n")
    with in_time(), pytest.raises((UserError, ValueError)) as caught:
        feed_of(Folder(str(tmp_path), name))
    check_facts(caught.value, tmp_path / name)


class Labelled(Folder):
    def __init__(self, path: str, labels: Any) -> None:
        super().__init__(path)
        self.labels = torch.tensor(labels)


@pytest.mark.parametrize("labels", [[0, 2**24], [0, 2**62], [-2, 0]])
def test_labels_of_any_source_are_checked(tmp_path: Path, labels: Any) -> None:
    write(tmp_path, 2)
    with refused(UserError, "labels", labels[0] if labels[0] else labels[1]):
        feed_of(Labelled(str(tmp_path), labels))
