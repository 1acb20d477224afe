"""The plugin `spectral`: equality with torch, refused configs, and whole runs."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.nn.utils import parametrizations

from hookdiff import ConfigError, SampleRequest, UserError, build_loop, load_config
from hookdiff.experiment.probe import try_config
from hookdiff.models.names import plain_name
from hookdiff.testing import assert_same, toy_loop, toy_model, weights
from hookdiff_memory.estimate import estimate_memory
from hookdiff_networks import UNet
from hookdiff_spectral import Spectral
from hookdiff_spectral.plugin import choose_layers, normalise
from hookdiff_spectral.sigma import DividedBySigma, normalised
from tests.conftest import acting, toy_run, wide, write_small


def sigma(weight: Tensor, transposed: bool = False) -> float:
    """The largest singular value, outputs by inputs."""
    matrix = (weight.transpose(0, 1) if transposed else weight).flatten(1)
    return float(torch.linalg.svdvals(matrix.detach())[0])


def add(model: nn.Module, *patterns: str, output: str | None = None) -> list[str]:
    return normalise(model, patterns, output, Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (nn.Linear, (7, 5)),
        (nn.Linear, (5, 7, False)),
        (nn.Conv2d, (3, 4, 3)),
        (nn.Conv1d, (2, 6, 3)),
        (nn.ConvTranspose2d, (3, 4, 3)),
    ],
)
def test_the_largest_singular_value_is_one(kind: type[nn.Module], sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(kind(*sizes))
    assert add(model, "0") == ["0"]
    ((divided, weight),) = normalised(model)
    divided.iterate(weight, 500)
    assert sigma(model[0].weight, kind is nn.ConvTranspose2d) == pytest.approx(1, abs=1e-4)


def test_values_and_gradients_are_those_of_torch() -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Linear(6, 4), nn.Linear(6, 4)
    theirs.load_state_dict(ours.state_dict())
    model = nn.Sequential(ours)
    add(model, "0")
    parametrizations.spectral_norm(theirs).eval()  # no iteration in its forward
    ((divided, weight),) = normalised(model)
    state: Any = theirs.parametrizations
    state.weight[0]._u.copy_(divided.u)
    state.weight[0]._v.copy_(divided.v)
    x = torch.randn(3, 6)
    for layer in (model, theirs):
        layer(x).square().sum().backward()
    torch.testing.assert_close(model(x), theirs(x))
    torch.testing.assert_close(weight.grad, state.weight.original.grad)


def test_one_iteration_is_that_of_the_paper() -> None:
    weight = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    divided = DividedBySigma(weight, False, Generator().manual_seed(0))
    u = divided.u.clone()
    divided.iterate(weight)
    v = F.normalize(weight.T @ F.normalize(weight @ F.normalize(weight.T @ u, dim=0), dim=0), dim=0)
    torch.testing.assert_close(divided.v, v)


def test_a_forward_pass_changes_no_vector() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    add(model, "0")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()(torch.randn(2, 4)).sum().backward()
    assert_same(model.state_dict(), before)


def test_autocast_does_not_round_sigma() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64))
    add(model, "0")
    plain = model[0].weight
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model[0].weight, plain)  # type: ignore[arg-type]


MODEL = UNet(channels=8, num_res_blocks=1, head_dim=8)


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["*qkv"], ["down.1.0.attention.qkv", "mid.0.attention.qkv", "up.1.0.attention.qkv"]),
        (["mid.1"], ["mid.1.conv1", "mid.1.time", "mid.1.conv2"]),  # all that is inside
        (["time", "conv_in"], ["time.linear1", "time.linear2", "conv_in"]),
        ([], []),
    ],
)
def test_patterns_choose_layers(patterns: list[str], names: list[str]) -> None:
    assert list(choose_layers(MODEL, patterns)) == names


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["*atention*"], "no module matches '*atention*'; did you mean 'attention'?"),
        (["conv_ni"], "no module matches 'conv_ni'; did you mean 'conv_in'?"),
        (["norm_out"], "no module that matches 'norm_out' has a linear layer or convolution in it"),
        (["conv_out", "mid.0.conv2"], "choose others than mid.0.conv2, conv_out: "),
    ],
)
def test_wrong_patterns_are_refused(patterns: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=r"^plugins\.spectral\.layers: ") as caught:
        add(MODEL, *patterns, output="conv_out")
    assert message in str(caught.value)


def test_a_weight_that_is_shared_or_parametrised_is_refused() -> None:
    shared = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    shared[1].weight = shared[0].weight  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"0\.weight and 1\.weight are one weight"):
        add(shared, "0")
    once = nn.Sequential(nn.Linear(3, 3))
    add(once, "0")
    with pytest.raises(ConfigError, match=r"leave out 0: its weight is parametrised already"):
        add(once, "0")


def test_layers_at_zero_and_the_output_stay_as_they_are() -> None:
    model = UNet(channels=8, num_res_blocks=1, head_dim=8)
    assert add(model, "mid.0.attention", "conv_*", output="conv_out") == ["conv_in", "mid.0.attention.qkv"]
    assert add(toy_model(), "*", output="3") == ["0"]


class LastIsFirst(nn.Module):
    """Calls its layers in another order than it declares them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.answer = nn.Linear(6, 4)
        self.body = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.answer(self.body(x))
        return out


