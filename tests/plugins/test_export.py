import json
import re
import shutil
import textwrap
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hookdiff import InMemory, Loop, LoopConfig, SampleRequest, UserError, build_loop, evaluating, load_config
from hookdiff.diffusion import DDIM, DDPM, VP, Clamp, Diffusion, Euler, Flow, Sampling, Trailing
from hookdiff.testing.compare import assert_same
from hookdiff_checkpoint.scheduler import equivalent_of
from hookdiff_networks import UNet
from tests.conftest import check_facts, check_refused, output, refused
from tests.plugins.test_samples_sizes import write_pictures

HOOKS = ("prepare_model", "restore", "sample", "offer_weights")
RUN = """
[run]
steps = 6
batch_size = 16
log_every = 6
device = "cpu"
channels_last = false
plugins = ["ema", "checkpoint", "averages_of_mine:Half"]
[data]
source = "digits"
[plugins.ema]
decay = [0.9, 0.1]
[plugins.checkpoint]
every = 2
[sampling]
steps = 4
"""
OURS = """
[model]
use = "unet"
channels = 8
num_res_blocks = 1
head_dim = 8
[diffusion]
prediction = "sample"
"""
THEIRS = """
[model]
use = "diffusers:UNet2DModel"
block_out_channels = [8, 16]
down_block_types = ["DownBlock2D", "AttnDownBlock2D"]
up_block_types = ["AttnUpBlock2D", "UpBlock2D"]
layers_per_block = 1
norm_num_groups = 4
"""
DIT = """
[model]
use = "diffusers:DiTTransformer2DModel"
num_attention_heads = 2
attention_head_dim = 8
num_layers = 1
num_embeds_ada_norm = 10
"""
# A plugin that this project does not know, with an "average" of its own.
MINE = """
from hookdiff import hookimpl

class Half:
    "Offers the half of every weight."

    @hookimpl
    def offer_weights(self, loop):
        return {"half": lambda: {name: value.detach() / 2 for name, value in loop.model.named_parameters()}}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plugin, where configs and runs go."""
    folder = tmp_path_factory.mktemp("export")
    (folder / "averages_of_mine.py").write_text(MINE)
    return folder


@pytest.fixture
def command(place: Path, monkeypatch: pytest.MonkeyPatch, hookdiff: Any) -> Any:
    """Return the command line, which finds and trusts that plugin."""
    monkeypatch.syspath_prepend(place)
    return lambda *words: hookdiff(*words, *(["--trust"] if words[0] == "export" else []))


@pytest.fixture
def trained(place: Path, command: Any) -> Any:
    """Return a function that returns the run directory of a config, and trains it at the first call."""

    def train(name: str, model: str, *settings: str) -> Path:
        config, run = place / f"{name}.toml", place / "runs" / name
        if not run.exists():
            config.write_text(RUN + model)
            output(command("run", config, "--out", run, *(part for s in settings for part in ("--set", s))))
        return run

    return train


def opened(run: Path, *settings: str) -> Loop:
    return build_loop(load_config(run / "config.toml", settings=settings, trust=True), run, resume=True, hooks=HOOKS)


def images(run: Path, num: int, weights: str | None, *settings: str, labels: tuple[int, ...] | None = None) -> Tensor:
    with opened(run, *settings) as loop:
        return loop.sample(SampleRequest(num, weights=weights, labels=labels, raw=True)).images


def plain() -> UNet:
    """Return the model of `OURS`."""
    return UNet(in_channels=1, image_size=8, channels=8, num_res_blocks=1, head_dim=8)


def sampled(model: nn.Module, num: int) -> Tensor:
    """Return images as runs of `OURS` make them."""
    diffusion, noise = Diffusion(prediction="sample"), SampleRequest(num).generators()
    return Sampling(steps=4).sample(model.eval(), diffusion, (1, 8, 8), noise, "cpu")


