"""Without trust, the config of a run makes no connection, whatever source, model, encoder, features or tracker it has.

One process makes and trains all cases, because to import the libraries takes most of the time.
"""

import json
import os
import subprocess
import sys
import tarfile
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
import pytest
from attrs import define
from PIL import Image

from tests.conftest import check_facts, write_small

pytestmark = pytest.mark.wide
RUN = Path("run")  # of the case
SIDE = 8


@define
class Case:
    """What the config of a stranger's run says, and what becomes of it."""

    tables: dict[str, Any]
    facts: tuple[str, ...] = ()  # of the refusal; none: it trains
    prepare: Callable[[], None] | None = None  # makes the files
    needs: tuple[str, ...] = ()  # packages


def pictures(caption: str = "") -> None:
    """Make a folder of small pictures, each with the caption."""
    (RUN / "pictures").mkdir(parents=True)
    for index in range(16):
        pixels = numpy.random.default_rng(index).integers(0, 255, (SIDE, SIDE, 3), dtype=numpy.uint8)
        Image.fromarray(pixels).save(RUN / "pictures" / f"{index}.png")
        if caption:
            (RUN / "pictures" / f"{index}.txt").write_text(caption)


def rows() -> Any:
    """Make a set of pictures, as the hub has them."""
    import datasets

    pictures()
    pixels = [{"bytes": path.read_bytes(), "path": None} for path in sorted((RUN / "pictures").glob("*.png"))]
    return datasets.Dataset.from_dict({"image": pixels}).cast_column("image", datasets.Image())


def readme() -> None:
    """Make a set, of which the README names a file elsewhere."""
    RUN.mkdir()
    files = "data_files: https://example.invalid/train.parquet"
    (RUN / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  {files}\n---\n")


def shard() -> None:
    """Make a shard of pictures."""
    pictures()
    with tarfile.open(RUN / "0.tar", "w") as opened:
        for path in sorted((RUN / "pictures").iterdir()):
            opened.add(path, path.name)


def text() -> None:
    """Make a text encoder, with a tokenizer that names a set on the hub as its own."""
    from tests.plugins.test_text import save_encoder

    pictures("a red disc")
    folder = save_encoder("CLIPTextModel", RUN)
    for name in ("config.json", "tokenizer_config.json"):
        found = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**found, "_name_or_path": "a/b", "name_or_path": "a/b"}))


def pipeline() -> None:
    """Make the text side of a pipeline."""
    from tests.plugins.test_text_pipeline import save_pipeline

    pictures("a red disc")
    save_pipeline("StableDiffusionPipeline", RUN / "pipe")


def autoencoder() -> None:
    """Make an autoencoder."""
    from tests.plugins.test_autoencoder import save_autoencoder

    pictures()
    save_autoencoder(RUN / "vae")


def of_hub(path: str, **options: Any) -> dict[str, Any]:
    """Return a config with pictures of Hugging Face."""
    return {"data": {"source": "huggingface", "path": path, "image_size": SIDE, **options}}


def of_shards(path: Any, **options: Any) -> dict[str, Any]:
    """Return a config with shards."""
    return {"data": {"source": "shards", "path": path, "index_dir": "run/index", "image_size": SIDE, **options}}


def encoded(kind: str, use: str, path: str) -> dict[str, Any]:
    """Return a config with pictures in a folder, and an encoder of them or of texts."""
    data = {"source": "folder", "path": "run/pictures", "encode": {kind: {"use": use, "path": path}}}
    network = {"use": "dit", "depth": 1, "hidden_size": 32, "num_heads": 2, "patch_size": 1}
    if kind == "text":
        data["captions"] = "txt"
        return {"data": data, "model": {**network, "text_dim": 64}, "diffusion": {"conditions": ["text"]}}
    return {"data": data, "model": network}


def net(use: str, **options: Any) -> dict[str, Any]:
    """Return a config with a network."""
    return {"model": {"use": use, **options}}


def measured(features: Any) -> dict[str, Any]:
    """Return a config that measures a distance."""
    return {"run": {"plugins": ["fid"]}, "plugins": {"fid": {"num_samples": 16, "features": features}}}


def tracked(name: str, **options: Any) -> dict[str, Any]:
    """Return a config with a tracker."""
    return {"run": {"plugins": [name]}, "plugins": {name: options}}


