"""`hookdiff data --to-shards`."""

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from hookdiff import load_config
from hookdiff.experiment.build import build_feed
from hookdiff.images import Store, feed_of
from hookdiff_shards import Items, shards
from tests.conftest import PICTURES, as_list, check_facts, check_refused, output, pixels


@pytest.fixture(autouse=True)
def folder(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(pictures / "cache"))
    return pictures


def test_golden_shards_of_a_folder(hookdiff: Any, folder: Path) -> None:
    code, out, err = hookdiff("data", "config.toml", "--to-shards", "out", "--shard-size", "0.02")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "24 samples, 3 shards, 60 KiB; to train on them:",
        "",
        "[data]",
        'source = "shards"',
        'path = "out"',
        "image_size = 8",
        "flip = true",
        "held_out = 4",
        "",
    ]
    assert sorted(path.name for path in Path("out").iterdir()) == [
        "classes.json",
        *(f"shard-{number:06}.tar" for number in range(3)),
    ]
    assert json.loads(Path("out/classes.json").read_text()) == ["ant", "bee"]
    with tarfile.open("out/shard-000000.tar") as tar:
        assert [(one.name, one.mtime) for one in tar][:3] == [
            ("000000000.png", 0),
            ("000000000.cls", 0),
            ("000000001.png", 0),
        ]
        member = tar.extractfile("000000001.png")
        assert member is not None
        assert member.read() == Path("pictures/ant/01.png").read_bytes()
    assert all(path.stat().st_size <= 0.02 * 2**20 for path in Path("out").glob("*.tar"))


def test_shards_of_shards_are_the_same(succeed: Any, folder: Path) -> None:
    succeed("data", "config.toml", "--to-shards", "a")
    text = PICTURES.replace('"folder"', '"shards"').replace('"pictures"', '"a"')
    (folder / "shards.toml").write_text(text)
    succeed("data", "shards.toml", "--to-shards", "b")
    Path("b/shard-000001.tar").write_bytes(b"of an earlier call")
    succeed("data", "shards.toml", "--to-shards", "b", "--overwrite")
    assert sorted(path.name for path in Path("b").iterdir()) == ["classes.json", "shard-000000.tar"]
    for name in ("shard-000000.tar", "classes.json"):
        assert Path("a", name).read_bytes() == Path("b", name).read_bytes()


@pytest.mark.parametrize("where", ["out", "out/inner", "config.toml"])
def test_nothing_is_overwritten(hookdiff: Any, folder: Path, where: str) -> None:
    (folder / "out" / "inner").mkdir(parents=True)
    (folder / "out" / "inner" / "mine").write_text("precious")
    check_refused(hookdiff("data", "config.toml", "--to-shards", where, "--overwrite"), where, "exists", "--overwrite")
    assert (folder / "out" / "inner" / "mine").read_text() == "precious"


def test_an_empty_folder_is_filled(succeed: Any, folder: Path) -> None:
    (folder / "out").mkdir()
    found = json.loads(succeed("data", "config.toml", "--to-shards", "out", "--json"))
    assert (found["samples"], found["shards"]) == (24, 1)
    assert found["bytes"] == Path("out/shard-000000.tar").stat().st_size
    assert found["data"] == {"source": "shards", "path": "out", "image_size": 8, "flip": True, "held_out": 4}


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["--to-shards", "config.toml/out"], ["config.toml"]),
        (["--to-shards", "out", "--out", "a.png"], ["--to-shards", "--out"]),
        (["--to-shards", "out", "--shard-size", "0"], ["--shard-size", 0]),
        (["--to-shards", "out", "--set", "data.path=picture"], ["'pictures'"]),
    ],
)
def test_wrong_options_are_one_message(hookdiff: Any, words: list[str], facts: list[Any]) -> None:
    check_refused(hookdiff("data", "config.toml", *words), *facts)
    assert not Path("out").exists()


def test_unreadable_pictures_are_refused_or_left_out(hookdiff: Any, folder: Path) -> None:
    (folder / "pictures" / "ant" / "01.png").write_bytes(b"nothing")
    check_refused(hookdiff("data", "config.toml", "--to-shards", "out"), "pictures/ant/01.png")
    assert not list(folder.glob("*out*"))
    output(hookdiff("data", "config.toml", "--to-shards", "out", "--set", "data.unreadable=skip"))
    assert len(shards("out")) == 23


