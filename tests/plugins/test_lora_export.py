"""Adapters of a run draw in diffusers what the run draws, whichever format they are exported to."""

from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from safetensors.torch import load_file
from torch import Tensor

from hookdiff import SampleRequest, build_loop, load_config, load_run
from tests.conftest import Command, Succeed, check_facts, check_refused, output
from tests.whole_pipelines import SANA, SD, SD3, XL, save_pictures, save_whole

diffusers = pytest.importorskip("diffusers", reason="needs hookdiff[lora]")
pytest.importorskip("peft", reason="needs hookdiff[lora]")
pytest.importorskip("transformers", reason="needs hookdiff[text]")
pytestmark = pytest.mark.filterwarnings("ignore")  # of diffusers and peft, about their own code

CONFIG: dict[str, dict[str, Any]] = {
    "run": {"steps": 3, "batch_size": 4, "device": "cpu", "plugins": ["lora", "ema", "checkpoint"]},
    "data": {"source": "folder", "path": "pictures", "caption": "a red disc", "cache_dir": "cache"},
    "model": {"use": "pretrained", "path": "base"},
    "optimizer": {"use": "adamw", "lr": 0.02},
    "sampling": {"steps": 5, "guidance": {"scale": 3.0}},
    "plugins": {"lora": {"rank": 4, "alpha": 8}, "ema": {"decay": 0.5}},
}
PROMPTS = ["a red disc", "a small ring"]
TOLERANCE = 1 / 255
CALLS = {  # the arguments of the pipeline that make the steps of the run
    SD: {"num_inference_steps": 5},
    XL: {"num_inference_steps": 5},
    SD3: {"sigmas": [1 - i / 5 for i in range(5)]},
    SANA: {
        "sigmas": [1 - i / 5 for i in range(5)],
        "use_resolution_binning": False,
        "complex_human_instruction": None,
        "height": 32,
        "width": 32,
    },
}


def prepare(kind: str, folder: Path) -> None:
    save_whole(kind, folder / "base")
    save_pictures(folder / "pictures", side=32 if kind == SANA else 16)
    (folder / "c.toml").write_text(tomli_w.dumps(CONFIG))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a pipeline of Stable Diffusion, and a run that has adapted it."""
    folder = tmp_path_factory.mktemp("trained")
    prepare(SD, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        build_loop(load_config("c.toml"), folder / "run").run()
    return folder


@pytest.fixture
def here(trained: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(trained)
    return tmp_path


def ours(run_dir: str = "run") -> Tensor:
    with load_run(run_dir) as run:
        return run.sample(len(PROMPTS), prompts=PROMPTS) / 2 + 0.5


def drawn(pipeline: Any, **options: Any) -> Tensor:
    pipeline.set_progress_bar_config(disable=True)
    noise = SampleRequest(len(PROMPTS)).generators()
    given = {"guidance_scale": 3.0, "generator": noise, "output_type": "np", "height": 16, "width": 16, **options}
    return torch.from_numpy(pipeline(PROMPTS, **given).images).permute(0, 3, 1, 2)


def run_printed(out: str) -> Any:
    """Run the code that was printed, and return the pipeline, or the network, that it makes."""
    names: dict[str, Any] = {"diffusers": diffusers}
    exec("\n".join(line.strip() for line in out.splitlines()[1:3]), names)
    return names.get("pipeline", names.get("model"))


@pytest.mark.parametrize(("to", "name"), [("lora", "out"), ("kohya", "out.safetensors")])
def test_adapters_draw_in_diffusers_what_the_run_draws(here: Path, hookdiff: Command, to: str, name: str) -> None:
    out = output(hookdiff("export", "run", here / name, "--to", to))
    torch.testing.assert_close(drawn(run_printed(out), **CALLS[SD]), ours(), rtol=0, atol=TOLERANCE)
    [file] = [here / name] if to == "kohya" else (here / name).iterdir()
    assert file.stat().st_size < 1 << 20
    assert all("lora" in key for key in load_file(file))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(drawn(diffusers.DiffusionPipeline.from_pretrained("base"), **CALLS[SD]), ours())


def test_the_whole_network_has_the_adapters_added(here: Path, hookdiff: Command, succeed: Succeed) -> None:
    check_facts(output(hookdiff("export", "run", here / "whole", "--to", "diffusers")), "StableDiffusionPipeline")
    pipeline = diffusers.DiffusionPipeline.from_pretrained(here / "whole")
    torch.testing.assert_close(drawn(pipeline, **CALLS[SD]), ours(), rtol=0, atol=TOLERANCE)
    for part in ("vae", "text_encoder", "tokenizer"):  # untrained parts are copied
        names = sorted(path.name for path in Path("base", part).iterdir())
        assert names == sorted(path.name for path in (here / "whole" / part).iterdir())
        assert all(
            Path("base", part, name).read_bytes() == (here / "whole" / part / name).read_bytes() for name in names
        )
    succeed("export", "run", here / "whole.safetensors")
    tensors = load_file(here / "whole.safetensors")
    base = load_file("base/unet/diffusion_pytorch_model.safetensors")
    assert tensors.keys() == base.keys()
    changed = {name for name in base if not torch.equal(base[name], tensors[name])}
    assert changed == {name for name in base if ".attn" in name and name.endswith(".weight")}
    network = diffusers.UNet2DConditionModel.from_pretrained("base", subfolder="unet")
    network.load_state_dict(tensors)
    given = torch.randn(2, 4, 8, 8), torch.tensor([3, 900]), torch.randn(2, 5, 64)
    with load_run("run") as run, torch.no_grad():
        expected = run.model()(given[0], given[1], encoder_hidden_states=given[2])
        torch.testing.assert_close(network(*given).sample, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (("x", "--to", "lorra"), ("--to lorra", "did you mean", "lora")),
        (("x", "--to", "kohya"), (".safetensors",)),
        (("c.toml", "--to", "lora"), ("c.toml", "no export")),
        (("x.safetensors", "--to", "kohya", "--steps", "5"), ("--steps", "--to diffusers")),
    ],
)
def test_bad_input_is_one_message(
    here: Path, hookdiff: Command, words: tuple[str, ...], facts: tuple[str, ...]
) -> None:
    check_refused(hookdiff("export", "run", *words), *facts)


def test_a_run_without_adapters_has_none_to_export(here: Path, hookdiff: Command, succeed: Succeed) -> None:
    succeed("run", "c.toml", "--out", here / "whole", "--plugins", "no:lora", "--steps", "1")
    for name in ("lora", "kohya"):
        check_refused(hookdiff("export", here / "whole", here / "x.safetensors", "--to", name), f"--to {name}", "lora")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [XL, SD3, SANA])
def test_adapters_of_other_pipelines_draw_what_their_runs_draw(
    kind: str, tmp_path: Path, hookdiff: Command, succeed: Succeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    prepare(kind, tmp_path)
    succeed("run", "c.toml", "--out", "run")
    expected = ours()
    if kind != XL:
        check_refused(
            hookdiff("export", "run", "x.safetensors", "--to", "kohya"),
            "--to kohya",
            "UNet2DConditionModel",
            "--to lora",
        )
    for to, name in (("lora", "out"), *([("kohya", "out.safetensors")] if kind == XL else [])):
        pipeline = run_printed(output(hookdiff("export", "run", name, "--to", to)))
        torch.testing.assert_close(drawn(pipeline, **CALLS[kind]), expected, rtol=0, atol=TOLERANCE)
    others = drawn(diffusers.DiffusionPipeline.from_pretrained("base"), **CALLS[kind])
    assert (others - expected).abs().max() > 2 * TOLERANCE