@pytest.mark.parametrize("weights", [None, "model", "ema", "ema/decay=0.1", "half"])
def test_golden_output_with_the_exact_weights(trained: Any, command: Any, tmp_path: Path, weights: str | None) -> None:
    run, file = trained("ours", OURS), tmp_path / "there" / "out.safetensors"
    code, out, _ = command("export", run, file, *(["--weights", weights] if weights else []))
    name = weights or "ema"
    assert code == 0
    assert out == (
        f"{file}: the {name} weights of step 6\n  model.load_state_dict(safetensors.torch.load_file({str(file)!r}))\n"
    )
    model = plain()
    model.load_state_dict(load_file(file))
    assert torch.equal(sampled(model, 3), images(run, 3, weights))
    with safe_open(file, framework="pt") as opened_file:
        said = opened_file.metadata()
    assert said == {"format": "pt", "hookdiff": said["hookdiff"], "step": "6", "weights": name}
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_one_checkpoint_of_a_run(trained: Any, command: Any, tmp_path: Path) -> None:
    run, file = trained("ours", OURS), tmp_path / "out.safetensors"
    out = output(command("export", run / "checkpoints" / "step-00000004", file, "--weights", "model"))
    check_facts(out, file, "model", 4)
    assert_same(load_file(file), load_file(run / "checkpoints" / "step-00000004" / "model.safetensors"))
    newest = load_file(run / "checkpoints" / "step-00000006" / "model.safetensors")
    assert any(not torch.equal(value, newest[name]) for name, value in load_file(file).items())


def test_the_averages_differ(trained: Any) -> None:
    with opened(trained("ours", OURS)) as loop:
        names = ("model", "ema", "ema/decay=0.1", "half")
        made = [loop.sample(SampleRequest(1, weights=name, raw=True)).images for name in names]
    assert all(not torch.equal(one, other) for k, one in enumerate(made) for other in made[:k])


def test_the_weights_that_the_config_names_are_exported_and_drawn(trained: Any, command: Any, tmp_path: Path) -> None:
    run, values, drawn = shutil.copytree(trained("ours", OURS), tmp_path / "halved"), [], []
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace("[sampling]\n", '[sampling]\nweights = "half"\n'))
    for name in ("", "half", "ema"):
        words = ("--weights", name) if name else ()
        file, archive = tmp_path / f"of-{name}.safetensors", tmp_path / f"of-{name}.npz"
        code, out, error = command("export", run, file, *words)
        assert code == 0, error
        check_facts(out, f"{name or 'half'} weights")
        values.append(load_file(file))
        output(command("sample", run, "--num", "2", "--trust", "--out", archive, *words))
        with numpy.load(archive) as arrays:
            drawn.append(arrays[arrays.files[0]])
    assert_same(values[0], values[1])
    assert (drawn[0] == drawn[1]).all()
    assert (drawn[0] != drawn[2]).any()


def test_weights_from_a_file(trained: Any, command: Any, tmp_path: Path) -> None:
    run, first, second = trained("ours", OURS), tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    output(command("export", run, first, "--weights", "half"))
    output(command("export", run, second, "--weights", first))
    assert_same(load_file(first), load_file(second))
    with safe_open(second, framework="pt") as file:
        assert file.metadata()["weights"] == str(first)


@pytest.mark.wide
def test_an_export_has_the_spectrally_normalised_weights(trained: Any, command: Any, tmp_path: Path) -> None:
    settings = ("run.plugins=['ema', 'spectral', 'checkpoint']", "plugins.spectral.layers=['down*']")
    run, file = trained("spectral", OURS, *settings), tmp_path / "out.safetensors"
    output(command("export", run, file, "--weights", "ema"))
    model, exported = plain(), load_file(file)
    model.load_state_dict(exported)
    with opened(run) as loop, loop.weights("ema"), evaluating(loop.model):
        layers = {name: each for name, each in loop.model.named_modules() if parametrize.is_parametrized(each)}
        assert len(layers) > 2
        for name, layer in layers.items():
            assert torch.equal(exported[f"{name}.weight"], layer.weight)
    assert torch.equal(sampled(model, 2), images(run, 2, "ema"))


def test_an_export_is_replaced_only_if_asked_and_nothing_else_ever(trained: Any, command: Any, tmp_path: Path) -> None:
    run, file, folder = trained("ours", OURS), tmp_path / "out.safetensors", tmp_path / "thesis"
    file.write_text("precious")
    folder.mkdir()
    (folder / "chapter").write_text("precious")
    for arguments in ((file,), (folder, "--to", "diffusers", "--overwrite")):
        check_refused(command("export", run, *arguments), arguments[0], "--overwrite")
    assert (file.read_text(), (folder / "chapter").read_text()) == ("precious", "precious")
    output(command("export", run, file, "--overwrite"))
    assert len(load_file(file)) > 10


