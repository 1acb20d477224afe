"""Test autoencoders of diffusers as encoders: what they make equals their own, and what is none is refused."""

import json
import shutil
import tomllib
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy
import pytest
import scipy.linalg
import torch
from attrs import evolve
from PIL import Image
from safetensors.torch import load_file, save_file

from hookdiff import SampleRequest, UserError, load_config, load_run
from hookdiff.encoding import PictureEncoder
from hookdiff.experiment.build import build_feed
from hookdiff.log.pixels import to_uint8
from hookdiff_features import spaces
from tests.conftest import Command, Succeed, check_facts, check_refused, output, pixels, refused, warnings, wide
from tests.forked import python
from tests.plugins.test_export import called

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


FEATURES = ("--features", "tests.plugins.test_autoencoder:mean_colours")


def mean_colours(images: torch.Tensor) -> torch.Tensor:
    """Return the mean colours of 2 x 2 fields."""
    return torch.nn.functional.adaptive_avg_pool2d(images, 2).flatten(1)


def save_autoencoder(path: Path, **options: Any) -> None:
    """Save a small AutoencoderKL with random weights."""
    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 3, "up_block_types": ("UpDecoderBlock2D",) * 3}
    sizes = {"block_out_channels": (16, 32, 32), "layers_per_block": 1, "latent_channels": 4, "norm_num_groups": 8}
    diffusers.AutoencoderKL(3, 3, **blocks, **sizes, **options).save_pretrained(path)


def save_tiny(path: Path) -> None:
    """Save a small AutoencoderTiny with random weights."""
    torch.manual_seed(0)
    sizes = {"encoder_block_out_channels": (8,) * 3, "num_encoder_blocks": (1,) * 3}
    sizes |= {"decoder_block_out_channels": (8,) * 3, "num_decoder_blocks": (1,) * 3}
    diffusers.AutoencoderTiny(**sizes, scaling_factor=3.0).save_pretrained(path)


def save_dc(path: Path) -> None:
    """Save a small AutoencoderDC with random weights."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"latent_channels": 4, "attention_head_dim": 8}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_block_types": "ResBlock", f"{side}_block_out_channels": (8, 16)}
        sizes |= {f"{side}_layers_per_block": (1, 1), f"{side}_qkv_multiscales": ((), ())}
    diffusers.AutoencoderDC(**sizes).save_pretrained(path)


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Return a folder with pictures, 40 by default, a small autoencoder with random weights, and a config of both."""
    save_autoencoder(tmp_path / "vae")
    (tmp_path / "pictures").mkdir()
    for index in range(getattr(request, "param", 40)):
        Image.fromarray(pixels(index, 32)).save(tmp_path / "pictures" / f"{index:02}.png")
    (tmp_path / "latents.toml").write_text(CONFIG.format(folder=tmp_path))
    return tmp_path


FEW_PICTURES = pytest.mark.parametrize("folder", [6], indirect=True)


@pytest.mark.parametrize(
    ("save", "result"), [(save_autoencoder, "latent_dist.mean"), (save_tiny, "latents"), (save_dc, "latent")]
)
def test_latents_and_pictures_are_those_of_diffusers(folder: Path, save: Any, result: str) -> None:
    save(folder / "vae")
    feed = build_feed(load_config(folder / "latents.toml")).bind(6)
    name = json.loads((folder / "vae" / "config.json").read_text())["_class_name"]
    vae = getattr(diffusers, name).from_pretrained(folder / "vae").eval()
    images = torch.cat([batch.inputs for batch in feed.pictures.unaugmented(torch.arange(40), 32)])
    means = torch.cat([batch.inputs for batch in feed.unaugmented(torch.arange(40))])
    with torch.no_grad():
        own = torch.cat([attrgetter(result)(vae.encode(part)) for part in images.split(32)])
        assert torch.equal(means, own.half().float())
        for batch in feed.batches(0) if save is not save_autoencoder else ():  # which draws from its posterior
            assert torch.equal(batch.inputs, own[batch.indices].half().float())
        assert feed.codec is not None
        torch.testing.assert_close(feed.codec.decode(means[:4]), vae.decode(means[:4]).sample, atol=1e-5, rtol=0)
        torch.testing.assert_close(feed.codec.encode(images[:4]), own[:4], atol=1e-5, rtol=0)


