"""Test that captions are encoded once, stored, drawn and given to the network, and are the same after a resume."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import define
from PIL import Image
from torch import Tensor

from hookdiff import ConfigError, InMemory, UserError, load_config, load_run
from hookdiff.encoding import EncodedTexts, Encoder, TextEncoder
from hookdiff.experiment.build import build_feed, build_loop
from hookdiff.log import read_info
from hookdiff.testing import assert_same
from hookdiff_shards import shards
from tests.conftest import (
    check_facts,
    check_one,
    check_refused,
    mostly_wide,
    output,
    records,
    refused,
    warnings,
    wide,
    write_small,
)
from tests.on_ranks import done, train_config

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
        assert (text.shape[1:], text_mask.dtype) == ((8, 2), torch.bool)
        out: Tensor = self.conv(x) + (text * text_mask[..., None]).mean((1, 2)).view(-1, 1, 1, 1)
        return out


def drawings() -> InMemory:
    """Forty pictures with a caption of three, two captions for each tenth."""
    captions = [[COLOURS[k % 3], f"{COLOURS[k % 3]}, {k}"][: 1 + (k % 10 == 0)] for k in range(40)]
    return InMemory(torch.rand(40, 3, 4, 4, generator=torch.Generator()) * 2 - 1, texts={"text": captions})


def items() -> list[dict[str, Any]]:
    """The same as items of a map-style data set."""
    data = drawings()
    assert data.texts is not None
    return [
        {"image": image, "text": texts[0] if len(texts) == 1 else texts}
        for image, texts in zip(data.images, data.texts["text"], strict=True)
    ]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    ENCODED.clear()
    return write_config(tmp_path)


def write_config(tmp_path: Path) -> Path:
    """Write the config of a small run on `drawings`; return its path."""
    encoders = {"text": {"use": f"{__name__}:Bytes"}}
    return write_small(
        tmp_path / "text.toml",
        run={"batch_size": 6, "log_every": 2, "plugins": ["checkpoint", "ema"]},
        data={"source": f"{__name__}:drawings", "cache_dir": f"{tmp_path}/cache", "encode": encoders},
        model={"use": f"{__name__}:Net"},
        diffusion={"conditions": {"text": "text", "text_mask": "text_mask"}},
        sampling={"steps": 2, "guidance": {"scale": 2.0}},
    )


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
    assert sorted(ENCODED[1:]) == sorted([*different, *different])  # after a trial, and a look at a few
    ENCODED.clear()
    build_feed(load_config(path))
    assert ENCODED == []
    monkeypatch.setattr("tests.encoding.test_texts.COLOURS", ("red", "green", "purple"))
    build_feed(load_config(path))
    assert set(ENCODED) == {"purple", "purple, 20"}
    ENCODED.clear()
    rows, *_ = sorted((path.parent / "cache" / "texts").glob("*/*-*"))
    content = bytearray((rows / "about.json").read_bytes())
    content[40] ^= 1
    (rows / "about.json").write_bytes(content)
    build_feed(load_config(path))
    assert 1 < len(set(ENCODED)) < len(different)  # the texts of the damaged file


@pytest.mark.parametrize("workers", [0, *wide(1)])
def test_texts_in_items_give_the_batches_of_texts_in_memory(path: Path, workers: int) -> None:
    expected = build_feed(load_config(path)).bind(6, 3)
    feed = build_feed(load_config(edited(path, ":drawings", ":items"), settings=[f"data.workers={workers}"])).bind(6, 3)
    for epoch in range(3):
        for one, other in zip(feed.batches(epoch), expected.batches(epoch), strict=True):
            assert torch.equal(one.inputs, other.inputs)
            assert_same(one.conditions, other.conditions)
    feed.close()


@pytest.mark.parametrize("store", ["memory", *wide("disk", "none")])
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
    assert torch.equal(next(feed.unaugmented(torch.tensor([0]))).conditions["text"][0], letters("red"))
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
    return InMemory(torch.zeros(12, 3, 4, 4), texts={"text": [["red"], [], [" ", "\u200b"], ["blue"]] * 3})


def without_any() -> InMemory:
    return InMemory(torch.zeros(12, 3, 4, 4))


def test_samples_without_a_caption_are_named(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = edited(path, ":drawings", ":without_some")
    with refused(ConfigError, "6 of 12", "sample 1", "sample 2", "missing"):
        build_feed(load_config(path))
    feed = build_feed(load_config(path, settings=["data.missing=empty"]))
    assert any("6 of 12" in warning for warning in warnings(caplog))
    assert torch.equal(next(feed.unaugmented(torch.tensor([1]))).conditions["text"][0], letters(""))
    feed = build_feed(load_config(path, settings=["data.caption=a dog", "data.suffix=s"]))
    with refused(ConfigError, "6 of 12"):
        build_feed(load_config(path, settings=["data.caption=' '"]))
    for row in next(feed.unaugmented(torch.tensor([1, 2]))).conditions["text"]:  # none, and a blank one
        assert torch.equal(row, letters("a dogs"))
    feed = build_feed(load_config(edited(path, ":without_some", ":without_any"), settings=["data.caption=a dog"]))
    assert torch.equal(next(feed.unaugmented(torch.tensor([1]))).conditions["text"][0], letters("a dog"))


@pytest.mark.parametrize("store", ["auto", *wide("none")])
def test_long_captions_are_counted(path: Path, caplog: pytest.LogCaptureFixture, store: str) -> None:
    for _ in range(2):  # encoded, then from the table
        caplog.clear()
        build_feed(load_config(path, settings=['data.prefix="a very "', f"data.encode.text.store={store}"]))
        check_one([one for one in warnings(caplog) if "cut" in one], "7 of 8", "such as 'a very ", "8 tokens")


class Words(Letters):
    """Letters that are words of a tokenizer which knows few of them, and looks at four."""

    def tokens(self, texts: Sequence[str]) -> Sequence[Sequence[int | None]]:
        known = {"a": 1, "red": 2, "blue": 3, "disc": 4}
        return [[0, *[known.get(word) for word in text.lower().split()[:4]], 9] for text in texts]


@define(frozen=True)
class FewWords(Bytes):
    """An encoder of few words."""

    def digest(self) -> str:
        return "few words"

    def open(self, device: torch.device) -> EncodedTexts:
        return Words()


def of_words() -> InMemory:
    """Seven captions; captions of unknown words become the same tokens."""
    captions = ["a red disc", "a Red  disc", "a blue disc", "кот", "шар", "a zorp", "красный шар"]
    return InMemory(torch.zeros(7, 3, 4, 4), texts={"text": [[text] for text in captions]})


@pytest.mark.parametrize("store", ["auto", *wide("none")])
def test_captions_that_the_tokenizer_loses_are_counted(
    path: Path, caplog: pytest.LogCaptureFixture, hookdiff: Callable[..., Any], store: str
) -> None:
    path = edited(edited(path, ":drawings", ":of_words"), ":Bytes", ":FewWords")
    for _ in range(2):  # encoded, then from the table
        caplog.clear()
        build_feed(load_config(path, settings=[f"data.encode.text.store={store}"]))
        unknown, same = [one for one in warnings(caplog) if "cut" not in one]
        check_facts(unknown, "data.encode.text", "3 of 8", "such as 'кот'", "knows")
        check_facts(same, "data.encode.text", "1 of 8", "same tokens", "'шар' and 'кот'")
    found = json.loads(output(hookdiff("data", path, "--seconds", "0", "--json")))["captions"]["text"]
    assert (found["unique"], found["tokens"]["text"]["unknown"], found["tokens"]["text"]["same"]) == (7, 3, 1)
    lines = output(hookdiff("data", path, "--seconds", "0"))
    check_facts(lines, "7 different", "3 of the different ones", "1 of the different ones", "same tokens")


def tagged() -> InMemory:
    captions = ["a, ,b, c, d, e,, f, "]  # an empty tag is none
    return InMemory(torch.zeros(12, 3, 4, 4), texts={"text": [captions] * 12})


def test_tags_are_shuffled_anew_in_each_epoch_but_the_first(path: Path) -> None:
    path = edited(path, ":drawings", ":tagged")
    feed = build_feed(load_config(path, settings=["data.shuffle_tags=2", "data.encode.text.store=none"])).bind(12, 0)

    def seen(epoch: int) -> list[str]:
        ENCODED.clear()
        (batch,) = feed.batches(epoch)
        assert batch.indices is not None
        return [ENCODED[int(row)] for row in batch.indices.argsort()]

    first, second = seen(0), seen(1)
    assert all(text.startswith("a, b, ") and sorted(text) == sorted("a, b, c, d, e, f") for text in first)
    assert (len(set(first)) > 6, first == second, first == seen(0)) == (True, False, True)


def two_kinds() -> list[dict[str, Any]]:
    return [{**item, "alt": "a drawing"} for item in items()]


ENCODER = 'use = "tests.encoding.test_texts:Bytes"'
NO_ENCODER = (f"[data.encode.text]\n{ENCODER}", "")
SAMPLES = ('"ema",', '"ema", "samples",')
BAD: list[tuple[list[tuple[str, str]], tuple[str, ...]]] = [
    ([(ENCODER, f'{ENCODER}\nof = "txet"')], ("data: encode.text.of", "'txet'", "'text'")),
    ([("[data.encode.text]", "[data.encode.image]")], ("data: encode.image", "texts")),
    ([("[data.encode.text]", "[data.encode.words]")], ("conditions", "'text'", "'words'")),
    ([('text_mask = "text_mask"', 'text_mask = "text_maks"')], ("'text_maks'", "'text_mask'")),
    ([NO_ENCODER], ("data: texts", "'text'", "[data.encode]")),
    ([(":drawings", ":items"), NO_ENCODER], ("sample 0", "'text'", "[data.encode]")),
    ([(":drawings", ":two_kinds")], ("data: texts", "'alt'", "[data.encode]")),
    ([SAMPLES, ("[model]", '[plugins.samples]\nprompts = "nowhere.txt"\n[model]')], ("nowhere.txt",)),
    (
        [SAMPLES, ("[model]", '[plugins.samples]\nprompts = ["red"]\nclasses = [1]\n[model]')],
        ("plugins.samples", "classes", "prompts"),
    ),
]


@pytest.mark.parametrize(("changes", "facts"), mostly_wide(5, BAD))
def test_what_does_not_fit_is_refused(path: Path, hookdiff: Any, changes: Any, facts: tuple[str, ...]) -> None:
    for old, new in changes:
        edited(path, old, new)
    check_refused(hookdiff("run", path, "--out", path.parent / "run"), *facts)


def test_texts_in_items_are_written_to_shards(path: Path, succeed: Callable[..., str]) -> None:
    folder = path.parent / "shards"
    succeed("data", edited(path, ":drawings", ":items"), "--to-shards", folder)
    written = shards(str(folder), image="npy", captions="txt", index_dir=str(path.parent)).texts
    assert written is not None
    assert [*map(list, written["text"])] == (drawings().texts or {})["text"]


SPOILT: dict[str, list[list[str]]] = {}


def spoilt() -> InMemory:
    return InMemory(torch.zeros(12, 3, 4, 4), texts=SPOILT)


@pytest.mark.parametrize(
    ("name", "caption", "facts"),
    [
        ("text", "red\nblue", ("sample 1", "red\\nblue", "one line")),
        ("text", "blue ", ("sample 1", "'blue '", "space")),
        ("text", "\ud800", ("sample 1", "surrogates")),
        ("words", "red", ("captions 'words'", "'text'")),
    ],
)
def test_captions_that_shards_do_not_give_back_are_refused(
    path: Path, hookdiff: Any, monkeypatch: pytest.MonkeyPatch, name: str, caption: str, facts: tuple[str, ...]
) -> None:
    monkeypatch.setitem(SPOILT, name, [["red"], [caption]] * 6)
    edited(edited(path, ":drawings", ":spoilt"), ENCODER, f'{ENCODER}\nof = "{name}"')
    check_refused(hookdiff("data", path, "--to-shards", path.parent / "to"), *facts)
    assert not (path.parent / "to").exists()


class Odd:
    """Returns wrong conditions, of the kind that `name` says."""

    def __init__(self, name: str) -> None:
        self.name = name

    def encode(self, texts: Sequence[str]) -> Any:
        num, longest = len(texts), max(map(len, texts)) or 1
        rows, mask = torch.zeros(num, 8, 2), torch.ones(num, 8, dtype=torch.bool)
        if self.name == "infinite":
            rows[["red" in text for text in texts]] = torch.inf
        return {
            "list": [rows],
            "numpy": {"": rows.numpy()},
            "nothing": {},
            "mask": {"": rows, "mask": mask},
            "number": {"": rows, "_mask": torch.tensor(1.0)},
            "one row": {"": rows, "_mask": mask[:1]},
            "no tokens": {"": rows[:, :0]},
            "int32": {"": rows, "_mask": mask.int()},
            "longest": {"": torch.zeros(num, longest, 2)},
            "sometimes": {"": rows, **({"_mask": mask} if longest > 1 else {})},
        }.get(self.name, {"": rows})


@define(frozen=True)
class OddTexts(Bytes):
    """An encoder with a mistake."""

    name: str = ""

    @property
    def limit(self) -> Any:
        return 8 if self.name == "limit" else None

    def digest(self) -> Any:
        return {"no text": "", "integer": 3}.get(self.name, "odd")

    def open(self, device: torch.device) -> Any:
        return Odd(self.name)


WRONG = [
    ("list", ("list", '"_mask"')),
    ("nothing", ("[]", '"_mask"')),
    ("mask", ("['', 'mask']", '"_mask"')),
    ("numpy", ("'text'", "ndarray", "tensor")),
    ("number", ("'text_mask'", "()", "n rows")),
    ("one row", ("'text_mask'", "n =", "(1, 8)", "n rows")),
    ("no tokens", ("'text'", "0, 2)", "not empty")),
    ("int32", ("'text_mask'", "int32", "float", "bool", "int64")),
    ("longest", ("'text' (", "float16", "digest 'odd'")),
    ("sometimes", ("'text_mask' (8,) bool", "digest 'odd'")),
    ("no text", ("digest()", "''", "string")),
    ("integer", ("digest()", "3", "string")),
    ("limit", ("limit = 8", "lengths(texts)")),
]


@pytest.mark.parametrize("store", ["disk", *wide("none")])
@pytest.mark.parametrize(("name", "facts"), WRONG)
def test_what_an_encoder_returns_is_checked(path: Path, name: str, facts: tuple[str, ...], store: str) -> None:
    settings = [f"data.encode.text.name={name}", f"data.encode.text.store={store}"]
    with refused(UserError, "data.encode.text: OddTexts", "expected", *facts):
        feed = build_feed(load_config(edited(path, ":Bytes", ":OddTexts"), settings=settings)).bind(6, 0)
        assert feed.facts.encoders
        list(feed.batches(0))


def test_a_text_of_values_that_float16_does_not_hold_is_named(path: Path) -> None:
    settings = ["data.encode.text.name=infinite", "data.prefix='a\t'"]
    with refused(ConfigError, "data.encode.text: 'a\\tred' becomes", "float16"):
        build_feed(load_config(edited(path, ":Bytes", ":OddTexts"), settings=settings))


def test_a_row_of_another_form_than_those_of_earlier_runs_is_refused(path: Path) -> None:
    path = edited(path, ":Bytes", ":OddTexts")
    build_feed(load_config(path))
    more = ["data.prefix=a "]
    with refused(ConfigError, "data.encode.text: OddTexts", "'text_mask'", "digest 'odd'"):
        build_feed(load_config(path, settings=[*more, "data.encode.text.name=sometimes"]))
    build_feed(load_config(path, settings=more))


@define(frozen=True)
class Named(Bytes):
    """An encoder with a digest of any characters, which makes tokens as numbers."""

    name: str = "v1"

    def digest(self) -> str:
        return self.name

    def open(self, device: torch.device) -> Any:
        network: Any = Letters()
        network.encode = lambda texts: {"": torch.tensor([[len(text), 7] for text in texts])}
        return network


@pytest.mark.parametrize("digest", ["../../../out", "/tmp", "a/b", ".", "é \0\ud800", "x" * 300])
def test_no_digest_leads_out_of_the_cache(path: Path, digest: str) -> None:
    before = {*path.parent.iterdir(), path.parent / "cache"}
    settings = [f"data.encode.text.name={json.dumps(digest)}"]
    batch = next(build_feed(load_config(edited(path, ":Bytes", ":Named"), settings=settings)).bind(6, 0).batches(0))
    assert (batch.conditions["text"][:, 1].tolist(), {*path.parent.iterdir()}) == ([7] * 6, before)
    assert [one.parent.name for one in (path.parent / "cache").rglob("*-*")] == [
        one.name for one in (path.parent / "cache" / "texts").iterdir() if one.is_dir()
    ]


@pytest.mark.parametrize("source", ["drawings", *wide("items")])
def test_a_run_with_captions_resumes_and_samples_without_its_data(path: Path, tmp_path: Path, source: str) -> None:
    path = edited(path, ":drawings", f":{source}")
    config, whole, parts = load_config(path), tmp_path / "whole", tmp_path / "parts"
    build_loop(config, whole).run()
    build_loop(load_config(path, settings=["run.steps=3"]), parts).run()
    build_loop(config, parts, resume=True).run()
    losses = [[line["loss"] for line in records(one) if "loss" in line] for one in (whole, parts)]
    assert losses[0][-1] == losses[1][-1]
    with (
        refused(UserError, "data.encode.text", "another encoder", Bytes(1).digest(), Bytes(2).digest()),
        build_loop(load_config(path, settings=["data.encode.text.version=2", "run.steps=8"]), parts, resume=True),
    ):
        pass
    with build_loop(load_config(path, settings=["data.encode.text.store=none"]), parts, resume=True) as loop:
        assert loop.progress.step == 6
    with load_run(parts, trust=True) as run:  # without the data
        assert run.sample(2).shape == (2, 3, 4, 4)
        assert torch.equal(run.loop.objective.without({"text": torch.zeros(1, 8, 2)})["text"][0], letters(""))  # type: ignore[attr-defined]


def assert_ranks_train_as_one(path: Path, tmp_path: Path) -> float:
    """Train as a config says, on this process and on two ranks, and return the loss."""
    path = edited(path, "[sampling]", '[optimizer]\nuse = "adamw"\n\n[sampling]')
    alone = train_config({"path": path, "plugins": (), "out": tmp_path / "alone"})
    both = done(tmp_path, 2, train_config, {"path": path, "plugins": ("ddp",), "out": tmp_path / "both"})
    assert (alone["step"], both["step"], both["loss"]) == (10, 10, pytest.approx(alone["loss"], rel=1e-5))
    return float(alone["loss"])


@pytest.mark.wide
def test_two_ranks_train_on_texts_as_one_does(path: Path, tmp_path: Path) -> None:
    assert_ranks_train_as_one(path, tmp_path)


class Shows(torch.nn.Module):
    """Predicts a picture that has the mean of the text everywhere."""

    def __init__(self, in_channels: int = 3) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, timesteps: Tensor, text: Tensor, text_mask: Tensor) -> Tensor:
        return self.scale * text.mean((1, 2)).view(-1, 1, 1, 1).expand_as(x)


class Half(Letters):
    """The bytes of a text in one of two features, so that texts differ in their mean."""

    def encode(self, texts: Sequence[str]) -> Mapping[str, Tensor]:
        made = super().encode(texts)
        return {**made, "": made[""] * torch.tensor([0.25, 0.0])}


@define(frozen=True)
class Halved(Bytes):
    """An encoder whose texts differ in their mean."""

    def digest(self) -> str:
        return f"halved {self.version}"

    def open(self, device: torch.device) -> EncodedTexts:
        return Half()


def test_a_run_draws_prompts_without_its_data(path: Path, tmp_path: Path) -> None:
    def mean(text: str) -> float:
        return float(Half().encode([text])[""].half().float().mean())

    path = edited(edited(path, ":Bytes", ":Halved"), ":Net", ":Shows")
    settings = ["diffusion.prediction=sample", "diffusion.process=vp", "sampling.clipping=none", "optimizer.lr=1e-9"]
    build_loop(load_config(path, settings=settings), tmp_path / "run").run()
    with load_run(tmp_path / "run", trust=True) as run:
        asked = {"prompts": ["red", "a cat"], "raw": True, "weights": "model"}
        plain = run.sample(3, **asked, guidance_scale=1.0).mean((1, 2, 3)).tolist()
        assert plain == pytest.approx([mean("red"), mean("a cat"), mean("red")], abs=1e-3)
        guided = run.sample(2, **asked, guidance_scale=3.0).mean((1, 2, 3)).tolist()
        assert guided == pytest.approx([mean("") + 3 * (mean(one) - mean("")) for one in ("red", "a cat")], abs=1e-3)
        away = run.sample(1, **asked, guidance_scale=3.0, negative="dog").mean()
        assert float(away) == pytest.approx(mean("dog") + 3 * (mean("red") - mean("dog")), abs=1e-3)
        first = run.sample(1, guidance_scale=1.0, raw=True, weights="model").mean()  # of the first training sample
        assert float(first) == pytest.approx(mean("red"), abs=1e-3)
    with refused(ConfigError, "data.encode.text", "halved 1", "halved 2"):
        load_run(tmp_path / "run", ["data.encode.text.version=2"], trust=True).sample(1)


@pytest.mark.wide
def test_samples_have_a_row_for_each_prompt(path: Path, tmp_path: Path, succeed: Callable[..., str]) -> None:
    long = "a very long prompt " * 5
    (tmp_path / "prompts.txt").write_text(f"red\n\n{long}\n")
    extra = f'[plugins.samples]\nnum = 4\nprompts = "{tmp_path}/prompts.txt"\n'
    path = edited(path, '"ema",', '"ema", "samples",')
    path.write_text(path.read_text() + extra)
    succeed("run", path, "--out", tmp_path / "run")
    with Image.open(tmp_path / "run" / "samples" / "step-00000006.png") as picture:
        info = read_info(picture)
    assert (info["prompts"], info["panels"][0]["columns"]) == (["red", long.strip()], 2)
    logged = [json.loads(line)["texts"] for line in (tmp_path / "run" / "texts.jsonl").read_text().splitlines()]
    assert [one["samples/prompts"] for one in logged if "samples/prompts" in one] == [f"red\n{long.strip()}"]
    (tmp_path / "prompts.txt").write_text("blue\n")
    succeed("resume", tmp_path / "run", "--steps", "8", "--trust")
    with Image.open(tmp_path / "run" / "samples" / "step-00000008.png") as picture:
        assert read_info(picture)["prompts"] == ["blue"]


@pytest.mark.parametrize("store", ["auto", *wide("none")])
def test_prompts_that_are_cut_are_named_once(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, store: str
) -> None:
    build_loop(load_config(path, settings=[f"data.encode.text.store={store}"]), tmp_path / "run").run()
    caplog.clear()
    with load_run(tmp_path / "run", trust=True) as run:
        for negative in ("far too long", None):
            run.sample(2, prompts=["a red one", "red"], negative=negative)
    second, first = sorted(one for one in warnings(caplog) if "cut" in one)
    check_facts(first, "data.encode.text", "1 of 2", "a red one", "8 tokens")
    check_facts(second, "data.encode.text", "1 of 1", "far too long", "8 tokens")


@pytest.mark.wide
def test_the_command_draws_prompts(path: Path, tmp_path: Path, hookdiff: Callable[..., Any]) -> None:
    run, out = tmp_path / "run", tmp_path / "out.png"
    output(hookdiff("run", edited(edited(path, ":Bytes", ":Halved"), ":Net", ":Shows"), "--out", run))
    sample = ("sample", run, "--trust", "--steps", "2")
    output(hookdiff(*sample, "--prompt", "red", "--prompt", "a cat", "--num", "4", "--out", out, "--negative", "dog"))
    with Image.open(out) as picture:
        info = read_info(picture)
    assert (info["prompts"], info["negative"], info["panels"][0]["columns"]) == (["red", "a cat"], "dog", 2)
    (tmp_path / "prompts.txt").write_text("blue\ngreen\n")
    output(hookdiff(*sample, "--prompts", tmp_path / "prompts.txt", "--each", tmp_path / "each"))
    assert [file.read_text() for file in sorted((tmp_path / "each").glob("*.txt"))] == ["blue\n", "green\n"]
    check_refused(hookdiff(*sample, "--prompt", "red", "--each", tmp_path / "each"), "000000.png", "--overwrite")
    strips = ("--interpolate", "3", "--num", "2", "--out", out, "--overwrite")
    output(hookdiff(*sample, *strips, "--prompt", "red", "--prompt", "blue"))
    output(hookdiff(*sample, *strips, "--prompt", "red"))
    check_refused(hookdiff(*sample, "--prompts", tmp_path / "none.txt"), "none.txt")
    for option in ("--prompt", "--negative"):  # bytes that are no UTF-8, and the controls that UTF-16 has
        for text in (b"a \xff".decode(errors="surrogateescape"), "\x04:\x04>"):
            refused_words = ("--prompt", "red", option, text, "--each", tmp_path / "no")
            check_refused(hookdiff(*sample, *refused_words), "prompt", ascii(text)[1:-1])


@pytest.mark.wide
def test_prompts_for_a_network_without_captions_are_refused(
    path: Path, tmp_path: Path, hookdiff: Callable[..., Any]
) -> None:
    path.write_text(
        '[run]\nsteps = 2\nbatch_size = 4\nplugins = ["checkpoint"]\n[data]\nsource = "digits"\n'
        '[model]\nuse = "unet"\nchannels = 8\nnum_res_blocks = 1\nhead_dim = 8\n'
    )
    output(hookdiff("run", path, "--out", tmp_path / "run"))
    check_refused(hookdiff("sample", tmp_path / "run", "--prompt", "red", "--steps", "1"), "texts", "without")
    prompts = 'plugins.samples.prompts=["red"]'
    done = hookdiff("run", path, "--plugins", "samples", "--set", prompts, "--out", tmp_path / "other")
    check_refused(done, "plugins.samples.prompts", "without captions")


@define(frozen=True)
class Neither(Encoder):
    """An encoder of no kind."""

    def digest(self) -> str:
        return "neither"


def test_an_encoder_of_no_kind_is_refused(path: Path) -> None:
    with refused(ConfigError, "encode.text", "Neither", "PictureEncoder", "TextEncoder"):
        build_feed(load_config(edited(path, ":Bytes", ":Neither")))