def test_an_export_that_cannot_be_made_is_refused(trained: Any, command: Any, tmp_path: Path) -> None:
    run, file, folder = trained("ours", OURS), tmp_path / "out.safetensors", tmp_path / "out"
    untrained, blocked = tmp_path / "untrained", tmp_path / "a file"
    untrained.mkdir()
    (untrained / "config.toml").write_text(RUN + OURS)
    blocked.write_text("")
    for arguments, facts in (
        ((tmp_path, file), (tmp_path, "config.toml")),
        ((untrained, file), (untrained, "checkpoint")),
        ((run, folder), (folder, ".safetensors")),
        ((run, blocked / "out.safetensors"), (blocked / "out.safetensors", "File exists")),
        ((run, file, "--weights", "hlaf"), ("--weights", "'hlaf'", "'half'", "ema/decay=0.1")),
        ((run, file, "--weights", "no.safetensors"), ("weights", "no.safetensors")),
        ((run, file, "--set", "sampling.spacing=karras"), ("sampling.spacing=karras", "--to diffusers")),
        ((run, file, "--steps", 2), ("--steps", "--to diffusers")),
        ((run, file, "--sampler", "ddim"), ("--sampler", "--to diffusers")),
        ((run, folder, "--to", "diffusers", "--set", "model.channels=4"), ("model.channels=4", "[sampling]")),
        ((run, folder, "--to", "diffusers"), ("model.use", "UNet", "--to safetensors")),
    ):
        check_refused(command("export", *arguments), *facts)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a file", "untrained"]


class InDiffusers(nn.Conv2d):
    """Pretends to be of diffusers, which takes long to import."""

    __module__ = "diffusers.models"


def recipe(diffusion: dict[str, Any], sampling: dict[str, Any]) -> Any:
    model = InDiffusers(1, 1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0)
    data, config = InMemory(torch.zeros(4, 1, 4, 4)), LoopConfig(steps=1, batch_size=4)
    sampler = Sampling(**sampling)
    return equivalent_of(
        Loop(model, optimizer, Diffusion(**{"process": "vp", **diffusion}), data, config, sampler=sampler)
    )


ODD = (type("Odd", (DDIM,), {}), type("Odd", (Trailing,), {}), type("Odd", (Clamp,), {}), type("Odd", (VP,), {}))
FLOW, SCALE = {"process": "flow"}, "diffusion.process.time_scale"
WEIGHTS, NO_CLIPPING = "--to safetensors", "--set sampling.clipping=none"


