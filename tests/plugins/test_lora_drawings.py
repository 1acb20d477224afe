"""An adapter of rank 4 teaches a network, which has learnt discs, squares and triangles, to draw hearts."""

import math
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from hookdiff import load_run
from tests.conftest import Succeed
from tests.plugins.test_text_drawings import NETWORKS

pytest.importorskip("transformers", reason="needs hookdiff[text]")
pytest.importorskip("peft", reason="needs hookdiff[lora]")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of layers in diffusers

SHAPES = ("disc", "square", "triangle", "heart")
PROMPT = "a large heart on white"
RUN: dict[str, Any] = {"device": "cpu", "threads": 1, "plugins": ["ema", "lr", "clip", "checkpoint"]}
BASE: dict[str, dict[str, Any]] = {
    "run": {**RUN, "steps": 1200, "batch_size": 32},
    "data": {
        "source": "folder",
        "path": "shapes",
        "captions": "txt",
        "labels": "none",
        "cache_dir": "cache",
        "encode": {"image": {"use": "autoencoder", "path": "vae"}, "text": {"use": "pipeline", "path": "texts"}},
    },
    "model": {**NETWORKS["UNet2DConditionModel"]["model"], "attention_head_dim": 16},
    "diffusion": {
        "process": {"use": "vp", "schedule": "scaled_linear"},
        "prediction": "epsilon",
        "conditions": {"encoder_hidden_states": "text"},
    },
    "optimizer": {"lr": 2e-3},
    "sampling": {"sampler": "ddim", "steps": 20, "guidance": {"scale": 3.0}},
}
HEARTS: dict[str, dict[str, Any]] = {
    "run": {**RUN, "steps": 400, "batch_size": 8, "plugins": ["lora", *RUN["plugins"]]},
    "data": {"source": "folder", "path": "hearts", "captions": "txt", "labels": "none", "cache_dir": "cache"},
    "model": {"use": "pretrained", "path": "base"},
    "optimizer": {"use": "adamw", "lr": 2e-3},
    "sampling": {"steps": 20, "guidance": {"scale": 3.0}},
    "plugins": {"lora": {"rank": 4}},
}


def outline(shape: str) -> list[tuple[float, float]]:
    """Return the corners of a shape in the unit square, the top at 0."""
    if shape == "square":
        return [(0, 0), (1, 0), (1, 1), (0, 1)]
    if shape == "triangle":
        return [(0.5, 0), (1, 1), (0, 1)]
    turns = [2 * math.pi * k / 60 for k in range(60)]
    if shape == "disc":
        return [((1 + math.cos(t)) / 2, (1 + math.sin(t)) / 2) for t in turns]
    points = [
        (math.sin(t) ** 3, (13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)) / 17)
        for t in turns
    ]
    low, high = min(y for _, y in points), max(y for _, y in points)
    return [((x + 1) / 2, (high - y) / (high - low)) for x, y in points]


def draw(shape: str, left: int, top: int, side: int, canvas: int = 32) -> Image.Image:
    picture, scale = Image.new("RGB", (canvas * 4, canvas * 4), "white"), 4  # drawn large, for smooth edges
    corners = [((left + x * side) * scale, (top + y * side) * scale) for x, y in outline(shape)]
    ImageDraw.Draw(picture).polygon(corners, "#202020")
    return picture.resize((canvas, canvas), Image.Resampling.BOX)


def save_drawings(folder: Path, shapes: Sequence[str], num: int) -> None:
    folder.mkdir()
    chance = random.Random(0)
    for k in range(num):
        shape, size = shapes[k % len(shapes)], ("large", "small")[k // len(shapes) % 2 if len(shapes) > 1 else 0]
        side = chance.randint(19, 25) if size == "large" else chance.randint(11, 14)
        left, top = (min(max(0, (32 - side) // 2 + chance.randint(-3, 3)), 32 - side) for _ in "xy")
        draw(shape, left, top, side).save(folder / f"{k:04}.png")
        (folder / f"{k:04}.txt").write_text(f"a {size} {shape} on white")


def silhouette(picture: Tensor) -> Tensor:
    """Return where a picture (c h w, in [0, 1]) is dark, cut to its box and resized to 24 x 24."""
    dark = picture.mean(0) < 0.5
    rows, columns = dark.any(1).nonzero().flatten(), dark.any(0).nonzero().flatten()
    if not len(rows):
        return torch.zeros(24, 24, dtype=torch.bool)
    box = dark[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    return torch.nn.functional.interpolate(box[None, None].float(), (24, 24), mode="bilinear")[0, 0] > 0.5


def shape_of(picture: Tensor) -> str:
    """Return the shape whose silhouette overlaps most with that of the picture."""
    from torchvision.transforms.functional import to_tensor

    seen = silhouette(picture)
    known = {shape: silhouette(to_tensor(draw(shape, 4, 4, 24))) for shape in SHAPES}
    overlaps = {shape: float((seen & one).sum() / (seen | one).sum()) for shape, one in known.items()}
    return max(overlaps, key=overlaps.__getitem__)


def drawn(run_dir: str) -> list[str]:
    """Return the shapes that a run draws of the prompt."""
    with load_run(run_dir) as run:
        return [shape_of(picture / 2 + 0.5) for picture in run.sample(32, prompts=[PROMPT] * 32)]


def test_an_adapter_teaches_a_new_shape(tmp_path: Path, succeed: Succeed, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Path("examples/train_autoencoder.py").absolute()
    monkeypatch.chdir(tmp_path)
    save_drawings(tmp_path / "shapes", SHAPES[:3], 600)
    save_drawings(tmp_path / "hearts", SHAPES[3:], 11)
    save_pipeline(tmp_path / "texts")
    options = ["--image-size", "32", "--steps", "2000"]
    subprocess.run([sys.executable, script, "shapes", "vae", *options], check=True)
    for name, config in (("base", BASE), ("hearts", HEARTS)):
        Path(f"{name}.toml").write_text(tomli_w.dumps(config))
    succeed("run", "base.toml")
    succeed("export", "runs/base", "base", "--to", "diffusers")
    before = drawn("runs/base")
    succeed("run", "hearts.toml")
    after = drawn("runs/hearts")
    files = [path for path in Path("runs/hearts/checkpoints").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 1 << 20
    assert (before.count("heart") <= 3, after.count("heart") >= 28) == (True, True), (before, after)


def save_pipeline(folder: Path) -> None:
    """Save the text side of Stable Diffusion, with random weights and a tokenizer of the words in the captions."""
    import diffusers
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["<s>", "</s>", "<unk>", *f"a large small on white {' '.join(SHAPES)}".split()]
    tokenizer = Tokenizer(models.WordLevel({word: k for k, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names, model_max_length=8)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": len(words), "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    config = transformers.CLIPTextConfig(**sizes, **tokens, max_position_embeddings=8, initializer_factor=5.0)
    parts = {"vae": None, "unet": None, "scheduler": None, "safety_checker": None, "feature_extractor": None}
    diffusers.StableDiffusionPipeline(
        **parts, text_encoder=transformers.CLIPTextModel(config), tokenizer=made, requires_safety_checker=False
    ).save_pretrained(folder)
