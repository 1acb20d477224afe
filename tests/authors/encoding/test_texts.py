"""Test runs with captions: what is encoded once, drawn, kept, given to the network, and the same on resume."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import define
from torch import Tensor

from hookdiff import ConfigError, InMemory, load_config, load_run
from hookdiff.authors import EncodedTexts, TextEncoder, on_ranks
from hookdiff.experiment.build import build_feed, build_loop
from tests.conftest import check_refused, records, refused, warnings

CONFIG = """
[run]
steps = 6
batch_size = 6
log_every = 2
device = "cpu"
plugins = ["checkpoint", "ema"]

[data]
source = "tests.authors.encoding.test_texts:drawings"
cache_dir = "{cache}"

[data.encode.text]
use = "tests.authors.encoding.test_texts:Bytes"

[model]
use = "tests.authors.encoding.test_texts:Net"

[diffusion]
conditions = ["text", "text_mask"]

[sampling]
steps = 2
guidance = {{ scale = 2.0 }}
"""
ENCODED: list[str] = []
COLOURS = ("red", "green", "blue")


class Letters:
    """The bytes of a text, at most eight, as tokens of two features."""

    def encode(self, texts: Sequence[str]) -> Mapping[str, Tensor]:
        ENCODED.extend(texts)
        rows = [[*text.encode()[:8], *[0] * (8 - len(text))] for text in texts]
        tokens = torch.tensor([row[:8] for row in rows])
        return {"": torch.stack([tokens, -tokens], 2) / 128 + 1, "_mask": tokens > 0}

    def lengths(self, texts: Sequence[str]) -> Sequence[int]:
        return [len(text) for text in texts]


@define(frozen=True)
class Bytes(TextEncoder):
    """An encoder without weights."""

    version: int = 1

    @property
    def limit(self) -> int:
        return 8

    def digest(self) -> str:
        return hashlib.sha256(f"bytes {self.version}".encode()).hexdigest()[:16]

    def open(self, device: torch.device) -> EncodedTexts:
        return Letters()


class Net(torch.nn.Module):
    """Adds the mean of the text to the image."""

    def __init__(self, in_channels: int = 3) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(in_channels, in_channels, 1)

    def forward(self, x: Tensor, timesteps: Tensor, text: Tensor, text_mask: Tensor) -> Tensor:
        assert text.shape[1:] == (8, 2)
        assert text_mask.dtype == torch.bool
        out: Tensor = self.conv(x) + (text * text_mask[..., None]).mean((1, 2)).view(-1, 1, 1, 1)
        return out


def drawings() -> InMemory:
    """Forty pictures with a caption of three, two captions for each tenth."""
    captions = [[COLOURS[k % 3], f"{COLOURS[k % 3]}, {k}"][: 1 + (k % 10 == 0)] for k in range(40)]
    return InMemory(torch.rand(40, 3, 4, 4, generator=torch.Generator()) * 2 - 1, texts={"text": captions})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    ENCODED.clear()
    path = tmp_path / "text.toml"
    path.write_text(CONFIG.format(cache=tmp_path / "cache"))
    return path


def edited(path: Path, old: str, new: str) -> Path:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return path


def letters(text: str) -> Tensor:
    return Letters().encode([text])[""][0].half().float()


def test_each_caption_is_encoded_once_and_a_changed_one_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_feed(load_config(path))
    different = {"", *COLOURS, *(f"{COLOURS[k % 3]}, {k}" for k in range(0, 40, 10))}
    assert sorted(ENCODED[1:]) == sorted(different)  # after a trial
    ENCODED.clear()
    build_feed(load_config(path))
    assert ENCODED == []
    monkeypatch.setattr("tests.authors.encoding.test_texts.COLOURS", ("red", "green", "purple"))
    build_feed(load_config(path))
    assert set(ENCODED) == {"purple", "purple, 20"}
    ENCODED.clear()
    (rows, *_), others = sorted((path.parent / "cache" / "texts").glob("*/*-*")), None
    assert others is None
    content = bytearray((rows / "about.json").read_bytes())
    content[40] ^= 1
    (rows / "about.json").write_bytes(content)
    build_feed(load_config(path))
    assert 1 < len(set(ENCODED)) < len(different)  # those of the damaged file


@pytest.mark.parametrize("store", ["memory", "disk", "none"])
def test_a_sample_has_one_of_its_captions_in_each_epoch(path: Path, store: str) -> None:
    feed = build_feed(load_config(path, settings=[f"data.encode.text.store={store}"])).bind(6, 3)
    source, seen = drawings(), set[int]()
    assert source.texts is not None
    for epoch in range(12):
        for batch in feed.batches(epoch):
            assert batch.indices is not None
            for row, index in enumerate(batch.indices.tolist()):
                captions = source.texts["text"][index]
                (which,) = [
                    k for k, one in enumerate(captions) if torch.equal(batch.conditions["text"][row], letters(one))
                ]
                seen.add(which)
                assert int(batch.conditions["text_mask"][row].sum()) == min(8, len(captions[which]))
    assert seen == {0, 1}
    first = next(feed.unaugmented(torch.tensor([0])))
    assert torch.equal(first.conditions["text"][0], letters("red"))
    assert torch.equal(feed.nothing["text"], letters(""))
    again = build_feed(load_config(path)).bind(6, 3)
    assert torch.equal(next(again.batches(5)).conditions["text"], next(feed.batches(5)).conditions["text"])


def test_what_is_added_to_captions(path: Path) -> None:
    config = load_config(path, settings=['data.prefix="a "', "data.suffix=!"])
    batch = next(build_feed(config).bind(6, 0).unaugmented(torch.arange(3)))
    assert [torch.equal(batch.conditions["text"][k], letters(f"a {COLOURS[k]}!")) for k in range(3)] == [True] * 3
    settings = ["data.shuffle_tags=1"]
    with refused(ConfigError, "shuffle_tags", "encode.text", "store"):
        build_feed(load_config(path, settings=settings))
    ENCODED.clear()
    feed = build_feed(load_config(path, settings=[*settings, "data.encode.text.store=none"])).bind(6, 0)
    for epoch in range(3):
        list(feed.batches(epoch))
    assert {"red, 0", "red, 30"} <= set(ENCODED)


def without_some() -> InMemory:
    captions = [["red"], [], [" "], ["blue"]] * 3
    return InMemory(torch.zeros(12, 3, 4, 4), texts={"text": captions})


def test_samples_without_a_caption_are_named(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = edited(path, ":drawings", ":without_some")
    with refused(ConfigError, "6 of 12", "sample 1", "sample 2", "missing"):
        build_feed(load_config(path))
    feed = build_feed(load_config(path, settings=["data.missing=empty"]))
    assert any("6 of 12" in warning for warning in warnings(caplog))
    nothing = next(feed.unaugmented(torch.tensor([1]))).conditions["text"][0]
    assert torch.equal(nothing, letters(""))
    feed = build_feed(load_config(path, settings=["data.missing=empty", "data.caption=a dog"]))
    assert torch.equal(next(feed.unaugmented(torch.tensor([1]))).conditions["text"][0], letters("a dog"))


def test_long_captions_are_counted(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build_feed(load_config(path, settings=['data.prefix="a very "']))
    (warning,) = [one for one in warnings(caplog) if "cut" in one]
    assert "7 of 8" in warning
    assert "8 tokens" in warning


BAD = [
    ('use = "tests.authors.encoding.test_texts:Bytes"', 'use = "tests.authors.encoding.test_texts:Bytes"\nof = "txet"',
     ("data: encode.text.of", "'txet'", "'text'")),
    ("[data.encode.text]", "[data.encode.image]", ("data: encode.image", "texts")),
    ("[data.encode.text]", "[data.encode.words]", ("conditions", "'text'", "'words'")),
    ('conditions = ["text", "text_mask"]', 'conditions = ["text", "text_maks"]', ("'text_maks'", "'text_mask'")),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "facts"), BAD)
def test_what_does_not_fit_is_refused(
    path: Path, hookdiff: Callable[..., Any], old: str, new: str, facts: tuple[str, ...]
) -> None:
    check_refused(hookdiff("run", edited(path, old, new), "--out", path.parent / "run"), *facts)


def test_captions_that_nothing_takes_are_refused(path: Path, hookdiff: Callable[..., Any]) -> None:
    path = edited(path, '[data.encode.text]\nuse = "tests.authors.encoding.test_texts:Bytes"', "")
    check_refused(hookdiff("run", path, "--out", path.parent / "run"), "data: texts", "'text'", "[data.encode]")


def in_two_lines() -> InMemory:
    return InMemory(torch.zeros(12, 3, 4, 4), texts={"text": [["red"], ["red\nblue"]] * 6})


def with_space() -> InMemory:
    return InMemory(torch.zeros(12, 3, 4, 4), texts={"text": [["red"], ["blue "]] * 6})


def of_half_a_character() -> InMemory:
    return InMemory(torch.zeros(12, 3, 4, 4), texts={"text": [["red"], ["\ud800"]] * 6})


def under_another_name() -> InMemory:
    return InMemory(torch.zeros(12, 3, 4, 4), texts={"words": [["red"]] * 12})


@pytest.mark.parametrize(
    ("source", "facts"),
    [
        ("in_two_lines", ("sample 1", "red\\nblue", "one line")),
        ("with_space", ("sample 1", "'blue '", "space")),
        ("of_half_a_character", ("sample 1", "surrogates")),
        ("under_another_name", ("captions 'words'", "'text'")),
    ],
)
def test_captions_that_shards_do_not_give_back_are_refused(
    path: Path, hookdiff: Callable[..., Any], source: str, facts: tuple[str, ...]
) -> None:
    settings = ["--set", "data.encode.text.of=words"] * (source == "under_another_name")
    done = hookdiff("data", edited(path, ":drawings", f":{source}"), "--to-shards", path.parent / "to", *settings)
    check_refused(done, *facts)
    assert not (path.parent / "to").exists()


def test_a_run_with_captions_resumes_and_samples_without_its_data(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    with build_loop(config, whole) as loop:
        loop.run()
    with build_loop(load_config(path, settings=["run.steps=3"]), parts) as loop:
        loop.run()
    with build_loop(config, parts, resume=True) as loop:
        loop.run()
    losses = [[line["loss"] for line in records(one) if "loss" in line] for one in (whole, parts)]
    assert losses[0][-1] == losses[1][-1]
    with load_run(parts, trust=True) as run:  # without the data
        assert run.sample(2).shape == (2, 3, 4, 4)
        assert torch.equal(run.loop.objective.without({"text": torch.zeros(1, 8, 2)})["text"][0], letters(""))  # type: ignore[attr-defined]


def test_two_ranks_encode_the_same_rows(path: Path, tmp_path: Path) -> None:
    def rows() -> list[bytes]:
        return [file.read_bytes() for file in sorted((tmp_path / "cache" / "texts").glob("*/*-*/*"))]

    def captions(rank: int) -> Tensor:
        return next(build_feed(load_config(path)).bind(6, 0, rank=0, num_ranks=1).batches(0)).conditions["text"]

    alone, known = captions(0), rows()
    for file in sorted((tmp_path / "cache").rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    for made in on_ranks(2, captions):
        assert torch.equal(made, alone)
    assert rows() == known
