"""`hookdiff data`."""

import json
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from hookdiff import load_config
from hookdiff.experiment.build import build_feed
from tests.conftest import check_facts, check_refused, pixels
from tests.encoding import test_texts
from tests.encoding.test_texts import Letters


@pytest.fixture(autouse=True)
def folder(pictures: Path) -> Path:
    return pictures


@pytest.fixture
def report(succeed: Any) -> Any:
    """Return a function that returns the output of `hookdiff data`, which does not measure the speed."""
    return lambda *words: succeed("data", *words, "--seconds", "0")


def table(out: str) -> dict[str, list[str]]:
    """Return the texts of a report by name; a line without a name belongs to the name before."""
    texts: dict[str, list[str]] = {}
    name = ""
    for line in out.splitlines():
        name = line[:13].strip() or name
        texts.setdefault(name, []).append(line[13:])
    return texts


def test_golden_report_of_a_data_set(report: Any) -> None:
    texts = table(report("config.toml", "--out", "pictures/first.png"))
    golden = {
        "source": ["folder"],
        "samples": ["24, 4 of them held out"],
        "sizes": ["10 x 10: 22, 12 x 12: 2"],
        "modes": ["RGB: 24"],
        "classes": ["2: ant 18, bee 6"],
        "balance": ["6 to 18 samples a class, ratio 3.0"],
        "store": ["memory: 4.5 KiB in cpu"],
        "unreadable": ["0"],
    }
    assert {name: texts[name] for name in golden} == golden
    pair = "pictures/ant/00.png = pictures/ant/20.png"
    assert texts["duplicates"][:2] == ["4 with the same pixels as another", pair]
    assert re.fullmatch(r"[\d,]+ img/s", texts["speed"][0])
    assert texts["picture"][0] == "pictures/first.png: the first 8 images of epoch 0"
    assert [len(row.split()) for row in texts["picture"][1:]] == [3, 3, 2]
    with Image.open("pictures/first.png") as picture:
        assert picture.mode == "RGB"
        assert picture.size == (3 * 64 + 4 * 4, 3 * 64 + 4 * 4)


def test_the_report_has_the_statistics_of_the_pixels(report: Any) -> None:
    found = json.loads(report("config.toml", "--json", "--set", "data.image_size=10"))
    assert (found["samples"], found["training"], found["held_out"]) == (24, 20, 4)
    assert (found["shape"], found["sizes"], found["modes"]) == ([3, 10, 10], [[10, 10, 22], [12, 12, 2]], {"RGB": 24})
    assert found["classes"] == {"ant": 18, "bee": 6}
    assert found["store"] == {"place": "memory", "bytes": 24 * 300, "device": "cpu", "path": None, "workers": 0}
    assert found["duplicates"]["count"] == 4
    whole = numpy.stack([pixels(k % 20) for k in range(24) if k % 20])
    means = (found["values"]["mean"], found["values"]["std"])
    scaled = whole / 127.5 - 1
    assert means[0] == pytest.approx(scaled.mean((0, 1, 2)), abs=0.01)  # two of 24 are resized
    assert means[1] == pytest.approx(scaled.std((0, 1, 2)), abs=0.03)
    assert (found["values"]["min"], found["values"]["max"]) == (-1, 1)


USER = """
import torch

def spoiled() -> torch.Tensor:
    x = torch.rand(20, 1, 8, 8)
    x[7, 0, 3, 3] = torch.nan
    x[9] = torch.inf
    return x

def latents() -> torch.Tensor:
    return torch.zeros(9, 5, 4, 4)
"""


def test_samples_that_are_not_finite_are_listed(report: Any, write_config: Any, user_module: Any) -> None:
    user_module("hd_data_user", USER)
    count, *samples = table(report(write_config(data={"source": "hd_data_user:spoiled"})))["not finite"]
    assert samples == ["sample 7", "sample 9"]
    check_facts(count, 2)


