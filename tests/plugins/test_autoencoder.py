"""Test autoencoders of diffusers as encoders: what they make equals their own, and what is none is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import scipy.linalg
import torch
from attrs import evolve
from PIL import Image

from hookdiff import UserError, load_config, load_run
from hookdiff.experiment.build import build_feed
from hookdiff.log.pixels import to_uint8
from hookdiff_features import spaces
from tests.conftest import check_facts, check_refused, output, pixels, refused
from tests.forked import python

diffusers = pytest.importorskip("diffusers")

CONFIG = """
[run]
steps = 4
batch_size = 6
log_every = 2
device = "cpu"
plugins = ["checkpoint", "ema", "fid"]

[data]
source = "folder"
path = "{folder}/pictures"
cache_dir = "{folder}/cache"

[data.encode.image]
use = "autoencoder"
path = "{folder}/vae"

[model]
use = "unet"
channels = 8
num_res_blocks = 1
head_dim = 8

[sampling]
steps = 2

[plugins.fid]
num_samples = 8
features = "tests.plugins.test_autoencoder:mean_colours"
"""


def mean_colours(images: torch.Tensor) -> torch.Tensor:
    """Return the mean colours of 2 x 2 fields."""
    return torch.nn.functional.adaptive_avg_pool2d(images, 2).flatten(1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with 40 pictures, a small autoencoder with random weights, and a config of both."""
    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 3, "up_block_types": ("UpDecoderBlock2D",) * 3}
    sizes = {"block_out_channels": (16, 32, 32), "layers_per_block": 1, "latent_channels": 4, "norm_num_groups": 8}
    diffusers.AutoencoderKL(3, 3, **blocks, **sizes).save_pretrained(tmp_path / "vae")
    (tmp_path / "pictures").mkdir()
    for index in range(40):
        Image.fromarray(pixels(index, 32)).save(tmp_path / "pictures" / f"{index:02}.png")
    (tmp_path / "latents.toml").write_text(CONFIG.format(folder=tmp_path))
    return tmp_path


def test_latents_and_pictures_are_those_of_diffusers(folder: Path) -> None:
    vae = diffusers.AutoencoderKL.from_pretrained(folder / "vae").eval()
    feed = build_feed(load_config(folder / "latents.toml")).bind(6)
    images = torch.cat([batch.inputs for batch in feed.pictures.unaugmented(torch.arange(40), 32)])
    means = torch.cat([batch.inputs for batch in feed.unaugmented(torch.arange(40))])
    with torch.no_grad():
        own = torch.cat([vae.encode(part).latent_dist.mean for part in images.split(32)])
        assert torch.equal(means, own.half().float())
        assert feed.codec is not None
        torch.testing.assert_close(feed.codec.decode(means[:4]), vae.decode(means[:4]).sample, atol=1e-5, rtol=0)
        torch.testing.assert_close(feed.codec.encode(images[:4]), own[:4], atol=1e-5, rtol=0)


def test_a_run_measures_pictures_and_samples_without_its_data(
    succeed: Callable[..., str], hookdiff: Callable[..., Any], folder: Path
) -> None:
    succeed("run", folder / "latents.toml", "--out", folder / "run")
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    (measured,) = [line for line in lines if any(key.startswith("fd/") for key in line)]
    assert load_run(folder / "run", trust=True).sample(2).shape == (2, 3, 32, 32)
    name = next(key for key in measured if key.startswith("fd/"))
    found = succeed(
        *("fid", folder / "run", folder / "pictures", "--num", "8", "--json", "--trust"),
        *("--features", "tests.plugins.test_autoencoder:mean_colours"),
    )
    assert measured[name] == pytest.approx(json.loads(found)[name], rel=1e-4)
    # It needs the autoencoder, wherever that is, and not the data.
    (folder / "vae").rename(folder / "moved")
    (folder / "pictures").rename(folder / "gone")
    moved = "--trust", "--set", f"data.encode.image.path={folder / 'moved'}"
    succeed("sample", folder / "run", "--num", "2", "--out", folder / "two.png", *moved)
    succeed("export", folder / "run", folder / "weights.safetensors", *moved)
    check_refused(hookdiff("sample", folder / "run", "--trust"), folder / "vae")


def test_the_second_start_imports_no_diffusers(folder: Path) -> None:
    code = f"""
import sys
from hookdiff import load_config
from hookdiff.experiment.build import build_feed
feed = build_feed(load_config({str(folder / "latents.toml")!r}, ["no:fid"])).bind(6)  # whose features import it here
next(feed.batches(0))
print("diffusers" in sys.modules)
"""
    starts = [output(python(code, folder=folder, fresh=True)) for _ in range(2)]
    assert [start.strip() for start in starts] == ["True", "False"]