@pytest.mark.parametrize("posterior", ["sample", "mean"])
def test_the_posterior_or_its_mean_is_trained_on(folder: Path, posterior: str) -> None:
    settings = [f"data.encode.image.posterior={posterior}"]
    feed = build_feed(load_config(folder / "latents.toml", settings=settings)).bind(6)
    columns = feed.reader._tables["image"].tables[0].columns
    mean, std = columns["mean"][:, 0].float(), columns["std"][:, 0].float()
    drawn = torch.cat([(batch.inputs - mean[batch.indices]) / std[batch.indices] for batch in feed.batches(0)])
    assert float(drawn.std()) == pytest.approx(float(posterior == "sample"), abs=0.05)


def test_a_run_measures_pictures_and_samples_without_data(succeed: Succeed, hookdiff: Command, folder: Path) -> None:
    succeed("run", folder / "latents.toml", "--out", folder / "run")
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    (measured,) = [line for line in lines if any(key.startswith("fd/") for key in line)]
    vae = diffusers.AutoencoderKL.from_pretrained(folder / "vae").eval()
    with load_run(folder / "run", trust=True) as run, torch.no_grad():
        made, raw = (run.loop.sample(SampleRequest(2, raw=raw)).images for raw in (False, True))
        torch.testing.assert_close(made, vae.decode(raw).sample.clamp(-1, 1), atol=1e-5, rtol=0)
    name = next(key for key in measured if key.startswith("fd/"))
    words = "fid", folder / "run", folder / "pictures", "--num", "8", "--json", *FEATURES
    found = json.loads(succeed(*words, "--trust"))
    assert measured[name] == pytest.approx(found[name], rel=1e-4)
    # It needs the autoencoder, wherever that is, and not the data.
    (folder / "vae").rename(folder / "moved")
    moved = "--trust", "--set", f"data.encode.image.path={folder / 'moved'}"
    assert json.loads(succeed(*words, *moved)) == found
    succeed("resume", folder / "run", "--steps", "6", "--out", folder / "branch", *moved)
    (folder / "pictures").rename(folder / "gone")
    succeed("sample", folder / "run", "--num", "2", "--out", folder / "two.png", *moved)
    succeed("export", folder / "run", folder / "weights.safetensors", *moved)
    check_refused(hookdiff("sample", folder / "run", "--trust"), folder / "vae")


def test_the_only_weights_of_a_folder_are_read_and_else_those_of_the_usual_name(folder: Path) -> None:
    usual, half = (folder / "vae" / f"diffusion_pytorch_model{kind}.safetensors" for kind in ("", ".fp16"))
    config = load_config(folder / "latents.toml")
    both = build_feed(config)
    assert both.codec is not None
    pictures = torch.zeros(1, 3, 32, 32)
    latents, digest = both.codec.encode(pictures), both.codec.digest
    save_file({name: tensor.half() for name, tensor in load_file(usual).items()}, half, {"format": "pt"})
    assert both.codec.encoder.digest() == digest
    usual.unlink()
    alone = build_feed(config)
    assert alone.codec is not None
    assert alone.codec.digest != digest
    torch.testing.assert_close(alone.codec.encode(pictures), latents, atol=2e-2, rtol=2e-2)
    half.rename(half.with_name("other.safetensors"))
    (folder / "vae" / "another.safetensors").write_bytes(b"")
    with refused(UserError, "data.encode", "vae", "another.safetensors", "other.safetensors", usual.name):
        alone.codec.encoder.digest()


@FEW_PICTURES
def test_a_moved_autoencoder_has_its_remedy_once(hookdiff: Command, folder: Path) -> None:
    (folder / "vae").rename(folder / "moved")
    for words in (("check", folder / "latents.toml"), ("run", folder / "latents.toml", "--out", folder / "run")):
        code, _, err = hookdiff(*words)
        assert (code, err.count("--set data.encode.image.path=DIR")) == (2, 1)
        check_facts(err, folder / "vae")


def test_the_second_start_imports_no_diffusers(folder: Path) -> None:
    code = f"""
import sys
from hookdiff import load_config
from hookdiff.experiment.build import build_feed
feed = build_feed(load_config({str(folder / "latents.toml")!r}, ["no:fid"])).bind(6)  # whose features import it here
next(feed.batches(0))
"""
    exec(code, {})
    assert output(python(f"{code}print('diffusers' in sys.modules)", folder=folder)) == "False\n"


