"""Compare a run on latents and captions with diffusers: its loss, its pictures, and its export to a pipeline."""

import json
import re
import shutil
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hookdiff import InMemory, SampleRequest, build_loop, load_config, load_run
from hookdiff.encoding import TextEncoder
from tests.conftest import check_facts, check_refused, output, write_small
from tests.plugins.test_autoencoder import save_autoencoder
from tests.plugins.test_text import save_encoder
from tests.plugins.test_text_pipeline import SD3_MODEL, save_pipeline

diffusers = pytest.importorskip("diffusers", reason="needs hookdiff[diffusers]")
transformers = pytest.importorskip("transformers", reason="needs hookdiff[text]")
pytestmark = [
    pytest.mark.slow,
    # NumPy 2 warns of a tensor that becomes an array, as the schedulers do it.
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"),
]

UNET = {
    "use": "diffusers:UNet2DConditionModel",
    "block_out_channels": [8, 16],
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "cross_attention_dim": 64,
    "attention_head_dim": 4,
}
LINEAR = {
    "process": {"use": "vp", "schedule": "scaled_linear"},
    "prediction": "epsilon",
    "weighting": "uniform",
    "conditions": {"encoder_hidden_states": "text"},
}
JOINED = {"encoder_hidden_states": "text", "pooled_projections": "text_pooled"}
SAMPLING = {"steps": 20, "guidance": {"scale": 3.0}}
NETWORKS: dict[str, dict[str, Any]] = {
    "unet": {
        "model": UNET,
        "diffusion": LINEAR,
        "sampling": {"sampler": "ddim", "spacing": "trailing", "clipping": "none", **SAMPLING},
    },
    "sd3": {
        "model": SD3_MODEL,
        "diffusion": {"process": "flow", "conditions": JOINED},
        "sampling": {"sampler": "euler", **SAMPLING},
    },
}
PROMPTS = ["a red disc", "a blue ring", "a small unheard square"]
TOLERANCE = 0.2 / 255  # of pictures in [0, 1]


