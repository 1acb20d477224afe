"""`hookdiff init --from` writes a config that fine-tunes the network of a pipeline, and that runs as it is."""

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli
from safetensors.torch import load_file

from hookdiff_init.fine_tuning import fine_tuning
from hookdiff_init.look import Pictures
from hookdiff_init.pipeline import Pipeline, pipeline_at
from tests.conftest import Command, Succeed, check_facts, check_refused, slow
from tests.whole_pipelines import SANA, SD, SD3, save_pictures, save_whole

diffusers = pytest.importorskip("diffusers", reason="needs hookdiff[lora]")
pytest.importorskip("peft", reason="needs hookdiff[lora]")
pytest.importorskip("transformers", reason="needs hookdiff[text]")
pytestmark = pytest.mark.filterwarnings("ignore")  # of diffusers and peft, about their own code

SMALL: dict[str, Any] = {  # of a network without texts
    "block_out_channels": (32, 64),
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": 1,
    "norm_num_groups": 8,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a pipeline of Stable Diffusion, a pipeline without texts, and the network of the latter."""
    folder = tmp_path_factory.mktemp("saved")
    save_whole(SD, folder / "tinysd")
    network = diffusers.UNet2DModel(sample_size=12, **SMALL)
    network.save_pretrained(folder / "network")
    diffusers.DDPMPipeline(network, diffusers.DDIMScheduler()).save_pretrained(folder / "ddpm")
    return folder


@pytest.fixture
def here(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the pipelines and eight pictures, as the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for path in saved.iterdir():
        Path(path.name).symlink_to(path)
    save_pictures(Path("red_hearts"), side=20)
    return tmp_path


def caption(num: int) -> None:
    for k in range(num):
        Path(f"red_hearts/{k}.txt").write_text(f"a heart\n{k} hearts")


CAPTION = "red hearts"
PROMPTS = ["a heart", "1 hearts", "3 hearts", "5 hearts"]
RUNS: list[tuple[str, bool, int, dict[str, Any], list[str]]] = [
    # the folder of the network, --whole, pictures with a caption, keys of [data], prompts
    ("tinysd", False, 0, {"image_size": 16, "caption": CAPTION}, [CAPTION]),
    ("tinysd", False, 8, {"image_size": 16, "captions": "txt"}, PROMPTS),
    ("tinysd", True, 6, {"image_size": 16, "captions": "txt", "caption": CAPTION}, ["a heart", "0 hearts"]),
    ("ddpm", False, 8, {"image_size": 12}, []),
    ("network", True, 0, {"image_size": 12}, []),
]


@pytest.mark.parametrize(("source", "whole", "captioned", "data", "prompts"), RUNS)
def test_the_config_runs_as_it_is_and_is_exported(
    here: Path, succeed: Succeed, source: str, whole: bool, captioned: int, data: Any, prompts: list[str]
) -> None:
    caption(captioned)
    out = succeed("init", "red_hearts", "--from", source, "-o", "c.toml", *["--whole"] * whole)
    check_facts(out, "c.toml", "hookdiff run c.toml", *prompts[:1])
    [export] = [shlex.split(line)[1:] for line in out.splitlines() if line.startswith("  hookdiff export")]
    assert ("`caption`" in out) == ("caption" in data and not captioned)
    table = tomli.loads(Path("c.toml").read_text("utf-8"))
    assert table["data"] == {"source": "folder", "path": "red_hearts", "flip": False, **data}
    assert table["model"] == {"use": "pretrained", "path": source}
    assert table["optimizer"] == {"use": "adamw", "lr": 1e-5 if whole else 1e-4}
    assert table["diffusion"] == {"weighting": "uniform"}
    assert ("lora" in table["run"].get("plugins", ()), "lora" in table["plugins"]) == (not whole, not whole)
    assert (table["run"]["steps"], table["run"]["batch_size"]) == (400, 4)
    assert table["plugins"]["samples"].get("prompts", [])[: len(prompts)] == prompts
    assert ("sampling" in table) == bool(prompts)
    succeed("run", "c.toml", "--steps", "2", "--set", "sampling.steps=2")
    succeed(*export)
    if whole and prompts:
        assert diffusers.DiffusionPipeline.from_pretrained("c-whole").unet.config.sample_size == 8
    else:
        [file] = [Path("c.safetensors")] if whole else Path("c-lora").iterdir()
        assert {"lora" in name for name in load_file(file)} == {not whole}


def test_check_marks_what_the_pipeline_gives(here: Path, succeed: Succeed) -> None:
    succeed("init", "red_hearts", "--from", "tinysd")
    check_facts(Path("red_hearts.toml").read_text(), "hookdiff check red_hearts.toml", "of the model", "balanced")
    assert 'use = "scaled_linear"  # of the model' in succeed("check", "red_hearts.toml")
    succeed("init", "red_hearts", "--from", "network", "--overwrite")
    check_facts(Path("red_hearts.toml").read_text(), "process and prediction")


@pytest.mark.parametrize(("kind", "divisor", "longest"), [(SD, 4, None), *slow((SD3, 4, 4 * 96), (SANA, 2, None))])
def test_the_size_is_that_of_the_pipeline(kind: str, divisor: int, longest: int | None, tmp_path: Path) -> None:
    save_whole(kind, tmp_path / "base")
    pipeline = pipeline_at(str(tmp_path / "base"))
    assert (pipeline.side, pipeline.divisor, pipeline.channels) == (16, divisor, 3)
    assert (pipeline.only_squares, pipeline.longest) == (False, longest)
    assert (pipeline.takes_texts, pipeline.has_process, pipeline.takes_classes) == (True, True, False)


@pytest.mark.parametrize(
    ("known", "divisor", "given", "side"),
    [(512, 64, None, 512), (512, 64, 384, 384), (None, 8, None, 128), (None, 64, None, 64), (None, 256, None, 256)],
)
def test_an_unknown_size_is_that_of_the_pictures(known: Any, divisor: int, given: Any, side: int) -> None:
    pipeline = Pipeline("base", known, divisor, 3, takes_texts=False, takes_classes=False, has_process=True)
    pictures = Pictures("mine", 40, 3, 100 if divisor == 64 else 200, {(200, 200): 40})
    plan = fine_tuning(pipeline, pictures, given, whole=False)
    assert (plan.side, plan.steps, plan.batch_size) == (side, 1000, 4)


@pytest.mark.parametrize(
    ("options", "data"),
    [({"in_channels": 1, "out_channels": 1}, {"channels": 1, "labels": "none"}), ({"num_class_embeds": 3}, {})],
)
def test_colours_and_classes_are_those_of_the_network(here: Path, succeed: Succeed, options: Any, data: Any) -> None:
    Path("mine").mkdir()
    for name in "ab":
        save_pictures(Path("mine") / name, side=10)
    diffusers.UNet2DModel(sample_size=(12, 12), **SMALL, **options).save_pretrained("other")
    succeed("init", "mine", "--from", "other", "--image-size", "14")
    sizes = {"image_size": 14, "upscale": True, "flip": False}
    assert tomli.loads(Path("mine.toml").read_text())["data"] == {"source": "folder", "path": "mine", **sizes, **data}
    succeed("run", "mine.toml", "--steps", "2", "--set", "sampling.steps=2")


@pytest.mark.parametrize(("source", "step"), [("tinysd", 4), ("network", 2), ("squares", None)])
def test_oblong_pictures_keep_their_shape_if_the_network_takes_it(
    here: Path, succeed: Succeed, source: str, step: int | None
) -> None:
    for name in "ab":
        save_pictures(Path("mine") / name, side=30, height=18)
    one = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "norm_num_groups": 1}
    sizes = {"sample_size": 12, "in_channels": 3, "out_channels": 3, "num_embeds_ada_norm": 4}
    diffusers.DiTTransformer2DModel(**one, **sizes).save_pretrained("squares")
    succeed("init", "mine", "--from", source, "--whole")
    data = tomli.loads(Path("mine.toml").read_text("utf-8"))["data"]
    assert (data.get("buckets", False), data.get("bucket_step")) == (step is not None, step)
    succeed("run", "mine.toml", "--steps", "2", "--set", "sampling.steps=2", "--plugins", "no:samples")


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (("--from", "tiny"), ("--from", "tiny", "did you mean", "tinysd")),
        (("--from", "red_hearts"), ("--from", "red_hearts", "config.json")),
        (("--from", "tinysd/unet"), ("--from", 4, "pipeline")),
        (("--from", "tinysd/vae"), ("--from", "autoencoder", "pipeline")),
        (("--from", "tinysd", "--image-size", "18"), ("--image-size 18", "16 or 20")),
        (("--from", "tinysd", "--minutes", "3"), ("--minutes", "--from")),
        (("--from", "tinysd", "--model", "unet"), ("--model", "--from")),
        (("--from", "tinysd", "--text-encoder", "tinysd"), ("--text-encoder", "--from")),
        (("--whole",), ("--whole", "--from")),
    ],
)
def test_bad_input_is_one_message(here: Path, hookdiff: Command, words: Any, facts: Any) -> None:
    check_refused(hookdiff("init", "red_hearts", *words), *facts)
    assert not Path("red_hearts.toml").exists()


def test_without_pictures_or_peft_is_one_message(
    here: Path, hookdiff: Command, succeed: Succeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_refused(hookdiff("init", "--from", "tinysd"), "--from", "FOLDER")
    monkeypatch.setitem(sys.modules, "peft", None)
    check_refused(hookdiff("init", "red_hearts", "--from", "tinysd"), "pip install 'hookdiff[lora]'", "--whole")
    succeed("init", "red_hearts", "--from", "tinysd", "--whole")