def test_the_cost_of_the_autoencoder_alone_is_that_of_plain_torch(
    succeed: Callable[..., str], hookdiff: Callable[..., Any], folder: Path
) -> None:
    vae = diffusers.AutoencoderKL.from_pretrained(folder / "vae").eval()
    drawn = numpy.stack([pixels(index, 32) for index in range(0, 40, 2)])  # 20 of 40, evenly spread
    x = torch.from_numpy(drawn).permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        y = vae.decode(vae.encode(x).latent_dist.mean).sample.clamp(-1, 1)
    psnr = (10 * (4 / (x - y).square().mean((1, 2, 3))).log10()).mean()
    rows = [mean_colours(to_uint8(images) / 127.5 - 1).double().numpy() for images in (y, x)]
    (mean, cov), (mean2, cov2) = [(one.mean(0), numpy.cov(one.T)) for one in rows]
    root = scipy.linalg.sqrtm(cov @ cov2)
    distance = ((mean - mean2) ** 2).sum() + numpy.trace(cov + cov2 - 2 * root.real)

    words = "data", folder / "latents.toml", "--reconstruction", "20"
    features = "--features", "tests.plugins.test_autoencoder:mean_colours"
    code, out, err = hookdiff(*words, *features, "--json")
    found = json.loads(out)
    name = "fd/tests.plugins.test_autoencoder.mean_colours"
    assert (code, found["num"], found["samples"], found["space"]) == (0, 20, 40, name.removeprefix("fd/"))
    assert found["psnr"] == pytest.approx(float(psnr), abs=1e-4)
    assert found[name] == pytest.approx(distance, rel=1e-4)
    check_facts(err, "fewer than 2,000 images")
    text = succeed(*words, *features)
    check_facts(text, "20 of 40", f"{found['psnr']:.2f} dB", name, f"{found[name]:.6g}")
    assert not [*folder.glob("cache/encoded/*")]  # which would take all samples


def test_without_its_features_the_cost_of_an_autoencoder_is_a_psnr(
    hookdiff: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(folder))
    url = (folder / "nowhere" / "weights.pth").as_uri()
    monkeypatch.setattr(spaces, "FID_WEIGHTS", evolve(spaces.FID_WEIGHTS, url=url))
    words = "data", folder / "latents.toml", "--reconstruction", "99", "--json"
    code, out, err = hookdiff(*words)
    found = json.loads(out)
    assert (code, [*found], found["num"], found["space"]) == (0, ["num", "samples", "psnr", "space"], 40, None)
    check_facts(err, "distance", url)
    check_refused(hookdiff(*words, "--features", "inception"), url)


def test_an_autoencoder_whose_cost_cannot_be_measured_is_refused(
    hookdiff: Callable[..., Any], write_config: Any, folder: Path
) -> None:
    few = "--reconstruction", "4"
    check_refused(hookdiff("data", write_config(), *few), "--reconstruction", "[data.encode.image]")
    latents = "data", folder / "latents.toml"
    wrong = hookdiff(*latents, *few, "--features", "incption")
    check_refused(wrong, "--features", "'incption'", "'inception'")
    check_refused(hookdiff(*latents, "--features", "inception"), "--features", "--reconstruction")
    check_refused(hookdiff(*latents, *few, "--out", "a.png"), "--reconstruction", "--out")
    vae = diffusers.AutoencoderKL.from_pretrained(folder / "vae")
    vae.decoder.conv_out.bias.data.fill_(torch.nan)
    vae.save_pretrained(folder / "vae")
    own = "--features", "tests.plugins.test_autoencoder:mean_colours"
    check_refused(hookdiff(*latents, *few, *own), "data.encode.image", "00.png", "finite")


def spoil(folder: Path, how: str) -> None:
    vae = folder / "vae"
    config = json.loads((vae / "config.json").read_text())
    if how == "no config":
        (vae / "config.json").unlink()
    if how == "no class":
        (vae / "config.json").write_text(json.dumps({**config, "_class_name": "UNet2DModel"}))
    if how == "pickled":
        (vae / "diffusion_pytorch_model.safetensors").rename(vae / "diffusion_pytorch_model.bin")


@pytest.mark.parametrize(
    ("how", "settings", "facts"),
    [
        ("no folder", ["data.encode.image.path=nowhere"], ("nowhere",)),
        ("no config", [], ("config.json",)),
        ("no class", [], ("UNet2DModel", "AutoencoderKL")),
        ("pickled", [], ("safetensors", "diffusion_pytorch_model.bin", "pickle")),
        ("a side", ["data.image_size=30"], ("data.encode.image", "image_size", 4, "28", "32")),
        ("grey", ["data.channels=1"], ("3 channels", "data.channels = 3")),
    ],
)
def test_what_cannot_encode_the_pictures_is_refused_before_anything_is_encoded(
    hookdiff: Callable[..., Any], folder: Path, how: str, settings: list[str], facts: tuple[object, ...]
) -> None:
    spoil(folder, how)
    options = [word for setting in settings for word in ("--set", setting)]
    check_refused(hookdiff("run", folder / "latents.toml", "--out", folder / "run", *options), *facts)
    with refused(UserError, *facts):
        build_feed(load_config(folder / "latents.toml", settings=settings))
    assert not [*folder.glob("cache/encoded/*/about.json")]