def test_the_cost_of_an_autoencoder_is_that_of_plain_torch(succeed: Succeed, hookdiff: Command, folder: Path) -> None:
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
    code, out, err = hookdiff(*words, *FEATURES, "--json")
    found = json.loads(out)
    name = "fd/tests.plugins.test_autoencoder.mean_colours"
    assert (code, found["num"], found["samples"], found["space"]) == (0, 20, 40, name.removeprefix("fd/"))
    assert found["psnr"] == pytest.approx(float(psnr), abs=1e-4)
    assert found[name] == pytest.approx(distance, rel=1e-4)
    check_facts(err, "fewer than 2,000 images")
    check_facts(succeed(*words, *FEATURES), "20 of 40", f"{found['psnr']:.2f} dB", name, f"{found[name]:.6g}")
    assert not [*folder.glob("cache/encoded/*")]  # which would take all samples


def test_the_cost_of_the_autoencoder_is_measured_beside_encoders_of_texts(succeed: Succeed, folder: Path) -> None:
    words = *FEATURES, "--json", "--reconstruction", "8"
    alone = json.loads(succeed("data", folder / "latents.toml", *words))
    for picture in (folder / "pictures").glob("*.png"):
        picture.with_suffix(".txt").write_text(f"picture {picture.stem}")
    text = (folder / "latents.toml").read_text().replace("cache_dir", 'captions = "txt"\ncache_dir')
    encoder = '[data.encode.text]\nuse = "tests.encoding.test_texts:Bytes"\n\n[model]'
    (folder / "texts.toml").write_text(text.replace("[model]", encoder))
    assert json.loads(succeed("data", folder / "texts.toml", *words)) == alone


@pytest.mark.wide
def test_levels_with_attention_are_given_in_sides_of_latents(succeed: Succeed, hookdiff: Command, folder: Path) -> None:
    sides = "data.image_size=32", "model.attention_resolutions=[8]"  # latents of 8 x 8 and a level of 4 x 4
    own = [word for setting in sides for word in ("--set", setting)]
    succeed("check", folder / "latents.toml", *own)
    succeed("run", folder / "latents.toml", "--out", folder / "run", "--plugins", "no:fid", *own)
    own[-1] = "model.attention_resolutions=[16]"
    check_refused(hookdiff("check", folder / "latents.toml", *own), "attention_resolutions", 16, 8)


@pytest.mark.parametrize("words", [*wide((("run",),)), ("data", "--reconstruction", "8")], ids=" ".join)
def test_an_autoencoder_of_noise_is_reported_and_one_with_a_constant_channel_refused(
    hookdiff: Command, folder: Path, caplog: pytest.LogCaptureFixture, words: tuple[str, ...]
) -> None:
    vae = diffusers.AutoencoderKL.from_pretrained(folder / "vae")
    for values in vae.quant_conv.parameters():
        values.data.zero_()  # mean 0 and deviation 1 for every picture
    vae.save_pretrained(folder / "vae")
    command, *rest = words
    out = ("--out", folder / "run", "--plugins", "no:fid") if command == "run" else ()
    output(hookdiff(command, folder / "latents.toml", *rest, *out))
    (warning,) = [one for one in warnings(caplog) if "data.encode" in one]
    check_facts(warning, "data.encode.image", "channels 0, 1, 2, 3", folder / "vae", "noise", "0.00%")
    shutil.rmtree(folder / "run", ignore_errors=True)
    means = "--set", "data.encode.image.posterior=mean"
    facts = "data.encode.image", "channels 0, 1, 2, 3", "constant", folder / "vae"
    check_refused(hookdiff(command, folder / "latents.toml", *rest, *out, *means), *facts)
    save_tiny(folder / "vae")
    tiny = diffusers.AutoencoderTiny.from_pretrained(folder / "vae")
    tiny.encoder.layers[-1].weight.data[2] = 0
    tiny.save_pretrained(folder / "vae")
    check_refused(hookdiff(command, folder / "latents.toml", *rest, *out), "channel 2 of", "constant", folder / "vae")


