"""Test that a `path` without an encoder is refused, and that the message names the nearest folder with one."""

import json
from pathlib import Path

import pytest

from hookdiff import UserError
from hookdiff.encoding import Encoder
from hookdiff_autoencoder import Autoencoder
from hookdiff_text import Text
from hookdiff_text.pipeline import Pipeline
from tests.conftest import refused

VAE, CLIP = {"_class_name": "AutoencoderKL"}, {"architectures": ["CLIPTextModel"]}
TABLES = {
    "pipe/model_index.json": {"_class_name": "StableDiffusionXLPipeline"},
    "pipe/vae/config.json": VAE,
    "pipe/unet/config.json": {"_class_name": "UNet2DConditionModel"},
    "pipe/text_encoder/config.json": CLIP,
    "pipe/text_encoder_2/config.json": {"architectures": ["CLIPTextModelWithProjection"]},
    "models--some--vae/snapshots/0123/config.json": VAE,
    "alone/other.json": {},
}
KINDS: dict[str, type[Encoder]] = {"vae": Autoencoder, "text": Text, "pipeline": Pipeline}
WEIGHTS = ("pipe/vae/diffusion_pytorch_model.safetensors", "pipe/text_encoder/model.safetensors", "alone/a.safetensors")
CASES = [
    ("vae", WEIGHTS[0], (WEIGHTS[0], "is a file", "of an autoencoder", "path = 'pipe/vae'")),
    ("vae", "pipe/vae/config.json", ("is a file", "path = 'pipe/vae'")),
    ("vae", "pipe/model_index.json", ("is a file", "path = 'pipe/vae'")),
    ("vae", "alone/a.safetensors", ("is a file", "config.json")),
    ("vae", "pipe", ("no config.json", "whole pipeline", "path = 'pipe/vae'")),
    ("vae", "models--some--vae", ("no config.json", "path = 'models--some--vae/snapshots/0123'")),
    ("vae", "pipe/vea", ("no 'vea'", "'vae'")),
    ("vae", f"{WEIGHTS[0]}/x", (WEIGHTS[0], "is no folder")),
    ("vae", "stabilityai/sd-vae-ft-mse", ("hf download stabilityai/sd-vae-ft-mse --local-dir sd-vae-ft-mse",)),
    ("vae", "some/model/vae", ("hf download some/model --local-dir model", "path = 'model/vae'")),
    ("vae", "https://huggingface.co/some/model/tree/main", ("hf download some/model --local-dir model",)),
    ("text", WEIGHTS[1], ("is a file", "path = 'pipe/text_encoder'")),
    ("text", "pipe", ("whole pipeline", "path = 'pipe/text_encoder' or path = 'pipe/text_encoder_2'")),
    ("text", "openai/clip-vit-large-patch14", ("hf download openai/clip-vit-large-patch14",)),
    ("text", "bert-base-uncased", ("hf download bert-base-uncased --local-dir bert-base-uncased",)),
    ("pipeline", "pipe/model_index.json", ("is a file", "path = 'pipe'")),
    ("pipeline", "pipe/text_encoder", ("no model_index.json", "path = 'pipe'")),
    ("pipeline", "stabilityai/sdxl", ("hf download stabilityai/sdxl",)),
]  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, table in TABLES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps(table))
    for name in WEIGHTS:
        (tmp_path / name).write_bytes(b"weights")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("kind", "path", "facts"), CASES)
def test_a_path_that_is_no_folder_of_an_encoder_is_answered_by_the_nearest(
    kind: str, path: str, facts: tuple[str, ...]
) -> None:
    encoder = KINDS[kind](path=path)  # type: ignore[call-arg]
    with refused(UserError, "data.encode", *facts) as caught:
        encoder.digest()
    assert str(caught.value).count("did you mean") <= 1


@pytest.mark.parametrize("path", ["/no/where", "~/no/where", "../no/where", "pipe/no/where", "no.safetensors"])
def test_a_place_on_this_machine_is_taken_for_no_name_of_the_hub(path: str) -> None:
    with refused(UserError, "data.encode", "has no") as caught:
        Autoencoder(path=path).digest()
    assert "hf download" not in str(caught.value)
