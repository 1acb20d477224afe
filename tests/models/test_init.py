"""Test the initial weights of a new model: moments, layers that stay at zero, and the last layer."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hookdiff import ConfigError, Loop, build_loop
from hookdiff.models.init import Initialisation, layers_called
from hookdiff.testing.compare import assert_same, weights
from hookdiff_networks import DiT, UNet
from tests.conftest import check_one, refused
from tests.models.test_adapters import THEIR_UNET


def initialised(model: Any, init: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    Initialisation(init=init).apply(model, None)
    return model


def test_default_keeps_the_weights_that_the_class_drew() -> None:
    model = nn.Linear(3, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert_same(initialised(model, "default").state_dict(), before)


def test_xavier_has_the_bound_of_the_paper() -> None:
    weight = initialised(nn.Conv2d(8, 16, 3), "xavier").weight
    bound = math.sqrt(6 / ((8 + 16) * 9))  # eq. 16, with a convolution's fans
    assert bound * 0.98 < weight.abs().max() <= bound
    torch.testing.assert_close(weight.std().item(), bound / math.sqrt(3), rtol=0.05, atol=0)


def test_kaiming_keeps_the_variance_through_a_relu() -> None:
    layer = initialised(nn.Linear(500, 400), "kaiming")
    torch.testing.assert_close(layer.weight.std().item(), math.sqrt(2 / 500), rtol=0.02, atol=0)
    x = torch.randn(64, 500)
    torch.testing.assert_close(layer(x).relu().square().mean().item(), x.square().mean().item(), rtol=0.1, atol=0)


@pytest.mark.parametrize("layer", [nn.Linear(5, 3), nn.Linear(3, 5), nn.Conv2d(2, 4, 3), nn.ConvTranspose1d(4, 2, 3)])
def test_orthogonal_has_singular_values_of_one(layer: Any) -> None:
    values = torch.linalg.svdvals(initialised(layer, "orthogonal").weight.flatten(1))
    torch.testing.assert_close(values, torch.ones_like(values))
    assert not layer.bias.any()


def test_norms_and_embeddings_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Embedding(3, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    initialised(model, "orthogonal")
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    assert changed == ["2.weight", "2.bias"]


def test_layers_that_a_class_sets_to_zero_stay_zero() -> None:
    for model in (UNet(channels=8, head_dim=8), DiT(hidden_size=8, depth=1, num_heads=2, text_dim=3)):
        zero = [name for name, value in model.named_parameters() if name.endswith("weight") and not value.any()]
        initialised(model, "xavier")
        assert len(zero) > 2
        assert all(not dict(model.named_parameters())[name].any() for name in zero)


def test_the_draws_depend_on_the_seed_and_not_on_the_layout() -> None:
    plain, other = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    one, two = (initialised(model, "orthogonal", seed=3).weight for model in (plain, other))
    assert torch.equal(one, two)
    assert two.is_contiguous(memory_format=torch.channels_last)
    assert not torch.equal(one, initialised(nn.Conv2d(4, 4, 3), "orthogonal", seed=4).weight)


@pytest.mark.parametrize("init", ["xavier", "kaiming", "orthogonal"])
def test_a_model_on_the_meta_device_stays_unchanged(init: Any) -> None:
    model = initialised(nn.Linear(10**7, 10**7, device="meta"), init)
    assert model.weight.is_meta


class LastIsFirst(nn.Module):
    """A network that calls its layers in another order than it declares them."""

    def __init__(self, in_channels: int = 1) -> None:
        super().__init__()
        self.answer = nn.Conv2d(4, in_channels, 1)
        self.body = nn.Conv2d(in_channels, 4, 1)
        self.unused = nn.Linear(1, 1)

    def forward(self, x: Tensor, timesteps: Tensor) -> Tensor:
        out: Tensor = self.answer(self.body(x))
        return out


class NoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, timesteps: Tensor) -> Tensor:
        return x * self.scale


def test_layers_are_recorded_in_the_order_of_their_calls() -> None:
    model = LastIsFirst()
    with layers_called(model) as called:
        model(torch.zeros(1, 1, 2, 2), torch.zeros(1))
    model(torch.zeros(1, 1, 2, 2), torch.zeros(1))
    assert called == ["body", "answer"]


SOURCE = Path(__file__)


@pytest.fixture
def build(user_module: Any, load_small: Any, tmp_path: Path) -> Callable[..., Loop]:
    """Return a function that builds the loop of a config with a model."""
    user_module("hd_init", SOURCE.read_text("utf-8"))
    return lambda **model: build_loop(load_small(run={"steps": 1}, model=model), tmp_path / "run")


UNET = {"use": "unet", "channels": 8, "num_res_blocks": 1, "head_dim": 8}
DIT = {"use": "dit", "hidden_size": 8, "depth": 1, "num_heads": 2}


@pytest.mark.parametrize(
    ("model", "found"),
    [(UNET, "conv_out"), (DIT, "patch_out"), ({"use": "hd_init:LastIsFirst"}, "answer"), (THEIR_UNET, "conv_out")],
    ids=["unet", "dit", "own", "diffusers"],
)
def test_zero_output_makes_a_model_with_zero_output(
    model: Any, found: str, build: Any, caplog: pytest.LogCaptureFixture
) -> None:
    if ":UNet2D" in model["use"]:
        pytest.importorskip("diffusers")
    caplog.set_level(logging.INFO, "hookdiff")
    loop = build(init="xavier", zero_output=True, **model)
    assert not loop.model(torch.randn(2, 1, 8, 8), torch.tensor([0, 9])).any()
    check_one([message for message in caplog.messages if "zero_output" in message], found)
    assert loop.run() == "done"
    assert loop.model(torch.randn(2, 1, 8, 8), torch.tensor([0, 9])).any()


def test_zero_output_without_a_layer_is_refused(build: Any) -> None:
    with refused(ConfigError, "model.zero_output"):
        build(zero_output=True, use="hd_init:NoLayers")


def test_the_seed_of_the_run_decides_the_weights(build: Any) -> None:
    torch.manual_seed(1)
    one = weights(build(**DIT, init="kaiming"))
    torch.manual_seed(2)
    assert_same(one, weights(build(**DIT, init="kaiming")))
    assert not torch.equal(one["patch_in.weight"], weights(build(**DIT))["patch_in.weight"])


def test_weights_from_a_file_replace_the_initial_weights(tmp_path: Path, build: Any) -> None:
    given = weights(build(**DIT))
    save_file({name: value.contiguous() for name, value in given.items()}, tmp_path / "given.safetensors")
    with build(**DIT, start_from=str(tmp_path / "given.safetensors"), init="orthogonal") as loop:
        assert_same(weights(loop), given)
