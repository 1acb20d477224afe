"""Spectral norm: against torch's own, what it refuses, and a whole run with it."""

from __future__ import annotations

import logging
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from hookdiff import ConfigError, Loop, SampleRequest, build_loop, hookimpl, load_config
from hookdiff.builtin.spectral import SpectralNorm
from hookdiff.experiment.probe import try_config
from hookdiff.models import UNet
from hookdiff.models.spectral import DividedBySigma, add_spectral_norm, choose_layers, normalised, plain_name
from hookdiff.testing import assert_same, toy_loop, toy_model, weights


def sigma(weight: Tensor, transposed: bool = False) -> float:
    """The largest singular value, outputs by inputs."""
    matrix = (weight.transpose(0, 1) if transposed else weight).flatten(1)
    return float(torch.linalg.svdvals(matrix.detach())[0])


LAYERS = [
    nn.Linear(7, 5),
    nn.Linear(5, 7, bias=False),
    nn.Conv2d(3, 4, 3),
    nn.Conv1d(2, 6, 3),
    nn.ConvTranspose2d(3, 4, 3),
]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_the_largest_singular_value_is_one(layer: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(type(layer)(*shape(layer)))
    assert add_spectral_norm(model, ["0"], None) == ["0"]
    ((divided, weight),) = normalised(model)
    divided.iterate(weight, 500)
    assert sigma(model[0].weight, "Transpose" in type(layer).__name__) == pytest.approx(1, abs=1e-4)  # type: ignore[arg-type]


def shape(layer: Any) -> tuple[int, ...]:
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return layer.in_channels, layer.out_channels, 3


def test_values_and_gradients_are_those_of_torch() -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Linear(6, 4), nn.Linear(6, 4)
    theirs.load_state_dict(ours.state_dict())
    model = nn.Sequential(ours)
    add_spectral_norm(model, ["0"], None)
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
    divided = DividedBySigma(weight, transposed=False)
    u = divided.u.clone()
    divided.iterate(weight)
    v = F.normalize(weight.T @ F.normalize(weight @ F.normalize(weight.T @ u, dim=0), dim=0), dim=0)
    torch.testing.assert_close(divided.v, v)


def test_a_forward_moves_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    add_spectral_norm(model, ["0"], None)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()(torch.randn(2, 4)).sum().backward()
    assert_same(model.state_dict(), before)


def test_autocast_does_not_round_sigma() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64))
    add_spectral_norm(model, ["0"], None)
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
        (["norm_out"], "norm_out ('norm_out') has no linear layer or convolution in it"),
        (["conv_in", "conv*"], "'conv_in', 'conv*' takes in conv_out, the output layer"),
        (["*conv2"], "start at zero, which has no singular value"),
    ],
)
def test_what_is_refused(patterns: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=r"^spectral_norm: ") as caught:
        add_spectral_norm(MODEL, patterns, "conv_out")
    assert message in str(caught.value)


def test_a_weight_that_is_shared_or_parametrised_is_refused() -> None:
    shared = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    shared[1].weight = shared[0].weight  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"0\.weight and 1\.weight are one weight"):
        add_spectral_norm(shared, ["0"], None)
    once = nn.Sequential(nn.Linear(3, 3))
    add_spectral_norm(once, ["0"], None)
    with pytest.raises(ValueError, match=r"the weight of 0 is parametrised already"):
        add_spectral_norm(once, ["0"], None)


def test_layers_at_zero_are_left_out_and_told(caplog: pytest.LogCaptureFixture) -> None:
    model = UNet(channels=8, num_res_blocks=1, head_dim=8)
    assert add_spectral_norm(model, ["mid.0.attention"], "conv_out") == ["mid.0.attention.qkv"]
    assert caplog.messages == ["spectral_norm leaves out 1 that start at zero: mid.0.attention.proj"]


def normalised_toy() -> Any:
    model = toy_model()
    torch.manual_seed(0)
    add_spectral_norm(model, ["0", "3"], None)
    return model


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_micro_batches_change_only_rounding(micro_batch: int | None) -> None:
    whole = toy_loop({"spectral_norm": SpectralNorm()}, model=normalised_toy())
    parts = toy_loop({"spectral_norm": SpectralNorm()}, model=normalised_toy(), micro_batch=micro_batch)
    whole.run()
    parts.run()
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(parts)[name], value, rtol=1e-4, atol=1e-6)
    assert sigma(whole.model[0].weight) == pytest.approx(1, abs=0.02)  # type: ignore[index]


def test_a_step_finds_the_vectors_as_the_last_one_left_them() -> None:
    found: list[list[Tensor]] = [[], []]

    class Look:
        @hookimpl
        def before_step(self, loop: Loop) -> None:
            found[0].append(normalised(loop.model)[0][0].u.clone())

        @hookimpl
        def after_optimizer_step(self, loop: Loop) -> None:
            found[1].append(normalised(loop.model)[0][0].u.clone())

    toy_loop({"spectral_norm": SpectralNorm(), "look": Look()}, model=normalised_toy(), steps=4).run()
    before, after = found
    assert all(torch.equal(now, last) for now, last in zip(before[1:], after, strict=False))
    assert not torch.equal(before[1], before[2])


