"""Training on a folder of pictures that is given in the config alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hookdiff import Feed, load_config
from hookdiff.experiment.build import build_feed
from hookdiff.images.transforms import Transforms
from tests.conftest import PICTURES, check_facts, check_one


@pytest.fixture(autouse=True)
def folder(pictures: Path) -> Path:
    return pictures


def test_a_config_trains_on_pictures(succeed: Any, folder: Path) -> None:
    succeed("run", "config.toml")
    written = load_config(folder / "runs" / "config" / "config.toml")
    given = load_config(folder / "config.toml")
    assert (written.data.use, written.data.arguments["path"]) == ("folder", "pictures")
    assert written.data.of(Transforms) == given.data.of(Transforms)
    assert written.data.shared[Feed].items() >= given.data.shared[Feed].items()


@pytest.mark.parametrize("command", ["check", "run"])
def test_classes_that_the_model_does_not_get_are_one_line_of_warning(
    hookdiff: Any, folder: Path, caplog: pytest.LogCaptureFixture, command: str
) -> None:
    def said(*words: object) -> list[str]:
        caplog.clear()
        code, out, err = hookdiff(*words)
        assert code == 0, err
        return [line for line in (*out.splitlines(), *err.splitlines(), *caplog.messages) if "model gets" in line]

    check_one(said(command, "config.toml", "--plugins", "checkpoint"), "2 classes", "diffusion.conditional")
    for setting in ("diffusion.conditional=true", "diffusion.conditional=false", "model.num_classes=0"):
        out = ["--out", f"runs/{setting}"] if command == "run" else []
        assert not said(command, "config.toml", "--set", setting, *out)
    if command == "run":
        assert not said("resume", "runs/config", "--steps", 3)  # decided when the run began


@pytest.mark.wide
def test_the_recipe_of_the_docs_trains_on_the_classes_of_a_folder(hookdiff: Any, folder: Path) -> None:
    page = Path(__file__).parents[2].joinpath("docs", "how-to", "train-on-a-folder.md").read_text("utf-8")
    recipe = page.partition("```toml\n")[2].partition("```")[0]
    (folder / "mine.toml").write_text(recipe)
    quick = ["run.epochs=1", "run.batch_size=16", "data.upscale=true", "model.channels=8", "model.head_dim=8"]
    quick += ["sampling.steps=2"]
    words = [word for setting in quick for word in ("--set", setting)]
    code, _, err = hookdiff("run", "mine.toml", *words)
    assert (code, "classes" in err) == (0, False), err
    written = load_config(folder / "runs" / "mine" / "config.toml")
    assert written.model.arguments["num_classes"] == 2
    assert hookdiff("sample", "runs/mine", "--labels", "0,1", "--num", 2)[0] == 0


def test_training_on_classes_needs_classes(hookdiff: Any, folder: Path) -> None:
    settings = ["--set", "diffusion.conditional=true", "--set", "data.labels=none"]
    code, _, err = hookdiff("run", "config.toml", *settings)
    assert code == 2
    check_facts(err, "diffusion.conditional", "folder", "no labels")


def test_a_key_that_the_source_takes_is_passed_to_the_source(folder: Path, user_module: Any) -> None:
    user_module(
        "hd_flags",
        "import torch\nfrom hookdiff import InMemory\n\n\ndef flags(flip: int, image_size: int = 4) -> InMemory:\n"
        "    return InMemory(torch.full((9, 1, image_size, image_size), flip, dtype=torch.uint8))\n",
    )
    text = PICTURES.replace('"folder"', '"hd_flags:flags"').replace('path = "pictures"', "").replace("true", "7")
    (folder / "flags.toml").write_text(text)
    config = load_config(folder / "flags.toml")
    assert config.data.arguments == {"flip": 7, "image_size": 8}
    assert config.data.of(Transforms).image_size is None
    resolved = config.resolved()["data"]
    assert (resolved["flip"], resolved["image_size"]) == (7, 8)
    feed = build_feed(config).bind(5, 0, torch.device("cpu"))
    inputs = next(feed.batches(0)).inputs
    assert inputs.shape == (5, 1, 8, 8)
    assert inputs.unique().item() == pytest.approx(7 / 127.5 - 1)


def test_a_feed_without_decoding_knows_shape_and_classes(folder: Path) -> None:
    config = load_config(folder / "config.toml")
    feed = build_feed(config, decode=False)
    assert (feed.reader.prepared.place, feed.shape, feed.num_classes) == ("none", (3, 8, 8), 2)
    assert build_feed(config).reader.prepared.place == "memory"
