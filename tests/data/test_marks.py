"""Test that a resumed run says which part of its data has changed, and how."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from hookdiff import InMemory, load_config
from hookdiff.data.feed import Feed
from hookdiff.data.marks import changed_parts
from hookdiff.experiment.build import build_feed
from tests.conftest import Restores, kept, pixels, toy_loop, warnings, write_small


def memory(**changes: Any) -> Feed:
    parts = {"images": IMAGES, "labels": LABELS, "conditions": {"mask": ROWS[:, None] > 20}}
    return Feed(InMemory(**{**parts, **changes}), held_out=10)


ROWS = torch.arange(40)
IMAGES, LABELS = torch.linspace(-1, 1, 160).reshape(40, 4), ROWS % 2
CHANGES: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({}, {}),
    ({"images": IMAGES * 0.5}, {"inputs": "others"}),
    ({"images": IMAGES.flip(0)}, {"inputs": "in another order"}),
    ({"labels": (ROWS > 25).long()}, {"labels": "others", "held-out samples": "others"}),
    ({"conditions": {"mask": ROWS[:, None] > 21}}, {"conditions 'mask'": "others"}),
]


def parts_of(text: str) -> dict[str, str]:
    """Return the parts of the data that a message names, and how they have changed."""
    return dict(re.findall(r"(\w[^:,(]*) \(([^)]*)\)", text.partition(": ")[2]))


@pytest.mark.parametrize(("change", "parts"), CHANGES)
def test_a_resumed_run_names_what_has_changed(
    caplog: pytest.LogCaptureFixture, change: dict[str, Any], parts: dict[str, str], tmp_path: Path
) -> None:
    state = kept(at=2, data=memory()).state
    toy_loop({"memory": Restores(state)}, data=memory(**change), steps=4, run_dir=tmp_path, resume=True).run()
    assert [parts_of(text) for text in warnings(caplog) if "data has changed" in text] == [parts] * bool(parts)


def rewrite(folder: Path) -> None:
    Image.fromarray(pixels(9, 12)).save(folder / "a" / "0.png")


def swap(folder: Path) -> None:
    first, second = folder / "a/0.txt", folder / "b/3.txt"
    texts = first.read_text(), second.read_text()
    first.write_text(texts[1])
    second.write_text(texts[0])


def edit(folder: Path) -> None:
    (folder / "a" / "0.txt").write_text("another")


def add(folder: Path) -> None:
    Image.fromarray(pixels(9, 8)).save(folder / "b" / "9.png")
    (folder / "b" / "9.txt").write_text("more")


def relabel(folder: Path) -> None:
    for suffix in ("png", "txt"):
        (folder / f"a/1.{suffix}").rename(folder / f"b/1.{suffix}")


IN_FILES: list[tuple[Callable[[Path], None], dict[str, str]]] = [
    (lambda folder: None, {}),
    (rewrite, {"pictures": "edited, moved or written anew"}),
    (swap, {"captions 'text'": "in another order"}),
    (edit, {"captions 'text'": "others"}),
    (add, {"pictures": "4 -> 5", "captions 'text'": "4 -> 5", "labels": "4 -> 5"}),
    (relabel, {"pictures": "others", "labels": "others"}),
]


@pytest.mark.parametrize(("change", "parts"), IN_FILES)
def test_what_has_changed_in_a_folder(change: Callable[[Path], None], parts: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "set"
    for k in range(4):
        path = folder / "ab"[k // 2] / f"{k}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(k, 8)).save(path)
        path.with_suffix(".txt").write_text(f"number {k}")
    data = {"source": "folder", "path": str(folder), "captions": "txt", "cache_dir": f"{tmp_path}/cache"}
    data |= {"image_size": 8, "encode": {"text": {"use": "tests.encoding.test_texts:Bytes"}}}
    config = write_small(tmp_path / "small.toml", data=data)
    before = build_feed(load_config(config)).facts.marks
    change(folder)
    found = changed_parts(before, build_feed(load_config(config)).facts.marks)
    assert parts_of(f": {', '.join(found)}") == parts