def test_the_output_is_the_layer_that_is_called_last() -> None:
    with toy_loop({"spectral": Spectral()}, model=LastIsFirst()) as loop:
        names = [name for name, _ in loop.model.named_parameters()]
    assert names == ["answer.weight", "answer.bias", "body.bias", "body.parametrizations.weight.original"]


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_micro_batches_change_only_rounding(micro_batch: int | None) -> None:
    whole, parts = (toy_run({"spectral": Spectral()}, micro_batch=size) for size in (None, micro_batch))
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(parts)[name], value, rtol=1e-4, atol=1e-6)
    assert sigma(whole.model[0].weight) == pytest.approx(1, abs=0.02)  # type: ignore[index]


def test_the_seed_of_the_run_decides() -> None:
    def start(seed: int) -> dict[str, Tensor]:
        torch.rand(seed)  # whatever was drawn in this process before
        with toy_loop({"spectral": Spectral()}, seed=seed) as loop:
            return {name: value for name, value in weights(loop).items() if name.endswith(".u")}

    assert_same(start(1), start(1))
    assert not torch.equal(*(start(seed)["0.parametrizations.weight.0.u"] for seed in (1, 2)))


def test_a_step_starts_from_the_vectors_of_the_last_step() -> None:
    found: list[list[Tensor]] = [[], []]

    def look(kept: list[Tensor]) -> Any:
        return lambda loop: kept.append(normalised(loop.model)[0][0].u.clone())

    looks = acting(before_step=look(found[0]), after_optimizer_step=look(found[1]))
    toy_loop({"spectral": Spectral(), "looks": looks}, steps=4).run()
    before, after = found
    assert all(torch.equal(now, last) for now, last in zip(before[1:], after, strict=False))
    assert not torch.equal(before[1], before[2])


def test_a_loop_can_be_entered_again() -> None:
    loop = toy_run({"spectral": Spectral()}, steps=2)
    after = weights(loop)
    with loop:
        assert_same(weights(loop), after)


RUN = {"steps": 6, "batch_size": 8, "plugins": ["ema", "amp", "spectral", "checkpoint"]}
UNET = {"use": "unet", "channels": 8, "num_res_blocks": 1, "head_dim": 8}
DIT = {"use": "dit", "hidden_size": 8, "depth": 1, "num_heads": 2}
BLOCKS = {"down_block_types": ["DownBlock2D", "AttnDownBlock2D"], "up_block_types": ["AttnUpBlock2D", "UpBlock2D"]}
SIZES = {"block_out_channels": [8, 8], "norm_num_groups": 4, "layers_per_block": 1, "attention_head_dim": 4}
DIFFUSERS = {"use": "diffusers:UNet2DModel", **BLOCKS, **SIZES}
HOOKS = ("prepare_model", "restore", "sample", "offer_weights")
SOME = ("*.qkv", "*.conv1", "time")  # of a U-Net


def load(folder: Path, model: dict[str, Any], *layers: str, plugins: tuple[str, ...] = (), **run: Any) -> Any:
    options = {"checkpoint": {"every": 3}, "amp": {"precision": "off"}, "spectral": {"layers": layers or ("*",)}}
    path = write_small(folder / "small.toml", run={**RUN, **run}, model=model, diffusion={}, plugins=options)
    return load_config(path, plugins)