def drawings() -> InMemory:
    """Return pictures with captions, and with the sizes that SDXL takes."""
    images = torch.randint(256, (12, 3, 32, 32), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    sizes = torch.tensor([32.0, 32, 0, 0, 32, 32]).expand(12, 6)
    return InMemory(images, texts={"text": [[PROMPTS[k % 2]] for k in range(12)]}, conditions={"sizes": sizes})


class Mine(TextEncoder):
    """An encoder of texts that cannot be exported."""

    def digest(self) -> str:
        return "mine"

    def open(self, device: torch.device) -> Any:
        return self

    def encode(self, texts: Sequence[str]) -> dict[str, Tensor]:
        return {"": torch.tensor([len(text) / 10 for text in texts]).view(-1, 1, 1).expand(-1, 2, 64)}

    def lengths(self, texts: Sequence[str]) -> list[int]:
        return [2] * len(texts)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a small autoencoder and text encoders with random weights, and a config of each network."""
    save_autoencoder(tmp_path / "vae", scaling_factor=3.0)
    for kind in ("CLIPTextModel", "T5EncoderModel"):
        save_encoder(kind, tmp_path)
    config = json.loads((tmp_path / "CLIPTextModel" / "config.json").read_text())
    shutil.copytree(tmp_path / "CLIPTextModel", tmp_path / "masked")
    (tmp_path / "masked" / "config.json").write_text(json.dumps({**config, "use_attention_mask": True}))
    image = {"use": "autoencoder", "path": str(tmp_path / "vae")}
    encode = {"image": image, "text": {"use": "text", "path": str(tmp_path / "CLIPTextModel")}}
    data = {"source": f"{__name__}:drawings", "cache_dir": str(tmp_path / "cache"), "encode": encode}
    run = {"steps": 20, "batch_size": 6, "plugins": ["checkpoint"]}
    for name, network in NETWORKS.items():
        write_small(tmp_path / f"{name}.toml", run=run, data=data, optimizer={"lr": 0.003}, **network)
    return tmp_path


def of_pipeline(kind: str) -> tuple[str, str]:
    """Return the settings of an encoder that is the text side of a pipeline."""
    return "data.encode.text.use=pipeline", f"data.encode.text.path={{folder}}/{kind}"


SD3 = (*of_pipeline("StableDiffusion3Pipeline"), "data.encode.text.length=10")


def prepared(folder: Path, settings: Sequence[str]) -> list[str]:
    """Return `settings` with the folder in them; the pipelines of which they take the text side are saved there."""
    for kind in re.findall(r"\{folder\}/(\w+Pipeline)", " ".join(settings)):
        save_pipeline(kind, folder / kind)
    return [setting.replace("{folder}", str(folder)) for setting in settings]


def as_kept(values: Tensor) -> Tensor:
    """Return what encoders have made as the run keeps it."""
    return values.half().float()


def latents_of(folder: Path, batch: Any) -> Tensor:
    """Return the latents of a batch, as a training script of diffusers makes them."""
    vae = diffusers.AutoencoderKL.from_pretrained(folder / "vae").eval()
    pictures = drawings().images[batch.indices] / 127.5 - 1
    latents: Tensor = as_kept(vae.encode(pictures).latent_dist.mean) * vae.config.scaling_factor
    return latents


def step_of_sd(folder: Path, loop: Any, batch: Any, captions: list[str]) -> Tensor:
    """Return the loss of a training step of Stable Diffusion, as diffusers' own example computes it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "CLIPTextModel")
    encoder = transformers.CLIPTextModel.from_pretrained(folder / "CLIPTextModel").eval()
    prediction = loop.objective.prediction.use
    betas = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
    scheduler = diffusers.DDPMScheduler(**betas, prediction_type=prediction)
    noise, timesteps = batch.draws["noise"], batch.draws["timesteps"]
    latents = latents_of(folder, batch)
    ids = tokenizer(captions, padding="max_length", max_length=12, truncation=True, return_tensors="pt").input_ids
    noisy = scheduler.add_noise(latents, noise, timesteps)
    output = loop.model(noisy, timesteps, as_kept(encoder(ids)[0]))
    target = noise if prediction == "epsilon" else scheduler.get_velocity(latents, noise, timesteps)
    return torch.nn.functional.mse_loss(output, target)


def step_of_sd3(folder: Path, loop: Any, batch: Any, captions: list[str]) -> Tensor:
    """Return the loss of a training step of Stable Diffusion 3, likewise."""
    pipeline = save_pipeline("StableDiffusion3Pipeline", folder / "StableDiffusion3Pipeline")  # the same as before
    noise, sigma = batch.draws["noise"], batch.draws["timesteps"].view(-1, 1, 1, 1)
    latents = latents_of(folder, batch)
    text, _, pooled, _ = map(as_kept, pipeline.encode_prompt(captions, None, None, "cpu", max_sequence_length=10))
    noisy = (1 - sigma) * latents + sigma * noise
    output = loop.model(noisy, timestep=sigma.flatten() * 1000, encoder_hidden_states=text, pooled_projections=pooled)
    return torch.nn.functional.mse_loss(output, noise - latents)


@pytest.mark.parametrize(
    ("network", "step", "settings"),
    [("unet", step_of_sd, ()), ("unet", step_of_sd, ("diffusion.prediction=v_prediction",)), ("sd3", step_of_sd3, SD3)],
)
def test_the_loss_is_that_of_diffusers(folder: Path, network: str, step: Any, settings: Sequence[str]) -> None:
    usual = ("data.encode.image.scale=model", "data.encode.image.posterior=mean", "diffusion.label_dropout=0.5")
    config = load_config(folder / f"{network}.toml", settings=prepared(folder, (*settings, *usual)))
    with build_loop(config, folder / "run") as loop:
        batch = next(loop.feed.batches(0))
        batch = loop.objective.draw(batch, torch.Generator().manual_seed(0))
        ours = loop.objective(loop.model, batch).loss
        dropped = (batch.draws["text"] != batch.conditions["text"]).flatten(1).any(1)
        assert 0 < dropped.sum() < 6
        captions = loop.feed.reader.texts_of(batch.indices)["text"]
        captions = ["" if gone else caption for caption, gone in zip(captions, dropped.tolist(), strict=True)]
        with torch.no_grad():
            theirs = step(folder, loop, batch, captions)
            ours = ours.detach()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.fixture
def export(folder: Path, hookdiff: Callable[..., Any], succeed: Callable[..., str]) -> Callable[..., Any]:
    """Return a function that trains a network with settings, and exports the run to the folder `out`."""

    def made(network: str, *settings: str) -> Any:
        words = [word for setting in prepared(folder, settings) for word in ("--set", setting)]
        succeed("run", folder / f"{network}.toml", "--out", folder / "run", *words)
        return hookdiff("export", folder / "run", folder / "out", "--to", "diffusers", "--trust")

    return made


def drawn(pipeline: Any, arguments: str) -> Tensor:
    """Return what a call of a pipeline draws of the prompts, from the noise of `hookdiff sample`: n c h w."""
    pipeline.set_progress_bar_config(disable=True)
    noise = SampleRequest(len(PROMPTS)).generators()
    names = {"pipeline": pipeline, "prompts": PROMPTS, "noise": noise}
    made = eval(f"pipeline({arguments}, generator=noise, output_type='np')", names).images
    return torch.from_numpy(made).permute(0, 3, 1, 2)


def called(out: str) -> Tensor:
    """Return the pictures that the code draws which was printed: n c h w, in [0, 1]."""
    kinds = re.findall(r"\b([A-Z]\w+)[.(]", out)
    names = {kind: getattr(diffusers, kind, getattr(transformers, kind, None)) for kind in kinds}
    if "in a loop of your own" not in out:
        opened, _, arguments = out.splitlines()[1].strip().removesuffix(")").partition(")(")
        return drawn(eval(f"{opened}, local_files_only=True)", names), arguments)
    noise = torch.stack([torch.randn(4, 8, 8, generator=one) for one in SampleRequest(len(PROMPTS)).generators()])
    names |= {"torch": torch, "prompts": PROMPTS, "noise": noise}
    names["conditions"] = {"sizes": drawings().conditions["sizes"][:3]}
    with torch.no_grad():
        exec(textwrap.dedent("\n".join(out.splitlines()[2:])), names)
    pictures: Tensor = names["pictures"]
    return pictures / 2 + 0.5


def assert_draws_as_the_run(out: str, folder: Path) -> Tensor:
    """Assert that the printed code draws the pictures of the run, which depend on the prompts; return them."""
    with load_run(folder / "run", trust=True) as run:
        ours = run.sample(3, prompts=PROMPTS) / 2 + 0.5
        others = run.sample(3, prompts=PROMPTS[::-1]) / 2 + 0.5
    assert (ours - others).abs().max() > 4 * TOLERANCE
    torch.testing.assert_close(called(out), ours, rtol=0, atol=TOLERANCE)
    return ours


PIPELINES = [
    (),
    ("diffusion.prediction=v_prediction", "data.encode.text.length=8"),
    (*of_pipeline("StableDiffusionPipeline"), "sampling.sampler=dpmpp_2m", "sampling.steps=10"),
    ("data.encode.text.mask=true", "sampling.sampler={ use = 'ddim', eta = 0.5 }"),
    ("data.encode.text.path={folder}/masked", "data.encode.text.attend=tokens"),
    ("sampling.sampler=ddpm", "sampling.guidance.scale=1"),
]


@pytest.mark.parametrize("settings", PIPELINES)
def test_an_export_is_a_pipeline_that_draws_as_the_run(export: Any, folder: Path, settings: Sequence[str]) -> None:
    out = output(export("unet", *settings))
    check_facts(out, "StableDiffusionPipeline.from_pretrained")
    ours = assert_draws_as_the_run(out, folder)
    assert not [*(folder / "out").rglob("*.bin")]
    if not settings:
        betas = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
        rest = {"clip_sample": False, "steps_offset": 1, "timestep_spacing": "trailing"}
        pipeline = diffusers.StableDiffusionPipeline.from_pretrained(folder / "out", local_files_only=True)
        pipeline.scheduler = diffusers.DDIMScheduler(**betas, **rest)
        made = drawn(pipeline, "prompts, guidance_scale=3.0, num_inference_steps=20")
        torch.testing.assert_close(made, ours, rtol=0, atol=TOLERANCE)


SIZED = (
    'diffusion.conditions={ encoder_hidden_states = "text", "added_cond_kwargs.text_embeds" = "text_pooled", '
    '"added_cond_kwargs.time_ids" = "sizes" }',
    "model.addition_embed_type=text_time",
    "model.addition_time_embed_dim=8",
)
MASKED = 'diffusion.conditions={ encoder_hidden_states = "text", encoder_attention_mask = "text_mask" }'
OWN_LOOPS: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
    ("unet", ("data.encode.text.layer=-2",), ("hidden_states[-2]",)),
    (
        "unet",
        ("data.encode.text.pooled=true", *SIZED, "model.projection_class_embeddings_input_dim=112"),
        ("pooler_output", "conditions['sizes']"),
    ),
    ("unet", ("data.encode.text.attend=tokens", "data.encode.text.mask=true", MASKED), ("text_mask",)),
    ("unet", ("data.encode.text.path={folder}/T5EncoderModel", "data.encode.text.length=10"), ("T5EncoderModel",)),
    ("unet", ("data.encode.text.attend=tokens",), ("attention_mask=tokens.attention_mask",)),
    ("unet", ("sampling.guidance.scale=0.5",), ("CLIPTextModel",)),
    ("unet", ("sampling.spacing=leading",), ("CLIPTextModel",)),
    (
        "unet",
        (
            *of_pipeline("StableDiffusionXLPipeline"),
            *SIZED,
            "model.cross_attention_dim=96",
            "model.projection_class_embeddings_input_dim=64",
        ),
        ("text_encoder_2", "conditions['sizes']"),
    ),
    ("unet", (*of_pipeline("SanaPipeline"), MASKED), ("Gemma2Model",)),
    ("sd3", SD3, ("text_encoder_3", "timestep=t")),
]


@pytest.mark.parametrize(("network", "settings", "facts"), OWN_LOOPS)
def test_without_a_pipeline_the_loop_that_is_printed_draws_the_prompts(
    export: Callable[..., Any], folder: Path, network: str, settings: Sequence[str], facts: Sequence[str]
) -> None:
    out = output(export(network, *settings))
    check_facts(out, "in a loop of your own", *facts)
    assert not (folder / "out" / "model_index.json").exists()
    assert_draws_as_the_run(out, folder)


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ([f"data.encode.text.use={__name__}:Mine"], ("data.encode.text", "Mine", "--to safetensors")),
        (
            [
                "data.encode.other.use=text",
                "data.encode.other.path={folder}/CLIPTextModel",
                'diffusion.conditions={ encoder_hidden_states = "text", "added_cond_kwargs.other" = "other" }',
            ],
            ("text, other", "only one", "--to safetensors"),
        ),
    ],
)
def test_encoders_of_texts_that_cannot_be_exported_are_refused(
    export: Callable[..., Any], folder: Path, settings: Sequence[str], facts: Sequence[str]
) -> None:
    check_refused(export("unet", *settings), *facts)
    assert not (folder / "out").exists()
