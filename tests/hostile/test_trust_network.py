"""Without trust, the config of a run makes no connection but those to a server that it names as its data."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image

from tests.conftest import check_facts, write_small

# Notes each connection that is begun, however the library goes on.
CHILD = """
import sys
from hookdiff.machine import no_connections
with no_connections("the hook of hookdiff comes first, and what it refuses is not noted"):
    pass
noted = []
def note(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo") and not isinstance(arguments[-1], (str, bytes)):
        noted.append((event, repr(arguments)))
sys.addaudithook(note)
from pathlib import Path
from hookdiff import build_loop, load_config
from hookdiff.errors import UserError
try:
    loop = build_loop(load_config("run/config.toml"), Path("run"), overwrite=True)
    loop.run()
except UserError as error:
    print("refused:", error)
print("connections:", noted)
"""


def pictures(folder: Path) -> None:
    """Make a folder of small pictures."""
    folder.mkdir(parents=True)
    for index in range(16):
        pixels = numpy.random.default_rng(index).integers(0, 255, (8, 8, 3), dtype=numpy.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")


def parquet(folder: Path) -> None:
    """Make a file of pictures, as the hub has them."""
    datasets = pytest.importorskip("datasets")
    pictures(folder / "pictures")
    rows = [{"bytes": path.read_bytes(), "path": None} for path in sorted((folder / "pictures").iterdir())]
    made = datasets.Dataset.from_dict({"image": rows}).cast_column("image", datasets.Image())
    made.to_parquet(str(folder / "train.parquet"))


# What the config says, what has to be there, and what refuses it, if it needs a connection.
NET: dict[str, Any] = {"run": {"steps": 1}, "data": {"source": "digits"}}
CASES: dict[str, tuple[dict[str, Any], Callable[[Path], None] | None, tuple[str, ...]]] = {
    "parquet": ({"data": {"source": "huggingface", "path": "run/train.parquet", "image_size": 8}}, parquet, ()),
    "folder": ({"data": {"source": "huggingface", "path": "run/pictures", "image_size": 8}}, pictures, ()),
    "backbone": (
        {"model": {"use": "torchvision.models.segmentation:fcn_resnet50", "num_classes": 1}},
        None,
        ("model", "forward"),  # it is made, and is no network for diffusion
    ),
    "by name": (
        {"model": {"use": "torchvision.models:get_model", "name": "fcn_resnet50"}},
        None,
        ("model", "download.pytorch.org", "--trust"),
    ),
    "download": (
        {"data": {"source": "torchvision:CIFAR10", "root": "run/x", "download": True}},
        None,
        ("data", "--trust"),
    ),
    "inception": (
        {"run": {"steps": 1, "plugins": ["fid"]}, "plugins": {"fid": {"num_samples": 16, "features": "inception"}}},
        None,
        ("plugins.fid", "github.com", "--trust"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_of_a_stranger_makes_no_connection(tmp_path: Path, name: str) -> None:
    tables, prepare, facts = CASES[name]
    run = tmp_path / "run"
    if prepare is parquet:
        parquet(run)
    elif prepare:
        prepare(run / "pictures")
    run.mkdir(exist_ok=True)
    tables = {**NET, **tables}
    model = tables.pop("model", None)
    write_small(run / "config.toml", **tables, **({"model": model} if model else {}))
    paths = os.pathsep.join(path for path in sys.path if path)
    variables = {**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1", "HOME": str(tmp_path)}
    variables |= {"TORCH_HOME": str(tmp_path / "torch"), "HF_HOME": str(tmp_path / "hf")}
    command = [sys.executable, "-c", CHILD]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    if facts:
        check_facts(done.stdout, "refused", *facts)
    else:
        assert "refused" not in done.stdout, done.stdout
    assert done.stdout.splitlines()[-1] == "connections: []", done.stdout