@pytest.mark.parametrize(
    ("diffusion", "sampling", "key", "value", "way_out"),
    [
        ({"data_mean": 0.1}, {}, "diffusion.data_mean", "(0.1,)", WEIGHTS),
        ({"data_std": [1.0, 0.5]}, {}, "diffusion.data_std", "(1.0, 0.5)", WEIGHTS),
        ({"prediction": "edm"}, {}, "diffusion.prediction", "'edm'", WEIGHTS),
        ({}, {"spacing": "karras"}, "sampling.spacing", "'karras'", "--set sampling.spacing=trailing"),
        ({}, {"steps": 30}, "sampling.steps", "30", "--steps 25"),
        ({}, {"sampler": "heun"}, "sampling.sampler", "'heun'", "--sampler ddim"),
        ({}, {"sampler": Euler(1.0)}, "sampling.sampler.churn", "1.0", "--set sampling.sampler.churn=0"),
        (
            {},
            {"sampler": DDPM("fixed_large")},
            *("sampling.sampler.variance", "'fixed_large'", "--set sampling.sampler.variance=fixed_small"),
        ),
        (
            {},
            {"sampler": "dpmpp_2m", "spacing": "leading"},
            *("sampling.spacing", "'leading'", "--set sampling.spacing=trailing"),
        ),
        (
            {"process": VP(rescale_betas_zero_snr=True), "prediction": "v_prediction"},
            {"sampler": "dpmpp_2m"},
            *("diffusion.process.rescale_betas_zero_snr", "true", "--sampler ddim"),
        ),
        (FLOW, {}, "sampling.sampler", "'dpmpp_2m'", "--sampler euler"),
        (FLOW, {"sampler": "euler", "clipping": "clamp"}, "sampling.clipping", "'clamp'", NO_CLIPPING),
        (FLOW, {"sampler": "euler", "clipping": "dynamic"}, "sampling.clipping", "'dynamic'", NO_CLIPPING),
        (FLOW, {"sampler": DDIM(0.5)}, "sampling.sampler.eta", "0.5", "--set sampling.sampler.eta=0"),
        (FLOW, {"sampler": Euler(1.0)}, "sampling.sampler.churn", "1.0", "--set sampling.sampler.churn=0"),
        (FLOW, {"sampler": "heun"}, "sampling.sampler", "'heun'", "--sampler euler"),
        ({**FLOW, "prediction": "v_prediction"}, {}, "diffusion.prediction", "'v_prediction'", WEIGHTS),
        ({"process": Flow(time_scale=0.5)}, {"sampler": "euler"}, SCALE, "0.5", WEIGHTS),
        ({"process": "edm"}, {}, "sampling.sampler", "'heun'", "--sampler euler"),
        ({"process": "edm"}, {"sampler": "euler"}, SCALE, "1000.0", WEIGHTS),
        ({"process": "edm", "prediction": "epsilon"}, {}, "diffusion.prediction", "'epsilon'", WEIGHTS),
        # Another class may do otherwise than the one that it is derived from.
        ({}, {"sampler": ODD[0]()}, "sampling.sampler", "Odd'", "--sampler ddim"),
        ({}, {"spacing": ODD[1]()}, "sampling.spacing", "Odd'", "--set sampling.spacing=trailing"),
        ({}, {"clipping": ODD[2]()}, "sampling.clipping", "Odd'", NO_CLIPPING),
        ({"process": ODD[3]()}, {}, "diffusion.process", "Odd'", WEIGHTS),
    ],
)
def test_an_option_without_a_scheduler_of_diffusers_is_refused_by_its_key(
    diffusion: dict[str, Any], sampling: dict[str, Any], key: str, value: str, way_out: str
) -> None:
    with refused(UserError, "--to diffusers", f"{key} = ", value, way_out):
        recipe(diffusion, sampling)


def test_the_noise_of_the_last_step_matters_only_where_there_is_one() -> None:
    for process, changed in product(("vp", "ddpm"), ({"spacing": "leading"}, {"steps": 1000})):
        made = recipe({"process": process}, {"sampler": DDPM("fixed_large"), **changed})
        assert (made.scheduler, made.options["variance_type"]) == ("DDPMScheduler", "fixed_large")


@pytest.fixture
def diffusers() -> Any:
    return pytest.importorskip("diffusers")


# NumPy 2 warns of a tensor that becomes an array, as the schedulers do it
slow = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"),
]


def called(diffusers: Any, out: str, labels: list[int], *shape: int) -> Tensor:
    """Run the code that was printed, on the noise that `hookdiff sample` begins with, and return its images: n c h w.

    There are as many images as `labels`, of which a model without classes uses only their number. `shape` is that of a
    sample, which only a loop needs.
    """
    generators = SampleRequest(len(labels)).generators()
    names = {kind: getattr(diffusers, kind) for kind in re.findall(r"(\w+)\.from_pre", out)}
    if "Pipeline." in out:
        opened, _, arguments = out.splitlines()[1].strip().removesuffix(")").partition(")(")
        pipeline = eval(f"{opened}, local_files_only=True)", names)
        pipeline.set_progress_bar_config(disable=True)
        size = {} if "class_labels" in arguments else {"batch_size": len(labels)}
        names = {"pipeline": pipeline, "labels": labels, "size": size, "generators": generators}
        images = eval(f"pipeline({arguments}, **size, generator=generators, output_type='np')", names).images
        return torch.from_numpy(images).permute(0, 3, 1, 2) * 2 - 1
    noise = torch.stack([torch.randn(shape, generator=generator) for generator in generators])
    names |= {"noise": noise, "labels": torch.tensor(labels), "torch": torch}
    with torch.no_grad():
        exec(textwrap.dedent("\n".join(out.splitlines()[2:])), names)
    return names["pictures" if "pictures" in names else "x"]