@pytest.mark.parametrize("source", ["torchvision:FakeData", "digits"])
def test_data_without_files_become_png(succeed: Any, write_config: Any, source: str) -> None:
    config = write_config(data={"source": source, **({"size": 20} if "Fake" in source else {})})
    succeed("data", config, "--to-shards", "out")
    known, ours = build_feed(load_config(config)), feed_of(shards("out"), store=Store(store="none"))
    for one, other in zip(known.unaugmented(known.usable), ours.unaugmented(ours.usable), strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert one.labels is not None
        assert other.labels is not None
        assert torch.equal(one.labels, other.labels)


USER = r"""
import numpy, random, torch
from PIL import Image
from hookdiff import InMemory
from tests.conftest import pixels

class Pairs:
    def __len__(self):
        return 6

    def __getitem__(self, index):
        image = Image.fromarray(pixels(index))
        return {
            "image": image,
            "label": index % 2,
            "Mask": image.convert("L"),
            "embedding": torch.full((2, 3), index, dtype=torch.float16),
            "age": index / 2,
            "tokens": [index, random.randint(0, 99)],
        }

class Turned:
    def __len__(self):
        return 3

    def __getitem__(self, index):
        image = Image.fromarray(numpy.random.default_rng(index).integers(0, 256, (6, 9, 4), dtype=numpy.uint8))
        image.getexif()[0x0112] = 6
        return image

def latents() -> InMemory:
    torch.manual_seed(0)
    return InMemory(torch.randn(6, 4, 5, 5), conditions={"mask": torch.rand(6, 5, 5) > 0.5})

def labelled() -> InMemory:
    labels = torch.tensor([1, -1, 0])
    return InMemory(torch.arange(48).reshape(3, 1, 4, 4).byte(), labels, ["a b", r"c\nd"])

def layers() -> InMemory:
    return InMemory(torch.zeros(6, 4, 5, 5, dtype=torch.uint8))

class Mixed:
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.zeros(3, 4, 4) if index == 4 else torch.zeros(3, 4, 4).byte()

class Rough(Mixed):
    def __getitem__(self, index):
        return {"image": torch.zeros(3, 4, 4), "x": torch.zeros(2, dtype=torch.bfloat16)}

class Named(Mixed):
    def __getitem__(self, index):
        return {"image": torch.zeros(3, 4, 4), "a/b": 1}

class Twice(Mixed):
    def __getitem__(self, index):
        return {"image": torch.zeros(3, 4, 4), "a": 1, "A": 2}
"""


@pytest.fixture
def write_user(user_module: Any, write_config: Any) -> Callable[[str], Path]:
    """Return a function that writes a config with a source of `USER`."""
    user_module("hd_shards_user", USER)
    return lambda name: write_config(run={"batch_size": 2}, data={"source": f"hd_shards_user:{name}"})


@pytest.mark.parametrize(
    ("name", "shape", "labels", "classes"),
    [
        ("Pairs", (6, 3, 10, 10), [0, 1, 0, 1, 0, 1], None),
        ("latents", (6, 4, 5, 5), None, None),
        ("Turned", (3, 3, 9, 6), None, None),  # with transparency
        ("labelled", (3, 1, 4, 4), [1, -1, 0], ("a b", "c\\nd")),
    ],
)
def test_all_of_a_sample_comes_back_as_it_is(
    succeed: Any, write_user: Any, name: str, shape: tuple[int, ...], labels: Any, classes: Any
) -> None:
    config = write_user(name)
    data = json.loads(succeed("data", config, "--to-shards", "out", "--json"))["data"]
    assert data.pop("source") == "shards"
    known, source = build_feed(load_config(config)), shards(**data)
    assert isinstance(source, Items) == (name in ("Pairs", "latents"))
    (one,), (other,) = ([*feed.unaugmented(feed.usable)] for feed in (known, feed_of(source)))
    assert torch.equal(one.inputs, other.inputs)
    assert one.inputs.shape == shape
    assert as_list(one.labels) == as_list(other.labels) == labels
    assert source.classes == classes
    assert one.conditions.keys() == other.conditions.keys()
    assert bool(one.conditions) == isinstance(source, Items)
    for key, column in one.conditions.items():
        assert column.dtype == other.conditions[key].dtype
        assert torch.equal(column, other.conditions[key])


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("layers", [4, "transparent"]),
        ("Mixed", ["sample 0", "sample 4", "npy", "a picture"]),
        ("Rough", ["sample 0", "'x'", "BFloat16"]),
        ("Named", ["'a/b'"]),
        ("Twice", ["a, A"]),
    ],
)
def test_data_that_no_shard_holds_are_refused(hookdiff: Any, write_user: Any, name: str, facts: list[Any]) -> None:
    check_refused(hookdiff("data", write_user(name), "--to-shards", "out"), *facts)
    assert not list(Path().glob("*out*"))


def test_a_full_disk_leaves_nothing(hookdiff: Any, folder: Path, disk: Path) -> None:
    for k in range(40):
        Image.fromarray(pixels(k, 200)).save(folder / "pictures" / "ant" / f"x{k:02}.png")
    code, _, err = hookdiff("data", "config.toml", "--to-shards", disk / "out", "--shard-size", "1")
    assert code == 1
    check_facts(err, disk / "out")
    assert not list(disk.iterdir())
