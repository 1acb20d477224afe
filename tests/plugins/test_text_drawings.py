"""Runs on latents and captions of drawings learn to draw prompts, among them prompts that no drawing had."""

import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchvision.transforms.functional import to_tensor

from hookdiff import load_run
from tests.plugins.test_text import save_encoder

pytest.importorskip("transformers", reason="needs hookdiff[text]")
pytest.importorskip("diffusers", reason="needs hookdiff[diffusers]")

COLOURS = {"red": "#d02020", "green": "#20a040", "blue": "#2050d0", "yellow": "#f0c020"}
SHAPES = ("disc", "square", "ring")
CAPTIONS = [" ".join(words) for words in product(("a large", "a small"), COLOURS, SHAPES, ("on white", "on black"))]
LEFT_OUT = (  # each word and each two of shape and ground are also in others
    *("a large red disc on white", "a small green disc on black", "a large blue square on white"),
    *("a small yellow square on black", "a large red ring on black", "a small blue ring on white"),
)
LEARNT = [caption for caption in CAPTIONS if caption not in LEFT_OUT]
EACH = 25  # drawings of a caption

CONFIG: dict[str, dict[str, Any]] = {
    "run": {"steps": 1200, "batch_size": 32, "device": "cpu", "threads": 1},
    "data": {
        "source": "folder",
        "path": "drawings",
        "captions": "txt",
        "cache_dir": "cache",
        "encode": {"image": {"use": "autoencoder", "path": "vae"}, "text": {"use": "text", "path": "CLIPTextModel"}},
    },
    "optimizer": {"lr": 2e-3},
    "plugins": {"lr": {"schedule": "cosine"}},
    "sampling": {"guidance": {"scale": 2.0}},
}
NETWORKS: dict[str, dict[str, Any]] = {
    "dit": {
        "model": {"use": "dit", "patch_size": 1, "hidden_size": 128, "depth": 4, "num_heads": 4, "text_dim": 64},
        "diffusion": {"conditions": ["text"]},
    },
    "UNet2DConditionModel": {
        "model": {
            "use": "diffusers:UNet2DConditionModel",
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "block_out_channels": [32, 64],
            "down_block_types": ["CrossAttnDownBlock2D"] * 2,
            "up_block_types": ["CrossAttnUpBlock2D"] * 2,
            "layers_per_block": 1,
            "norm_num_groups": 8,
            "attention_head_dim": 4,
            "cross_attention_dim": 64,
        },
        "diffusion": {"conditions": {"encoder_hidden_states": "text"}},
    },
}


def draw(caption: str, chance: random.Random) -> Image.Image:
    """Draw a caption, somewhere and of about the size it says."""
    _, size, colour, shape, _, ground = caption.split()
    picture, scale = Image.new("RGB", (128, 128), ground), 4  # drawn large, for smooth edges
    side = chance.randint(20, 26) if size == "large" else chance.randint(14, 17)
    left, top = ((32 - side) // 2 + chance.randint(-3, 3) for _ in "xy")
    box = [left * scale, top * scale, (left + side) * scale - 1, (top + side) * scale - 1]
    pen = ImageDraw.Draw(picture)
    if shape == "square":
        pen.rectangle(box, COLOURS[colour])
    elif shape == "disc":
        pen.ellipse(box, COLOURS[colour])
    else:
        pen.ellipse(box, outline=COLOURS[colour], width=side * scale // 4)
    return picture.resize((32, 32), Image.Resampling.BOX)


def names(captions: Sequence[str]) -> Tensor:
    """Return the number of the colour and of the shape of each caption: n x 2."""
    words = [caption.split() for caption in captions]
    return torch.tensor([[list(COLOURS).index(each[2]), SHAPES.index(each[3])] for each in words])


class Judge(nn.Module):
    """Names the colour and the shape of pictures n x 3 x 32 x 32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = (3, 16, 32, 64)
        layers = [(nn.Conv2d(a, b, 3, 2, 1), nn.ReLU()) for a, b in pairwise(widths)]
        self.net = nn.Sequential(*(each for pair in layers for each in pair), nn.Flatten(), nn.Linear(1024, 7))
        chance, captions = random.Random(1), CAPTIONS * EACH
        pictures = torch.stack([to_tensor(draw(caption, chance)) for caption in captions]) * 2 - 1
        truth, optimizer = names(captions), torch.optim.Adam(self.parameters(), lr=2e-3)
        for _ in range(60):
            for chosen in torch.randperm(len(captions)).split(64):
                seen = pictures[chosen] + 0.1 * torch.randn_like(pictures[chosen])
                colour, shape = self.net(seen).split((4, 3), 1)
                loss = cross_entropy(colour, truth[chosen, 0]) + cross_entropy(shape, truth[chosen, 1])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        assert (self.named(pictures) == truth).float().mean(0).min() > 0.99

    def named(self, pictures: Tensor) -> Tensor:
        """Return the numbers of colour and shape: n x 2."""
        with torch.no_grad():
            colour, shape = self.net(pictures).split((4, 3), 1)
        return torch.stack([colour.argmax(1), shape.argmax(1)], 1)


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Draw all captions, and train an autoencoder on those that are learnt."""
    folder = tmp_path_factory.mktemp("text")
    chance = random.Random(0)
    for caption in CAPTIONS:
        into = folder / ("drawings" if caption in LEARNT else "left-out")
        into.mkdir(exist_ok=True)
        for k in range(EACH):
            path = into / f"{caption} {k}.png"
            draw(caption, chance).save(path)
            path.with_suffix(".txt").write_text(caption)
    save_encoder("CLIPTextModel", folder)
    script = Path("examples/train_autoencoder.py").absolute()
    options = ["--image-size", "32", "--steps", "2000"]
    subprocess.run([sys.executable, script, "drawings", "vae", *options], cwd=folder, check=True)
    return folder


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of layers in diffusers
@pytest.mark.parametrize("network", NETWORKS)
def test_it_draws_prompts(
    network: str, laid_out: Path, succeed: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(laid_out)
    Path(f"{network}.toml").write_text(tomli_w.dumps(CONFIG | NETWORKS[network]))
    succeed("run", f"{network}.toml", "--out", network)
    run, judge = load_run(network), Judge()

    def right(captions: Sequence[str], num: int) -> list[int]:
        prompts = [captions[k % len(captions)] for k in range(num)]
        named = judge.named(run.sample(num, prompts=prompts))
        return (named == names(prompts)).sum(0).tolist()

    colour, shape = right(LEARNT, 160)
    assert colour >= 156
    assert shape >= 150
    assert right(LEFT_OUT, 60)[0] >= 48
    of_none = judge.named(run.sample(160, prompts=[""] * 160))[:, 0]
    assert of_none.bincount().max() <= 80