PROCESSES = {
    "linear, epsilon": ("diffusion.process=ddpm",),
    "linear, v": ("diffusion.process=ddpm", "diffusion.prediction=v_prediction"),
    "cosine, epsilon": ("diffusion.process=vp", "diffusion.prediction=epsilon"),
    "cosine, v": ("diffusion.process=vp",),
    "sigmoid, sample": (
        *("diffusion.process.use=vp", "diffusion.process.schedule=sigmoid"),
        "diffusion.prediction=sample",
    ),
    "scaled, zero SNR": (
        *("diffusion.process.use=vp", "diffusion.process.schedule=scaled_linear"),
        "diffusion.process.rescale_betas_zero_snr=true",
        "diffusion.prediction=v_prediction",
    ),
}
SAMPLERS = {
    "ddim": ("sampling.sampler=ddim",),
    "ddim, 50 steps": ("sampling.sampler=ddim", "sampling.steps=50"),
    "ddim, eta": ("sampling.sampler.use=ddim", "sampling.sampler.eta=0.5"),
    "ddim, leading": ("sampling.sampler=ddim", "sampling.spacing=leading"),
    "ddim, as released": (
        "sampling.sampler.use=ddim",
        "sampling.sampler.final=first",
        "sampling.spacing.use=leading",
        "sampling.spacing.offset=1",
    ),
    "ddim, thresholding": ("sampling.sampler=ddim", "sampling.clipping.use=dynamic", "sampling.clipping.ratio=0.9"),
    "ddim, free": ("sampling.sampler=ddim", "sampling.clipping=none"),
    "euler": ("sampling.sampler=euler",),
    "ddpm": ("sampling.sampler=ddpm", "sampling.steps=20"),
    "ddpm, large": ("sampling.sampler.use=ddpm", "sampling.sampler.variance=fixed_large", "sampling.spacing=leading"),
    "dpmpp_2m": ("sampling.sampler=dpmpp_2m", "sampling.steps=20"),
    "dpmpp_2m, free": ("sampling.sampler=dpmpp_2m", "sampling.steps=20", "sampling.clipping=none"),
}
GUIDED = "sampling.guidance.scale=2.5"
OWN_LOOPS = [
    ("classes", THEIRS + "num_class_embeds = 11", ("diffusion.process=vp", "sampling.sampler=ddim", GUIDED)),
    ("dit", DIT, ("diffusion.process=vp", "sampling.sampler=ddim")),
    ("dit-guided", DIT, ("diffusion.process=vp", "sampling.sampler=ddim", GUIDED)),
    ("flow", THEIRS, ("diffusion.process=flow", "diffusion.process.shift=3", "sampling.sampler=ddim")),
    ("flow-shifted", THEIRS, ("sampling.sampler=euler", "sampling.spacing={use = 'shifted', shift = 2}")),
    ("flow-sided", THEIRS, ("diffusion.process={shift = 2, shift_side = 4}", "sampling.sampler=euler")),
    ("edm", THEIRS, ("diffusion.process=edm", "diffusion.process.time_scale=1", "sampling.sampler=euler")),
]
USUAL = ("ddim", "ddim, 50 steps", "ddpm")


def words(setting: str) -> tuple[str, str]:
    """Return the option of `hookdiff export` that makes a setting."""
    key, _, value = setting.partition("=")
    options = {"sampling.sampler": "--sampler", "sampling.steps": "--steps"}
    return (options[key], value) if key in options else ("--set", setting)