def test_without_its_features_the_cost_of_an_autoencoder_is_a_psnr(
    hookdiff: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
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


def test_a_cost_that_cannot_be_measured_is_refused(hookdiff: Command, write_config: Any, folder: Path) -> None:
    few = "--reconstruction", "4"
    check_refused(hookdiff("data", write_config(), *few), "--reconstruction", "[data.encode.image]")
    latents = "data", folder / "latents.toml"
    check_refused(hookdiff(*latents, *few, "--features", "incption"), "--features", "'incption'", "'inception'")
    check_refused(hookdiff(*latents, "--features", "inception"), "--features", "--reconstruction")
    check_refused(hookdiff(*latents, *few, "--out", "a.png"), "--reconstruction", "--out")
    vae = diffusers.AutoencoderKL.from_pretrained(folder / "vae")
    vae.decoder.conv_out.bias.data.fill_(torch.nan)
    vae.save_pretrained(folder / "vae")
    check_refused(hookdiff(*latents, *few, *FEATURES), "data.encode.image", "00.png", "finite")


WEIGHTS = "vae/diffusion_pytorch_model.safetensors"
SPOILED: dict[str, Callable[[Path], object]] = {
    "no config": lambda folder: (folder / "vae" / "config.json").unlink(),
    "UNet2DModel": lambda folder: edit_config(folder, _class_name="UNet2DModel"),
    "AutoencoderKLWan": lambda folder: edit_config(folder, _class_name="AutoencoderKLWan"),
    "no weights": lambda folder: (folder / WEIGHTS).unlink(),
    "pickled": lambda folder: (folder / WEIGHTS).rename((folder / WEIGHTS).with_suffix(".bin")),
}


@FEW_PICTURES
@pytest.mark.parametrize(
    ("how", "settings", "facts"),
    [
        ("no folder", ["data.encode.image.path=nowhere"], ("nowhere",)),
        ("no config", [], ("config.json",)),
        ("UNet2DModel", [], ("UNet2DModel", "AutoencoderKL")),
        ("AutoencoderKLWan", [], ("AutoencoderKLWan", "AutoencoderKL")),
        ("no weights", [], ("vae", "safetensors")),
        ("pickled", [], ("safetensors", "diffusion_pytorch_model.bin", "pickle")),
        ("a side", ["data.image_size=30"], ("data.encode.image", "image_size", 4, "28", "32")),
        ("grey", ["data.channels=1"], ("3 channels", "data.channels = 3")),
    ],
)
def test_what_cannot_encode_the_pictures_is_refused_at_once(folder: Path, how: str, settings: Any, facts: Any) -> None:
    if how in SPOILED:
        SPOILED[how](folder)
    with refused(UserError, *facts):
        build_feed(load_config(folder / "latents.toml", settings=settings))
    assert not [*folder.glob("cache/encoded/*/about.json")]


NETWORKS = {
    "unet": """
use = "diffusers:UNet2DModel"
block_out_channels = [8, 16]
down_block_types = ["DownBlock2D", "DownBlock2D"]
up_block_types = ["UpBlock2D", "UpBlock2D"]
layers_per_block = 1
norm_num_groups = 4
""",
    "dit": """
use = "diffusers:DiTTransformer2DModel"
num_attention_heads = 2
attention_head_dim = 8
num_layers = 1
num_embeds_ada_norm = 1000
""",
}
DDIM = ("diffusion.process=ddpm", "sampling.sampler=ddim")
GUIDED, FEW = "sampling.guidance.scale=2.5", "model.num_embeds_ada_norm=2"
OWN_SCALE = "data.encode.image.scale=model"
NO_CONVOLUTIONS = {"use_quant_conv": False, "use_post_quant_conv": False, "scaling_factor": 3.0}
MOMENTS = {"latents_mean": [0.1, 0.2, 0.3, 0.4], "latents_std": [0.2, 0.3, 0.4, 0.5]}


class OfMine(PictureEncoder):
    """Fields of 2 x 2 pixels; it cannot be exported."""

    def digest(self) -> str:
        return "of mine"

    def open(self, device: torch.device) -> Any:
        return self

    def encode(self, pictures: torch.Tensor) -> Any:
        return torch.nn.functional.avg_pool2d(pictures, 2), None

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.interpolate(latents, scale_factor=2)


def edit_config(folder: Path, **keys: Any) -> None:
    """Set keys of the autoencoder's config.json; a key that is `...` is left out."""
    path = folder / "vae" / "config.json"
    config = {**json.loads(path.read_text()), **keys}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


@FEW_PICTURES
@pytest.mark.parametrize(
    ("save", "keys", "mean", "std", "factor"),
    [
        (save_autoencoder, {"scaling_factor": ...}, 0.0, 1.0, 0.18215),
        (save_autoencoder, {"scaling_factor": 2.0, "shift_factor": 0.5}, 0.5, 1.0, 2.0),
        (save_autoencoder, {**MOMENTS, "scaling_factor": 0.5, "shift_factor": 0.3}, *MOMENTS.values(), 0.5),
        (save_autoencoder, {**MOMENTS, "scaling_factor": ...}, *MOMENTS.values(), 0.18215),
        (save_autoencoder, {"latents_mean": [1, 2, 3, 4], "shift_factor": 0.5}, [1, 2, 3, 4], 1.0, 0.18215),
        (save_autoencoder, {"latents_std": [1, 2, 3, 4], "shift_factor": 0.5}, 0.5, [1, 2, 3, 4], 0.18215),
        (save_tiny, {"scaling_factor": ..., "shift_factor": ...}, 0.0, 1.0, 1.0),
        (save_tiny, {**MOMENTS, "shift_factor": 0.2}, 0.2, 1.0, 3.0),  # its class has no latents_mean
        (save_dc, {"scaling_factor": ...}, 0.0, 1.0, 1.0),
        (save_dc, {"scaling_factor": 0.41407, "shift_factor": 0.2}, 0.0, 1.0, 0.41407),  # nor this one a shift
    ],
)
def test_the_scale_of_a_model_is_that_of_pipelines(
    folder: Path, save: Callable[[Path], None], keys: dict[str, Any], mean: Any, std: Any, factor: float
) -> None:
    save(folder / "vae")
    edit_config(folder, **keys)
    scale = build_feed(load_config(folder / "latents.toml", settings=[OWN_SCALE])).reader.scale(torch.arange(4))
    x = torch.randn(2, 4, 8, 8)
    center, width, ours, own_width = (torch.as_tensor(one).view(-1, 1, 1) for one in (mean, std, *scale))
    torch.testing.assert_close((x - ours) / own_width, (x - center) * factor / width)


@FEW_PICTURES
@pytest.mark.parametrize(
    ("key", "value", "num"),
    [
        ("scaling_factor", None, 1),
        ("scaling_factor", 0, 1),
        ("scaling_factor", "0.18", 1),
        ("shift_factor", [0.1, 0.2], 1),
        ("latents_mean", [0.1, 0.2], 4),
        ("latents_mean", [[0.1, 0.2, 0.3, 0.4]], 4),
        ("latents_std", [1, 1, 1, -1], 4),
        ("latents_std", [1, 1, 1, float("nan")], 4),
    ],
)
def test_a_scale_that_is_none_is_refused(folder: Path, key: str, value: Any, num: int) -> None:
    edit_config(folder, **{key: value})
    feed = build_feed(load_config(folder / "latents.toml", settings=[OWN_SCALE]))
    with refused(UserError, "config.json", key, f"expected {num}"):
        feed.reader.scale(torch.arange(4))


@FEW_PICTURES
def test_a_resume_keeps_its_scale_and_says_so(succeed: Succeed, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = ("--set", OWN_SCALE, "--set", "diffusion.data_mean=0", "--set", "diffusion.data_std=1")
    succeed("run", folder / "latents.toml", "--out", folder / "run", "--plugins", "no:fid", *before)
    caplog.clear()
    succeed("resume", folder / "run", "--steps", "5", "--trust")
    check_facts(caplog.text, "data_std", "5.48998")  # 1 / 0.18215
    written = tomllib.loads((folder / "run" / "config.toml").read_text())
    assert written["diffusion"]["data_std"] in (1, [1])


@pytest.fixture
def export(folder: Path, hookdiff: Command, succeed: Succeed) -> Command:
    """Return a function that trains a network on latents and exports it, without the data, to the folder `out`."""

    def made(network: str, *settings: str) -> Any:
        config, pictures = folder / "latents.toml", folder / "pictures"
        text = CONFIG.format(folder=folder).partition("[model]")[0].replace(', "ema", "fid"', "")
        config.write_text(text + "[model]" + NETWORKS[network] + "[sampling]\nsteps = 4\n")
        for index, picture in enumerate(sorted(pictures.glob("*.png"))):
            place = pictures / ("ant", "bee, wasp")[index % 2]
            place.mkdir(exist_ok=True)
            picture.rename(place / picture.name)
        words = [word for setting in settings for word in ("--set", setting)]
        succeed("run", config, "--out", folder / "run", *words)
        pictures.rename(folder / "gone")
        return hookdiff("export", folder / "run", folder / "out", "--to", "diffusers", "--trust")

    return made


# NumPy 2 warns of a tensor that becomes an array, as the schedulers do it.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning")
@FEW_PICTURES
@pytest.mark.parametrize(
    ("network", "settings", "autoencoder", "pipeline"),
    [
        ("dit", (*DDIM, FEW, OWN_SCALE), None, "DiTPipeline"),  # None: a tiny one
        *wide(
            ("unet", DDIM, {}, "LDMPipeline"),
            ("unet", ("sampling.sampler=euler",), {}, None),
            ("dit", (*DDIM, GUIDED), {}, "DiTPipeline"),
            ("dit", (*DDIM, FEW, GUIDED), {}, None),  # its pipeline would look for class 1000
            ("unet", (*DDIM, OWN_SCALE), {**NO_CONVOLUTIONS, "shift_factor": 0.2}, None),
            ("unet", (*DDIM, OWN_SCALE), {**NO_CONVOLUTIONS, **MOMENTS}, None),
            ("unet", (*DDIM, OWN_SCALE), {**NO_CONVOLUTIONS, "latents_mean": MOMENTS["latents_mean"]}, None),
        ),
    ],
)
def test_an_export_to_diffusers_makes_the_pictures_of_the_run(
    export: Command, folder: Path, network: str, settings: Any, autoencoder: Any, pipeline: str | None
) -> None:
    if autoencoder is None:
        save_tiny(folder / "vae")
    elif autoencoder:
        save_autoencoder(folder / "vae", **autoencoder)
    out, labels = output(export(network, *settings)), [0, 1, 1]
    index = folder / "out" / "model_index.json"
    assert (json.loads(index.read_text())["_class_name"] if index.exists() else None) == pipeline
    with load_run(folder / "run", trust=True) as run:
        ours = run.sample(3, labels=labels if network == "dit" else None)
    assert ours.std() > 0.02
    torch.testing.assert_close(called(diffusers, out, labels, 4, 8, 8), ours, rtol=0, atol=1e-4)
    if pipeline == "DiTPipeline":
        opened = diffusers.DiffusionPipeline.from_pretrained(folder / "out", local_files_only=True)
        assert opened.labels == {"ant": 0, "bee": 1, "wasp": 1}


@FEW_PICTURES
def test_the_autoencoder_of_an_export_has_the_scale_in_its_weights(export: Command, folder: Path) -> None:
    out = output(export("unet", "sampling.sampler=euler"))
    check_facts(out, "vae.decode(x)")
    vae = diffusers.AutoencoderKL.from_pretrained(folder / "out" / "vae", local_files_only=True)
    assert (vae.config.scaling_factor, vae.config.shift_factor) == (1, None)
    with load_run(folder / "run", trust=True) as run, torch.no_grad():
        diffusion, codec = run.loop.objective, run.loop.feed.codec
        assert len(diffusion.data_std) == 4
        latents, pictures = torch.randn(4, 4, 8, 8), torch.rand(4, 3, 32, 32) * 2 - 1
        decoded = codec.decode(diffusion.denormalize(latents))
        torch.testing.assert_close(vae.decode(latents).sample, decoded, rtol=0, atol=1e-5)
        found, (mean, std) = vae.encode(pictures).latent_dist, codec.network.encode(pictures)
        torch.testing.assert_close(found.mean, diffusion.normalize(mean), rtol=0, atol=1e-5)
        width = diffusion.normalize(mean + std) - diffusion.normalize(mean)
        torch.testing.assert_close(found.std, width, rtol=1e-5, atol=1e-5)


@FEW_PICTURES
@pytest.mark.parametrize(
    ("kind", "facts"),
    [
        ("tiny", ("AutoencoderTiny", "quant_conv", 'scale = "model"')),
        *wide(
            ("no convolutions", ("AutoencoderKL", "quant_conv", 'scale = "model"')),
            ("of mine", ("data.encode.image", "OfMine", "--to safetensors")),
        ),
    ],
)
def test_an_encoder_that_cannot_hold_a_scale_is_refused(export: Command, folder: Path, kind: str, facts: Any) -> None:
    settings = ["sampling.sampler=euler"]
    if kind == "tiny":
        save_tiny(folder / "vae")
    elif kind == "no convolutions":
        save_autoencoder(folder / "vae", **NO_CONVOLUTIONS)
    else:
        settings.append(f"data.encode.image.use={__name__}:OfMine")
    check_refused(export("unet", *settings), *facts)
    assert not (folder / "out").exists()
