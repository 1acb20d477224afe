"""Libraries that open what a config names: they wait for no pipe, read no device, and follow no link in circles."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.conftest import check_refused, mostly_wide, output, pixels, write_small
from tests.hostile.mutations import in_time

pytestmark = [pytest.mark.usefixtures("here"), pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")]

Make = Callable[[Path], object]
SPECIAL: dict[str, Make] = {"a pipe": os.mkfifo, "a link to a device": lambda path: path.symlink_to("/dev/zero")}


def pictures() -> None:
    """Make a folder of pictures, with a class for torchvision."""
    Path("run/p/a").mkdir(parents=True)
    for index in range(16):
        Image.fromarray(pixels(index, 8)).save(f"run/p/a/{index}.png")


def saved(**state: Any) -> None:
    """Make a set as the library saves it, with other values in its state.json."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = {"image": [Image.fromarray(pixels(index, 8)) for index in range(16)]}
    datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image()).save_to_disk("run/s")
    path = Path("run/s/state.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **state}))


VISION = {"source": "torchvision:ImageFolder", "root": "run/p", "image_size": 8}
FLICKR = {"source": "torchvision:Flickr8k", "root": "run/p", "ann_file": "run/list.html"}
SAVED = {"source": "huggingface", "path": "run/s", "image_size": 8}
QUANTIZER = {"use": "diffusers.models.autoencoders.vae:VectorQuantizer", "n_e": 4, "vq_embed_dim": 3, "beta": 0.1}
# What the library opens, the tables of a config that lead it there, how the rest is made, and words of the message.
OPENED: dict[str, tuple[str, dict[str, Any], Callable[[], None], str]] = {
    "a picture": ("run/p/a/0.png", {"data": VISION}, pictures, "run/p/a/0.png"),
    "captions": ("run/list.html", {"data": FLICKR}, pictures, "run/list.html"),
    "rows": ("run/s/data-00000-of-00001.arrow", {"data": SAVED}, saved, "data-00000-of-00001.arrow"),
    "rows elsewhere": ("run/x", {"data": SAVED}, lambda: saved(_data_files=[{"filename": "../x"}]), "run/s/../x"),
    "settings": ("run/p/.huggingface.yaml", {"data": {**SAVED, "path": "run/p"}}, pictures, ".huggingface.yaml"),
    "numbers": ("run/x.npy", {"model": {**QUANTIZER, "remap": "run/x.npy"}}, pictures, "run/x.npy"),
}


@pytest.mark.parametrize("kind", mostly_wide(1, SPECIAL))
@pytest.mark.parametrize("name", mostly_wide(3, OPENED))
def test_what_is_no_file_is_refused(name: str, kind: str, hookdiff: Callable[..., tuple[int, str, str]]) -> None:
    place, tables, make, fact = OPENED[name]
    if package := {"settings": "datasets", "numbers": "diffusers"}.get(name):
        pytest.importorskip(package)
    make()
    Path(place).unlink(missing_ok=True)
    SPECIAL[kind](Path(place))
    config = write_small(Path("run/config.toml"), **tables)
    with in_time():
        check_refused(hookdiff("check" if "model" in tables else "data", config), fact, "pipe")


def test_links_in_circles_are_left_out(hookdiff: Callable[..., tuple[int, str, str]]) -> None:
    pictures()
    for number in range(3):  # each pair leads to twice as many folders, at each of 40 levels
        Path(f"run/p/a/{number}").symlink_to("..")
    with in_time():
        report = json.loads(output(hookdiff("data", write_small(Path("run/config.toml"), data=VISION), "--json")))
    assert report["samples"] == 16
