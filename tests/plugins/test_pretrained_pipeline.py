"""What the folder of a pipeline says about a config: process, prediction, sampling, encoders and conditions."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from hookdiff import ConfigError, build_loop, hookimpl, load_config
from hookdiff.diffusion import DDIM, VP, Flow, Leading, Shifted, Trailing
from hookdiff.testing.compare import assert_same
from hookdiff_checkpoint import read_checkpoint
from tests.conftest import Command, Succeed, check_facts, check_refused, output, refused, warnings
from tests.whole_pipelines import BETAS, SD, save_pictures, save_whole

diffusers = pytest.importorskip("diffusers", reason="needs hookdiff[diffusers]")
pytest.importorskip("transformers", reason="needs hookdiff[text]")

CONFIG: dict[str, dict[str, Any]] = {
    "run": {"steps": 2, "batch_size": 4, "device": "cpu", "plugins": ["lora", "checkpoint"]},
    "data": {"source": "folder", "path": "pictures", "caption": "a red disc", "cache_dir": "cache"},
    "model": {"use": "pretrained", "path": "base"},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_whole(SD, folder / "base")
    save_pictures(folder / "pictures")
    return folder


@pytest.fixture
def here(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a pipeline, pictures and a config, as the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("base", "pictures"):
        Path(name).symlink_to(saved / name)
    Path("c.toml").write_text(tomli_w.dumps(CONFIG))
    return tmp_path


def with_scheduler(scheduler: Any) -> None:
    """Let the pipeline in `base` have another scheduler."""
    if (base := Path("base")).is_symlink():
        saved = base.resolve()
        base.unlink()
        base.mkdir()
        for part in saved.iterdir():
            if part.name != "scheduler":
                (base / part.name).symlink_to(part)
    scheduler.save_config("base/scheduler")


def test_a_config_takes_over_what_it_leaves_open(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = load_config("c.toml")
    table = config.resolved()
    assert table["diffusion"]["process"]["schedule"] == {"use": "scaled_linear", **dict(list(BETAS.items())[1:])}
    assert table["diffusion"]["prediction"] == {"use": "epsilon"}
    assert table["diffusion"]["conditions"] == {"encoder_hidden_states": "text"}
    assert table["data"]["encode"]["image"]["path"] == "base/vae"
    assert table["data"]["encode"]["image"]["scale"] == "model"
    assert table["data"]["encode"]["text"]["use"] == "pipeline"
    sampling = config.sampling.build()
    assert (sampling.sampler, sampling.spacing) == (DDIM(), Trailing())
    assert set(config.filled) >= {"diffusion.process", "sampling.sampler", "data.encode"}
    Path("d.toml").write_text(tomli_w.dumps(table))  # what a run writes is read again
    assert load_config("d.toml").resolved() == table
    assert load_config("d.toml").filled == ()
    assert not warnings(caplog)


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        (("data.encode.image.scale=measured",), ("data.encode.image.scale", "measured", "model")),
        (("diffusion.prediction=v_prediction",), ("diffusion.prediction", "v_prediction", "epsilon")),
        (("diffusion.process=ddpm",), ("diffusion.process", "ddpm", "scaled_linear")),
        (("diffusion.process.use=vp", "diffusion.process.schedule=scaled_linear"), ()),
        (("sampling.sampler=heun", "sampling.spacing=leading"), ()),
        (("data.encode.text.length=8",), None),
    ],
)
def test_a_contradiction_is_a_warning(
    here: Path, settings: tuple[str, ...], warned: tuple[str, ...] | None, hookdiff: Command, caplog: Any
) -> None:
    if warned is None:  # what the pipeline cannot use is refused as always
        check_refused(hookdiff("run", "c.toml", "--set", *settings), "data.encode", "length")
        return
    table = load_config("c.toml", settings=settings).resolved()
    for setting in settings:
        key, _, value = setting.partition("=")
        *path, last = key.split(".")
        inner: Any = table
        for name in path:
            inner = inner[name]
        assert inner[last] == value or inner[last]["use"] == value
    texts = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(texts) == bool(warned)
    for text in texts:
        check_facts(text, *warned)


def test_check_marks_the_keys_that_the_model_sets(here: Path, succeed: Succeed) -> None:
    said = succeed("check", "c.toml")
    assert 'use = "scaled_linear"  # of the model' in said
    assert 'caption = "a red disc"  # set' in said


SCHEDULERS: list[tuple[str, dict[str, Any], Any, Any, int]] = [
    ("DDIMScheduler", {**BETAS, "set_alpha_to_one": False, "steps_offset": 1}, DDIM(final="first"), Leading(1), 0),
    ("DDIMScheduler", {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}, DDIM(), Leading(), 0),
    ("EulerDiscreteScheduler", {**BETAS, "timestep_spacing": "leading", "steps_offset": 1}, None, Leading(1), 0),
    ("EulerDiscreteScheduler", {**BETAS, "use_karras_sigmas": True}, None, Trailing(), 2),
    ("DPMSolverMultistepScheduler", {"beta_schedule": "squaredcos_cap_v2"}, None, Trailing(), 1),
    ("DDPMScheduler", {"beta_schedule": "sigmoid", "timestep_spacing": "trailing"}, None, Trailing(), 0),
    ("PNDMScheduler", {**BETAS, "steps_offset": 1}, DDIM(final="first"), Leading(1), 1),
    ("UniPCMultistepScheduler", {"timestep_spacing": "trailing"}, DDIM(), Trailing(), 1),
]


@pytest.mark.parametrize(("kind", "options", "sampler", "spacing", "num_warnings"), SCHEDULERS)
def test_a_scheduler_gives_process_and_sampling(
    here: Path, kind: str, options: Any, sampler: Any, spacing: Any, num_warnings: int, caplog: Any
) -> None:
    scheduler = getattr(diffusers, kind)(**options)
    with_scheduler(scheduler)
    config = load_config("c.toml")
    diffusion, sampling = config.diffusion.build(), config.sampling.build()
    assert isinstance(diffusion.process, VP)
    theirs = scheduler.alphas_cumprod.double()
    torch.testing.assert_close(diffusion.process.tables.alphas_cumprod, theirs, rtol=1e-4, atol=1e-6)
    assert diffusion.prediction.use == scheduler.config.prediction_type
    assert sampling.spacing == spacing
    assert sampler in (None, sampling.sampler)
    assert len(warnings(caplog)) == num_warnings


def test_a_pipeline_may_move_and_not_change(here: Path, saved: Path, succeed: Succeed, hookdiff: Command) -> None:
    succeed("run", "c.toml", "--out", "whole")
    succeed("run", "c.toml", "--out", "run", "--steps", "1")
    Path("base").unlink()
    shutil.copytree(saved / "base", "moved")
    check_refused(hookdiff("resume", "run", "--steps", "2"), "model.path", "base")
    moved = ("--set", "model.path=moved")
    succeed("resume", "run", "--steps", "2", *moved)
    checkpoints = [read_checkpoint(Path(name, "checkpoints", "step-00000002")) for name in ("whole", "run")]
    assert_same(checkpoints[1]["model"], checkpoints[0]["model"])
    succeed("sample", "run", "--num", "1", "--prompt", "a red disc", "--out", "s.png", *moved)
    succeed("export", "run", "whole.safetensors", *moved)
    weights = Path("moved/unet/diffusion_pytorch_model.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    for words in (("resume", "run", "--steps", "3"), ("sample", "run"), ("export", "run", "x.safetensors")):
        check_refused(hookdiff(*words, *moved), "model.path", "digest")


def test_a_flow_samples_with_the_shift_of_its_scheduler(here: Path) -> None:
    with_scheduler(diffusers.FlowMatchEulerDiscreteScheduler(shift=2.5))
    config = load_config("c.toml")
    assert config.diffusion.build().process == Flow(shift=2.5)
    assert config.sampling.build().spacing == Shifted(2.5)


def test_the_betas_of_an_export_are_known_again(here: Path) -> None:
    betas = diffusers.DDIMScheduler(**BETAS).betas.tolist()
    with_scheduler(diffusers.DDIMScheduler(trained_betas=betas, clip_sample=False))
    assert load_config("c.toml").diffusion.build().process.schedule.use == "scaled_linear"
    with_scheduler(diffusers.DDIMScheduler(trained_betas=[0.1, 0.2, 0.9]))
    with refused(ConfigError, "diffusion.process", "scheduler_config.json", "betas"):
        load_config("c.toml")
    assert load_config("c.toml", settings=["diffusion.process=vp"]).diffusion.build().prediction.use == "epsilon"


def test_a_base_in_bf16_trains_adapters_in_float32(here: Path, hookdiff: Command, caplog: Any) -> None:
    bf16 = "model.precision=bf16"
    losses = []
    for name, plugins, settings in (("f", (), ()), ("b", ("amp",), (bf16,))):
        with build_loop(load_config("c.toml", plugins, settings), here / name) as loop:
            losses += [step.loss for step in loop.steps()]
    dtypes = {(weight.dtype, weight.requires_grad) for weight in loop.model.parameters()}
    assert dtypes == {(torch.bfloat16, False), (torch.float32, True)}
    assert losses[2:] == pytest.approx(losses[:2], rel=0.02)
    assert losses[2:] != losses[:2]
    check_facts(output(hookdiff("sample", "b", "--num", "2", "--prompt", "a red disc", "--out", "b.png")), "b.png")
    for words, facts in (
        (("--plugins", "lora"), ("'amp'",)),
        (("--plugins", "amp", "--plugins", "no:lora"), ("model.precision", "trains in bfloat16", "lora")),
        (("--plugins", "amp", "--set", "sampling.precision=float32"), ("sampling.precision", "'float32'", "bf16")),
        (("--plugins", "amp", "--set", "plugins.amp.precision=fp16"), ("plugins.amp.precision", "'fp16'", "bf16")),
    ):
        result = hookdiff("run", "c.toml", "--out", "bad", "--set", bf16, *words)
        check_refused(result, *facts)
        check_facts(result[2], *facts)


class Seen:
    """Keeps the batches of a run, and the losses."""

    def __init__(self) -> None:
        self.batches: list[Any] = []

    @hookimpl
    def before_step(self, batch: Any) -> None:
        self.batches.append(batch)


@pytest.mark.wide
def test_a_whole_network_trains_as_a_loop_of_diffusers(here: Path) -> None:
    """The loop gets the latents, noise and texts of the run."""
    seen, options = Seen(), {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.01, "eps": 1e-8}
    settings = [
        "run.steps=20",
        "run.attention=kernel",
        "optimizer.use=adamw",
        "optimizer.lr=1e-3",
        "diffusion.weighting=uniform",
    ]
    config = load_config("c.toml", ["no:lora"], [*settings, "diffusion.label_dropout=0", "optimizer.no_decay=[]"])
    with build_loop(config, here / "run", plugins={"seen": seen}) as loop:
        losses = [step.loss for step in loop.steps()]
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained("base")
    unet, scheduler = pipeline.unet.train(), diffusers.DDPMScheduler.from_config(pipeline.scheduler.config)
    optimizer = torch.optim.AdamW(unet.parameters(), **options)
    theirs = []
    for batch in seen.batches:
        noise, timesteps = batch.draws["noise"], batch.draws["timesteps"]
        noisy = scheduler.add_noise(batch.inputs * pipeline.vae.config.scaling_factor, noise, timesteps)
        output = unet(noisy, timesteps, batch.conditions["text"]).sample
        loss = torch.nn.functional.mse_loss(output, noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        theirs.append(loss.item())
    assert losses[0] == pytest.approx(theirs[0], rel=1e-6)
    assert losses[19] == pytest.approx(theirs[19], rel=1e-6)