TRUST, SEGMENTATION = "--trust", "torchvision.models.segmentation"
IS_NO_NETWORK = ("model", "forward")  # it is made, and is none for diffusion
CASES = {
    "parquet": Case(of_hub("run/train.parquet"), (), lambda: rows().to_parquet("run/train.parquet"), ("datasets",)),
    "saved": Case(of_hub("run/saved"), (), lambda: rows().save_to_disk("run/saved"), ("datasets",)),
    "folder": Case(of_hub("run/pictures"), (), pictures, ("datasets",)),
    "readme": Case(of_hub("run"), ("data", "example.invalid", TRUST), readme, ("datasets",)),
    "hub's url": Case(of_hub("hf://datasets/a/b"), ("data.path", TRUST), None, ("datasets",)),
    "shards": Case(of_shards("run/0.tar"), (), shard),
    "classes": Case(of_shards("run/0.tar", classes="s3://a/b.txt"), ("data.classes", "s3://a/b.txt", TRUST), shard),
    "download": Case(
        {"data": {"source": "torchvision:CIFAR10", "root": "run/x", "download": True}}, ("data", "--trust")
    ),
    "fashion": Case({"data": {"source": "fashion-mnist", "root": "run/x", "download": True}}, ("data", TRUST)),
    "backbone": Case(net(f"{SEGMENTATION}:lraspp_mobilenet_v3_large", num_classes=1), IS_NO_NETWORK),
    "detector": Case(
        net("torchvision.models.detection:ssdlite320_mobilenet_v3_large", num_classes=2), ("model", "images")
    ),
    "by name": Case(
        net("torchvision.models:get_model", name="lraspp_mobilenet_v3_large"), ("model", "download.pytorch.org", TRUST)
    ),
    "pretrained": Case(
        net("diffusers:UNet2DModel.from_pretrained", pretrained_model_name_or_path="a/b"),
        ("model.use",),
        None,
        ("diffusers",),
    ),
    "diffusers": Case(
        net("diffusers:UNet2DModel", block_out_channels=[8, 8, 8, 8], norm_num_groups=4), (), None, ("diffusers",)
    ),
    "text": Case(encoded("text", "text", "run/CLIPTextModel"), (), text, ("transformers",)),
    "text on the hub": Case(
        encoded("text", "text", "openai/clip-vit-large-patch14"),
        ("data.encode", "openai/clip-vit-large-patch14"),
        lambda: pictures("a red disc"),
        ("transformers",),
    ),
    "pipeline": Case(encoded("text", "pipeline", "run/pipe"), (), pipeline, ("transformers", "diffusers")),
    "autoencoder": Case(encoded("image", "autoencoder", "run/vae"), (), autoencoder, ("diffusers",)),
    "autoencoder on the hub": Case(
        encoded("image", "autoencoder", "stabilityai/sd-vae-ft-mse"),
        ("data.encode", "stabilityai/sd-vae-ft-mse"),
        pictures,
        ("diffusers",),
    ),
    "digits": Case(measured("digits")),
    "inception": Case(measured("inception"), ("plugins.fid", "github.com", TRUST)),
    "torchvision's": Case(measured("inception-torchvision"), ("plugins.fid", "download.pytorch.org", TRUST)),
    "dinov2": Case(measured("dinov2"), ("plugins.fid", "dl.fbaipublicfiles.com", TRUST), None, ("timm",)),
    "weights": Case(
        measured({"use": "inception", "weights": "https://example.invalid/x.pth"}),
        ("plugins.fid.features", "example.invalid", TRUST),
    ),
    "tensorboard": Case(tracked("tensorboard"), (), None, ("tensorboard",)),
    "aim": Case(tracked("aim"), (), None, ("aim",)),
    "wandb": Case(tracked("wandb"), (), None, ("wandb",)),
    "wandb's server": Case(tracked("wandb", mode="online"), ("plugins.wandb.mode", TRUST), None, ("wandb",)),
}


def train(names: list[str]) -> None:
    """Train each case in a folder of its own, and print its name, why it was refused, and the connections it began."""
    from hookdiff import build_loop, load_config
    from hookdiff.errors import UserError
    from hookdiff.machine import no_connections

    with no_connections("the hook of hookdiff comes first, and what it refuses is not noted"):
        pass
    begun: list[str] = []

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("socket.connect", "socket.getaddrinfo") and not isinstance(arguments[-1], (str, bytes)):
            begun.append(f"{event}{arguments}")

    sys.addaudithook(note)
    home = Path.cwd()
    for name in names:
        case, refusal = CASES[name], None
        (home / name).mkdir()
        os.chdir(home / name)
        if case.prepare:
            case.prepare()
        RUN.mkdir(exist_ok=True)
        tables = {"data": {"source": "digits"}, **case.tables}
        tables["run"] = {"steps": 1, **tables.get("run", {})}
        write_small(RUN / "config.toml", **tables)
        begun.clear()
        try:
            build_loop(load_config(RUN / "config.toml"), RUN, overwrite=True).run()
        except UserError as error:
            refusal = str(error)
        except Exception:
            refusal = traceback.format_exc()
        print("\n" + json.dumps({"name": name, "refusal": refusal, "begun": begun}), flush=True)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Train all cases of which the packages are there, and return what became of them, by name."""
    home = tmp_path_factory.mktemp("home")
    names = [name for name, case in CASES.items() if all(map(find_spec, case.needs))]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    variables |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONSAFEPATH": "1"}
    variables |= {"HOME": str(home), "TORCH_HOME": str(home / "torch"), "HF_HOME": str(home / "hf")}
    command = [sys.executable, "-c", f"from tests.hostile.test_trust_network import train\ntrain({names!r})"]
    done = subprocess.run(command, cwd=home, env=variables, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    return {each["name"]: each for each in found}


@pytest.mark.parametrize("name", CASES)
def test_a_run_of_a_stranger_makes_no_connection(ended: dict[str, dict[str, Any]], name: str) -> None:
    case = CASES[name]
    for package in case.needs:
        pytest.importorskip(package)
    assert ended[name]["begun"] == []
    if case.facts:
        check_facts(ended[name]["refusal"], *case.facts)
    else:
        assert ended[name]["refusal"] is None