@pytest.mark.parametrize(
    ("model", "layers"),
    [(DIT, ("blocks.*.mlp_*",)), *wide(({**UNET, "gradient_checkpointing": True}, ()), (DIFFUSERS, ("*attentions*",)))],
    ids=["dit", "unet", "diffusers"],
)
def test_a_run_a_resume_and_a_sample(model: dict[str, Any], layers: tuple[str, ...], tmp_path: Path) -> None:
    if "diffusers" in model["use"]:
        pytest.importorskip("diffusers")
    config = load(tmp_path, model, *layers)
    try_config(config)
    whole = build_loop(config, tmp_path / "whole")
    assert whole.run() == "done"
    values = [sigma(divided(weight)) for divided, weight in normalised(whole.model)]
    assert values
    assert max(abs(value - 1) for value in values) < 0.15  # one iteration an update is near
    saved = Path("checkpoints") / "step-00000003"
    shutil.copytree(tmp_path / "whole" / saved, tmp_path / "again" / saved)
    again = build_loop(config, tmp_path / "again", resume=True)
    again.run()
    assert_same(weights(again), weights(whole))
    images = []
    for name in ("whole", "again"):
        with build_loop(config, tmp_path / name, resume=True, hooks=HOOKS) as loop:
            images.append(loop.sample(SampleRequest(2, 0)).images)
    assert torch.equal(*images)
    assert images[0].isfinite().all()


def test_memory_format_and_decay_are_those_of_the_weight(tmp_path: Path) -> None:
    with build_loop(load(tmp_path, UNET, *SOME), tmp_path / "run") as loop:
        weight = loop.model.down[0][0].conv1.weight  # type: ignore[index, union-attr]
        assert weight.is_contiguous(memory_format=torch.channels_last)
        of_muon, of_adamw = ([p for g in one.param_groups for p in g["params"]] for one in loop.optimizers)
        original = dict(loop.model.named_parameters())["down.0.0.conv1.parametrizations.weight.original"]
        assert any(p is original for p in of_muon)
        assert all(p.ndim == 1 for p in of_adamw)
        assert all(group["weight_decay"] == 0 for group in loop.optimizers[1].param_groups)


def test_plain_tensors_have_the_names_of_the_model(tmp_path: Path) -> None:
    plain = {name for name, _ in UNet(in_channels=1, channels=8, num_res_blocks=1, head_dim=8).named_parameters()}
    with build_loop(load(tmp_path, UNET), tmp_path / "run") as loop:
        assert {plain_name(name) for name, _ in loop.model.named_parameters()} == plain


def test_weights_of_a_plain_model_can_be_started_from(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    given = weights(build_loop(load(tmp_path, UNET, plugins=("no:spectral",), seed=7), tmp_path / "run"))
    save_file({name: value.contiguous() for name, value in given.items()}, tmp_path / "given.safetensors")
    config = load(tmp_path, {**UNET, "start_from": str(tmp_path / "given.safetensors")}, *SOME)
    with build_loop(config, tmp_path / "run") as loop:
        assert_same({plain_name(n): p.detach() for n, p in loop.model.named_parameters()}, given)
        assert all(math.isclose(sigma(d(w)), 1, abs_tol=0.15) for d, w in normalised(loop.model))


@pytest.mark.wide
def test_a_normalised_run_can_be_started_from(tmp_path: Path) -> None:
    first = build_loop(load(tmp_path, UNET, *SOME), tmp_path / "first")
    first.run()
    for name in ("model", "ema"):  # the average has no singular vectors
        path = tmp_path / "first" / "checkpoints" / "step-00000006" / f"{name}.safetensors"
        with build_loop(load(tmp_path, {**UNET, "start_from": str(path)}, *SOME), tmp_path / "second") as loop:
            state = first.state_dict()["model"] if name == "model" else first.state_dict()["plugins"]["ema"]
            for key, parameter in loop.model.named_parameters():
                assert torch.equal(parameter, state[key]), key
    plain = load(tmp_path, {**UNET, "start_from": str(path)}, plugins=("no:spectral",))
    with pytest.raises(ConfigError, match=r"unexpected .*parametrizations"):
        build_loop(plain, tmp_path / "third").run()


def test_a_run_goes_on_with_the_same_layers_only(tmp_path: Path) -> None:
    build_loop(load(tmp_path, UNET, *SOME, steps=3), tmp_path / "run").run()
    for layers, plugins in ((("time", "conv_in"), ()), ((), ()), (SOME, ("no:spectral",))):
        config = load(tmp_path, UNET, *layers, plugins=plugins, steps=8)
        with pytest.raises(UserError, match=r"other parametrisations of .*, .*, .* and \d+ more; "):
            build_loop(config, tmp_path / "run", resume=True).run()


@pytest.mark.wide
def test_memory_is_counted_with_the_singular_vectors(tmp_path: Path) -> None:
    plain, divided = (
        estimate_memory(load(tmp_path, DIT, "blocks.*.mlp_*", plugins=names)) for names in (("no:spectral",), ())
    )
    assert divided.parameters == plain.parameters
    assert divided.buffers > plain.buffers