RUN: dict[str, Any] = {
    "run": {"steps": 6, "batch_size": 8, "device": "cpu", "plugins": ["ema", "amp", "checkpoint"]},
    "data": {"source": "digits"},
    "sampling": {"steps": 2},
    "plugins": {"checkpoint": {"every": 3}, "amp": {"precision": "off"}},
}
UNET = {"use": "unet", "channels": 8, "num_res_blocks": 1, "head_dim": 8, "spectral_norm": ["*.qkv", "*.conv1", "time"]}
DIT = {"use": "dit", "hidden_size": 8, "depth": 1, "num_heads": 2, "spectral_norm": ["blocks.*.mlp_*"]}
BLOCKS = {"down_block_types": ["DownBlock2D", "AttnDownBlock2D"], "up_block_types": ["AttnUpBlock2D", "UpBlock2D"]}
SIZES = {"block_out_channels": [8, 8], "norm_num_groups": 4, "layers_per_block": 1, "attention_head_dim": 4}
DIFFUSERS = {"use": "diffusers:UNet2DModel", "spectral_norm": ["*attentions*"], **BLOCKS, **SIZES}


def load(folder: Path, model: dict[str, Any], *settings: str) -> Any:
    path = folder / "small.toml"
    path.write_text(tomli_w.dumps({**RUN, "model": model}))
    return load_config(path, settings=settings)


@pytest.mark.parametrize("model", [UNET, DIT, DIFFUSERS], ids=["unet", "dit", "diffusers"])
def test_a_run_a_resume_and_a_sample(model: dict[str, Any], tmp_path: Path) -> None:
    if "diffusers" in model["use"]:
        pytest.importorskip("diffusers")
    config = load(tmp_path, {**model, "gradient_checkpointing": True} if model["use"] == "unet" else model)
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
    request = SampleRequest(2, 0)
    loops = [build_loop(config, tmp_path / n, resume=True, hooks=("restore", "sample")) for n in ("whole", "again")]
    images = []
    for loop in loops:
        with loop:
            images.append(loop.sample(request).images)
    assert torch.equal(*images)
    assert images[0].isfinite().all()


def test_memory_format_and_decay_are_those_of_the_weight(tmp_path: Path) -> None:
    loop = build_loop(load(tmp_path, UNET), tmp_path / "run")
    with loop:
        weight = loop.model.down[0][0].conv1.weight  # type: ignore[index, union-attr]
        assert weight.is_contiguous(memory_format=torch.channels_last)
        (first, second) = loop.optimizers[0].param_groups
        original = dict(loop.model.named_parameters())["down.0.0.conv1.parametrizations.weight.original"]
        assert any(p is original for p in first["params"])
        assert all(p.ndim == 1 for p in second["params"])


def test_names_go_back_to_those_of_the_model(tmp_path: Path) -> None:
    plain = {name for name, _ in UNet(in_channels=1, channels=8, num_res_blocks=1, head_dim=8).named_parameters()}
    loop = build_loop(load(tmp_path, UNET), tmp_path / "run")
    assert {plain_name(name) for name, _ in loop.model.named_parameters()} == plain


def test_weights_without_spectral_norm_can_be_started_from(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    given = weights(build_loop(load(tmp_path, {**UNET, "spectral_norm": []}, "run.seed=7"), tmp_path / "run"))
    save_file({name: value.contiguous() for name, value in given.items()}, tmp_path / "given.safetensors")
    config = load(tmp_path, {**UNET, "start_from": str(tmp_path / "given.safetensors")})
    with build_loop(config, tmp_path / "run") as loop:
        assert_same({plain_name(n): p.detach() for n, p in loop.model.named_parameters()}, given)
        assert all(math.isclose(sigma(d(w)), 1, abs_tol=0.15) for d, w in normalised(loop.model))


def test_a_run_with_spectral_norm_can_be_started_from(tmp_path: Path) -> None:
    first = build_loop(load(tmp_path, UNET), tmp_path / "first")
    first.run()
    for name in ("model", "ema"):  # the average has no singular vectors
        path = tmp_path / "first" / "checkpoints" / "step-00000006" / f"{name}.safetensors"
        with build_loop(load(tmp_path, {**UNET, "start_from": str(path)}), tmp_path / "second") as loop:
            state = first.state_dict()["model"] if name == "model" else first.plugins["ema"].state_dict()  # type: ignore[attr-defined]
            for key, parameter in loop.model.named_parameters():
                assert torch.equal(parameter, state[key]), key
    with pytest.raises(ConfigError, match=r"unexpected .*parametrizations"):
        build_loop(load(tmp_path, {**UNET, "spectral_norm": [], "start_from": str(path)}), tmp_path / "third").run()


def test_a_mistake_is_told_with_its_table(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hookdiff")
    with pytest.raises(ConfigError, match=r"\n  model\.spectral_norm: no module matches '\*attn\*'; did you mean"):
        try_config(load(tmp_path, UNET, "model.spectral_norm=['*attn*']"))
    with pytest.raises(ConfigError, match=r"^model\.spectral_norm: '\*' takes in conv_out, the output layer"):
        build_loop(load(tmp_path, UNET, "model.spectral_norm=['*']"), tmp_path / "run")