class TestWithDiffusers:
    pytestmark = slow

    @pytest.mark.parametrize(
        ("process", "sampler"),
        [(p, s) for p in PROCESSES for s in SAMPLERS if p in ("linear, epsilon", "scaled, zero SNR") or s in USUAL],
    )
    def test_a_pipeline_makes_the_same_images(
        self, diffusers: Any, trained: Any, command: Any, tmp_path: Path, process: str, sampler: str
    ) -> None:
        name = re.sub(r"\W+", "-", process)
        run, settings = trained(name, THEIRS, "run.steps=40", *PROCESSES[process]), SAMPLERS[sampler]
        asked = [word for setting in settings for word in words(setting)]
        code, out, error = command("export", run, tmp_path / "out", "--to", "diffusers", "--weights", "ema", *asked)
        if sampler.startswith("dpmpp_2m") and "zero SNR" in process:
            assert (code, "rescale_betas_zero_snr" in error) == (2, True)
            return
        assert code == 0, error
        ours, theirs = images(run, 3, "ema", *settings), called(diffusers, out, [0] * 3)
        assert ours.std() > 0.1
        # The schedulers keep their tables in float32.
        torch.testing.assert_close(theirs, ours.clamp(-1, 1), rtol=0, atol=5e-5)

    def test_of_a_run_with_several_sizes_a_pipeline_makes_the_square(
        self, diffusers: Any, trained: Any, command: Any, place: Path, tmp_path: Path
    ) -> None:
        write_pictures(place / "pictures")
        data = [
            "data.source=folder",
            f"data.path={place / 'pictures'}",
            "data.image_size=8",
            'data.buckets=["12x8", "8x8"]',
        ]
        settings = ("run.batch_size=4", "diffusion.process=ddpm", "sampling.sampler=ddim")
        run = trained("sizes", THEIRS, *data, *settings)
        out = output(command("export", run, tmp_path / "out", "--to", "diffusers"))
        assert json.loads((tmp_path / "out" / "unet" / "config.json").read_text())["sample_size"] == 8
        theirs = called(diffusers, out, [0] * 3)
        with opened(run) as loop:
            assert loop.sample(SampleRequest(1)).images.shape == (1, 3, 8, 12)
            ours = loop.sample(SampleRequest(3, size=(8, 8))).images
        torch.testing.assert_close(theirs, ours, rtol=0, atol=5e-5)

    @pytest.mark.parametrize("weights", ["model", "ema", "ema/decay=0.1", "half"])
    def test_the_weights_are_those_that_are_sampled_with(
        self, diffusers: Any, trained: Any, command: Any, tmp_path: Path, weights: str
    ) -> None:
        run, folder = trained("linear-epsilon", THEIRS, "run.steps=40", *PROCESSES["linear, epsilon"]), tmp_path / "out"
        output(command("export", run, folder, "--to", "diffusers", "--weights", weights))
        theirs = diffusers.UNet2DModel.from_pretrained(folder, subfolder="unet").state_dict()
        with opened(run) as loop, loop.weights(weights):
            assert_same(theirs, loop.model.state_dict())
        with safe_open(folder / "unet" / "diffusion_pytorch_model.safetensors", framework="pt") as file:
            assert file.metadata()["weights"] == weights
        assert json.loads((folder / "model_index.json").read_text())["_class_name"] == "DDPMPipeline"
        assert isinstance(diffusers.DiffusionPipeline.from_pretrained(folder), diffusers.DDPMPipeline)
        assert command("export", run, folder, "--to", "diffusers")[0] == 2
        output(command("export", run, folder, "--to", "diffusers", "--overwrite"))

    @pytest.mark.parametrize(("name", "model", "settings"), OWN_LOOPS, ids=[name for name, *_ in OWN_LOOPS])
    def test_without_a_pipeline_the_loop_that_is_printed_makes_the_same_images(
        self, diffusers: Any, trained: Any, command: Any, tmp_path: Path, name: str, model: str, settings: Any
    ) -> None:
        run, folder = trained(name, model, "run.steps=40", *settings), tmp_path / "out"
        code, out, error = command("export", run, folder, "--to", "diffusers", "--weights", "ema")
        assert code == 0, error
        assert not (folder / "model_index.json").exists()
        labels = (3, 7, -1) if "embed" in model else None
        theirs, ours = called(diffusers, out, [3, 7, 10], 1, 8, 8), images(run, 3, "ema", labels=labels)
        assert name == "flow-sided" or "set_shift" not in out
        assert ours.std() > 0.1
        # EDM's begins with sqrt(sigma_max² + 1)
        torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-3 if name == "edm" else 5e-5)
        if name == "flow-sided":  # a comment has the shift for another shape
            shape = height, width = 16, 4
            out = re.sub(r"# .*?: (scheduler.set_shift)", rf"height, width = {shape}; \1", out)
            with opened(run) as loop, loop.weights("ema"), evaluating(loop.model):
                noise = SampleRequest(3).generators()
                ours = loop.sampler.sample(loop.model, loop.objective, (1, height, width), noise, "cpu")
            torch.testing.assert_close(called(diffusers, out, [0] * 3, 1, height, width), ours, rtol=0, atol=5e-5)
        if GUIDED in settings:
            words = ("--overwrite", "--set", "sampling.guidance.interval=[0, 2]")
            code, out, _ = command("export", run, folder, "--to", "diffusers", *words)
            check_facts(out, "left out: sampling.guidance", "scale=2.5")
