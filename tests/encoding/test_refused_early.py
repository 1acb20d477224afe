"""Test that what does not fit is refused before anything but one sample is encoded, by `check` too."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hookdiff import ConfigError, InMemory, UserError, hookimpl, load_config
from hookdiff.experiment.build import build_feed, build_loop
from tests.conftest import check_refused, output, refused, write_small
from tests.data.test_rest import NUM, Letters, pictures, samples

DIT = {"use": "dit", "patch_size": 2, "hidden_size": 16, "depth": 1, "num_heads": 2}
Source = Callable[[], InMemory]


def captioned() -> InMemory:
    """Samples with captions and labels of two classes."""
    return InMemory(samples().images, torch.arange(NUM) % 2, texts=samples().texts)


def lacking() -> InMemory:
    data = samples()
    assert data.texts is not None
    return InMemory(data.images, texts={"text": [*data.texts["text"][:-1], []]})


class Reads(torch.nn.Module):
    """A network that takes `width` features of tokens of a text."""

    def __init__(self, width: int = 2, in_channels: int = 3) -> None:
        super().__init__()
        self.of_text = torch.nn.Linear(width, in_channels)

    def forward(self, x: Any, timesteps: Any, text: Any) -> Any:
        return x + self.of_text(text)[:, :, None, None]


READS, TEXT = {"model.use": f"{__name__}:Reads"}, {"conditions": ["text"]}
BAD: list[tuple[Source, dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    (captioned, {}, {}, ("data.encode.text", "conditions")),  # no network reads it
    (lacking, TEXT, READS, ("1 of 200", "sample 199", "missing")),
    (captioned, TEXT, {**READS, "model.width": 3}, ("model", "3")),
    (captioned, TEXT, {**READS, "model.in_channels": 4}, ("model", "4")),
    (captioned, {"conditions": ["txt"]}, READS, ("conditions", "txt")),
    (samples, {**TEXT, "conditional": True}, READS, ("labels",)),
    (captioned, TEXT, {**READS, "model.start_from": "MISSING"}, ("start_from", "MISSING")),
    (captioned, TEXT, {**READS, "model.start_from": "other.safetensors"}, ("of_text.weight", "(3, 2)")),
    (captioned, {**TEXT, "conditional": True}, READS, ("labels",)),
    (captioned, TEXT, {**READS, "run.batch_size": 201}, ("200 samples", "batch_size is 201")),
    (captioned, TEXT, {**READS, "data.held_out": 0.995}, ("1 samples", "batch_size is 2")),
    (captioned, TEXT, {**READS, "plugins.samples.classes": [7]}, ("plugins.samples.classes",)),
    (captioned, TEXT, {**READS, "plugins.samples.weights": ["other"]}, ("'other'", "model")),
    (captioned, TEXT, {**READS, "plugins.fid.reference": "MISSING"}, ("fid", "MISSING")),
]
FIT = (captioned, TEXT, READS)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    monkeypatch.chdir(tmp_path)
    weights = {"of_text.weight": torch.zeros(4, 2), "of_text.bias": torch.zeros(3)}
    save_file(weights, tmp_path / "other.safetensors")  # of another network

    def config(source: Source, diffusion: dict[str, Any], changes: dict[str, Any], names: str = "image text") -> Path:
        uses = {"image": "Halves", "text": "Letters"}
        encoders = {name: {"use": f"tests.data.test_rest:{uses[name]}", "log": "log"} for name in names.split()}
        data = {"source": f"{source.__module__}:{source.__name__}", "cache_dir": "cache", "encode": encoders}
        of_model = {key.removeprefix("model."): value for key, value in changes.items() if key.startswith("model.")}
        tables = {"data": data, "model": of_model or DIT, "diffusion": diffusion}
        return write_small(tmp_path / "small.toml", run={"batch_size": 2}, **tables)

    return config


@pytest.mark.parametrize(("source", "diffusion", "changes", "facts"), BAD)
def test_what_does_not_fit_is_refused_before_anything_is_encoded(
    write: Any, hookdiff: Any, tmp_path: Path, source: Source, diffusion: Any, changes: Any, facts: tuple[str, ...]
) -> None:
    path = write(source, diffusion, changes)
    settings = [f"{key}={value}" for key, value in changes.items() if not key.startswith("model.")]
    plugins = [key.split(".")[1] for key in changes if key.startswith("plugins.")]
    if plugins == ["fid"]:
        settings.append(f"plugins.fid.features={__name__}:mean_colours")
    with refused(UserError, *facts):
        build_loop(load_config(path, plugins, settings), tmp_path / "run")
    options = [word for setting in settings for word in ("--set", setting)]
    check_refused(hookdiff("check", path, *options, *(("--plugins", plugins[0]) if plugins else ())), *facts)
    assert not (tmp_path / "log").exists()  # only single samples were encoded
    assert not [*(tmp_path / "cache").rglob("mean")]


def mean_colours(images: torch.Tensor) -> torch.Tensor:
    return images.mean((2, 3))


class Refuses:
    """A plugin that cannot be made."""

    def __init__(self) -> None:
        raise ValueError("no such device")

    @hookimpl
    def on_start(self) -> None:
        """Never called."""


def test_a_plugin_that_cannot_be_made_is_refused_before(write: Any, tmp_path: Path) -> None:
    config = load_config(write(*FIT), [f"{__name__}:Refuses"])
    with refused(ConfigError, "plugins.refuses", "no such device"):
        build_loop(config, tmp_path / "run")
    assert not (tmp_path / "log").exists()


class Unopened(Letters):
    """An encoder of texts with a folder that no library takes."""

    def open(self, device: torch.device) -> Any:
        raise UserError("data.encode: weights of nothing cannot be loaded")


def test_an_encoder_that_cannot_be_opened_is_refused_with_its_reason(write: Any, hookdiff: Any) -> None:
    path = write(*FIT)
    path.write_text(path.read_text().replace("tests.data.test_rest:Letters", f"{__name__}:Unopened"))
    check_refused(hookdiff("check", path), "data.encode", "weights of nothing")


def test_a_side_that_does_not_fit_is_refused_before(write: Any, tmp_path: Path) -> None:
    path = write(pictures, {}, {}, "image")
    with refused(ConfigError, "patch_size", "3", "latents of 3 x 4 x 4, encoded from pictures of 3 x 8 x 8"):
        build_loop(load_config(path, settings=["model.patch_size=3"]), tmp_path / "run")
    assert not (tmp_path / "log").exists()


def test_what_fits_is_encoded_once_and_checked_without(write: Any, hookdiff: Any, tmp_path: Path) -> None:
    path = write(*FIT)
    output(hookdiff("check", path))
    assert not (tmp_path / "log").exists()
    build_loop(load_config(path), tmp_path / "run")
    assert sum(int(line) for line in (tmp_path / "log").read_text().splitlines()) == NUM + NUM + 1
    alone = build_feed(load_config(path, settings=[f"data.cache_dir={tmp_path}/other"]))
    both = build_feed(load_config(path))
    for mine, its in zip(both.bind(50, 0).batches(0), alone.bind(50, 0).batches(0), strict=True):
        assert torch.equal(mine.inputs, its.inputs)
        assert torch.equal(mine.conditions["text"], its.conditions["text"])