@pytest.mark.parametrize("store", ["memory", "disk", "none"])
def test_unreadable_files_are_listed(hookdiff: Any, report: Any, folder: Path, store: str) -> None:
    (folder / "pictures" / "ant" / "01.png").write_bytes(b"nothing")
    whole = (folder / "pictures" / "ant" / "05.png").read_bytes()
    (folder / "pictures" / "ant" / "05.png").write_bytes(whole[:-80])
    options = ["--set", f"data.store={store}", "--set", "data.cache_dir=cache"]
    check_refused(hookdiff("data", "config.toml", *options), "pictures/ant")
    Image.open(bee := folder / "pictures" / "bee" / "07.png").copy().save(bee, icc_profile=b"broken")
    texts = table(report("config.toml", *options, "--set", "data.unreadable=skip"))
    check_facts(texts["samples"][0], "24, 2 of them unreadable, 4 of them held out")
    check_facts(texts["classes"][0], "ant 16, bee 6")
    check_facts(texts["sizes"][0], "1 of them unreadable after the header")
    check_facts(texts["profiles"][0], "1 ignored")
    check_facts(texts["profiles"][1], "pictures/bee/07.png", "profile is broken")
    count, *files = texts["unreadable"]
    assert count == "2"
    assert [file.split(": ")[0] for file in files] == ["pictures/ant/01.png", "pictures/ant/05.png"]
    check_facts(texts["duplicates"][0], 3)  # one of the four pairs is broken
    check_facts(texts["store"][0], store)


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ("--set data.path=picture", ("data", "'picture'", "'pictures'")),
        ("--set run.batch_size=21", (20, "batch_size", 21, "drop_last")),
        ("--set data.labels=l.csv", ("data", "labels", "'folder'", "'none'", "'l.csv'", "pictures")),
        ("--set data.store=disk --set data.cache_dir=config.toml", ("data", "config.toml")),
        ("--seconds 0 --out config.toml/a.png", ("config.toml/a.png",)),
    ],
)
def test_unusable_data_and_places_are_reported_in_one_message(hookdiff: Any, words: str, facts: Any) -> None:
    check_refused(hookdiff("data", "config.toml", *words.split()), "hookdiff", *facts)


def test_sources_without_files_have_a_report_too(report: Any, write_config: Any) -> None:
    for data, sizes in (
        ({"source": "digits", "image_size": 8}, "8 x 8: 1,797"),
        ({"source": "torchvision:FakeData", "size": 20, "image_size": [3, 10, 12]}, "12 x 10: 20"),  # FakeData's own
    ):
        texts = table(report(write_config(data=data)))
        assert texts["sizes"] == [sizes]
        assert texts["classes"][0].startswith("10: 0 ")


def test_latents_have_no_mode(report: Any, write_config: Any, user_module: Any) -> None:
    user_module("hd_data_user", USER)
    config = write_config(run={"batch_size": 8}, data={"source": "hd_data_user:latents", "flip": True})
    texts = table(report(config, "--out", "a.png"))
    assert "sizes" not in texts
    check_facts(texts["inputs"][0], "5 x 4 x 4", 0)


def test_captions_are_counted_measured_and_drawn(report: Any, tmp_path: Path) -> None:
    path = test_texts.write_config(tmp_path)
    found = json.loads(report(path, "--out", "first.png", "--json"))
    assert not (tmp_path / "cache").exists()  # nothing is encoded
    assert found["captions"] == {
        "text": {
            "count": 44,
            "unique": 7,
            "empty": 0,
            "frequent": [["red", 14], ["green", 13], ["blue", 13], ["red, 0", 1], ["green, 10", 1]],
            "tokens": {"text": {"min": 3, "median": 4, "max": 9, "limit": 8, "cut": 1, "unknown": 0, "same": 0}},
        }
    }
    batch = next(build_feed(load_config(path)).bind(6).batches(0))
    expected = Letters().encode(found["picture"]["captions"])[""].half().float()
    assert torch.equal(expected, batch.conditions["text"])
    with Image.open("first.png") as picture:
        drawn = numpy.array(picture.convert("L"))
    assert drawn.shape == (2 * (160 + 4 + 15) + 4, 3 * (160 + 4) + 4)
    assert (drawn[4 + 160 : 4 + 160 + 15, 4 : 4 + 160] < 128).any()
    texts = table(report(path, "--set", 'data.prefix="a "'))
    assert texts["captions"][:2] == ["text: 44, 7 different, 0 empty", "14 x a red"]
    assert texts["tokens"] == ["text: 5 to 11, median 6; 3 truncated at 8"]
    path.write_text(path.read_text().replace(":Bytes", ":OddTexts"))  # whose network has no `lengths`
    assert "tokens" not in table(report(path))
