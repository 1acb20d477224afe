"""The forms of attention give the same numbers, and each layer takes the faster one."""

import copy
import inspect
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hookdiff.models.attention_forms import Form, attention, product_is_faster, use_attention
from hookdiff_networks import DiT, UNet
from tests.conftest import wide


@given(
    shape=st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)),
    keys=st.integers(1, 7),
    seed=st.integers(0, 9),
    share=st.none() | st.floats(0, 1),
)
def test_all_forms_have_the_same_values_and_gradients(
    shape: tuple[int, ...], keys: int, seed: int, share: float | None
) -> None:
    """A mask counts about this share of the keys; of a sample for which none counts the values are zeros."""
    generator = torch.Generator().manual_seed(seed)
    n, heads, _, d = shape
    sizes = (shape, (n, heads, keys, d), (n, heads, keys, d))
    parts = [torch.randn(size, generator=generator, dtype=torch.float64, requires_grad=True) for size in sizes]
    mask = None if share is None else torch.rand(n, 1, 1, keys, generator=generator) < share
    odds = torch.exp(parts[0] @ parts[1].transpose(2, 3) / d**0.5) * (1 if mask is None else mask)
    expected = odds / odds.sum(-1, keepdim=True).clamp(min=1e-300) @ parts[2]
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    slopes = torch.autograd.grad((expected * weights).sum(), parts)
    for form in get_args(Form):
        out = attention(*parts, form, mask)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(torch.autograd.grad((out * weights).sum(), parts), slopes)


@pytest.mark.parametrize(
    ("tokens", "head_dim", "dtype", "trains", "faster"),
    [
        (1024, 64, torch.bfloat16, True, True),
        (1025, 64, torch.bfloat16, True, False),
        (64, 8, torch.bfloat16, False, True),
        (256, 8, torch.float32, True, True),
        (16, 8, torch.float32, True, False),
        (256, 16, torch.float32, True, False),
        (256, 8, torch.float32, False, True),
        (64, 32, torch.float32, False, True),
        (65, 32, torch.float32, False, False),
        (16, 8, torch.float16, True, False),
    ],
)
def test_a_layer_takes_the_form_that_was_measured_as_the_faster_one(
    tokens: int, head_dim: int, dtype: torch.dtype, trains: bool, faster: bool
) -> None:
    with torch.set_grad_enabled(trains):
        assert product_is_faster(tokens, head_dim, dtype, "cpu") == faster
        assert not product_is_faster(tokens, head_dim, dtype, "cuda")


class CountKernels(TorchFunctionMode):
    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is F.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


def kernels(model: nn.Module, *inputs: Tensor, **text: Tensor) -> int:
    """Return how many layers of `model` call torch's kernel in bf16."""
    with CountKernels() as counted, torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        model(*inputs, **text)
    return counted.count


@pytest.mark.parametrize(("make", "text_dim", "layers"), [(UNet, 0, 5), (DiT, 0, 6), (UNet, 3, 10), (DiT, 3, 12)])
def test_own_networks_follow(make: Any, text_dim: int, layers: int) -> None:
    model, x, t = make(text_dim=text_dim), torch.randn(2, 1, 8, 8), torch.tensor([1, 900])
    text = {"text": torch.randn(2, 4, 3), "text_mask": torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]])} if text_dim else {}
    assert kernels(model, x, t, **text) == 0
    use_attention(model, "kernel")
    assert kernels(model, x, t, **text) == layers
    use_attention(model, "product")
    assert kernels(model, x, t, **text) == 0


@pytest.mark.parametrize("kind", [*wide("unet"), "with cross-attention"])
def test_networks_of_diffusers_follow_through_their_processors(kind: str) -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    options = {"block_out_channels": (16,), "layers_per_block": 1, "norm_num_groups": 4}
    inputs = [torch.randn(2, 1, 8, 8), torch.tensor([1, 900])]
    if kind == "unet":
        blocks = {"down_block_types": ("AttnDownBlock2D",), "up_block_types": ("AttnUpBlock2D",)}
        model = diffusers.UNet2DModel(8, 1, 1, **blocks, **options)
    else:
        blocks = {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",)}
        blocks |= {"cross_attention_dim": 16, "attention_head_dim": 8, "mid_block_type": None}
        model = diffusers.UNet2DConditionModel(8, 1, 1, **blocks, **options)
        inputs.append(torch.randn(2, 5, 16))
    product, by_layer = copy.deepcopy(model), copy.deepcopy(model)
    for net, form in ((model, "kernel"), (product, "product"), (by_layer, "by_layer")):
        use_attention(net, form)
    assert kernels(model, *inputs)
    assert kernels(product, *inputs) == kernels(by_layer, *inputs) == 0
    outs = [each(*inputs).sample for each in (model, product, by_layer)]
    for each, out in zip((model, product, by_layer), outs, strict=True):
        torch.testing.assert_close(out, outs[0])
        F.mse_loss(out, torch.zeros_like(out)).backward()
        for one, other in zip(each.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-4)


def test_the_processor_takes_all_that_the_usual_one_takes() -> None:
    module = pytest.importorskip("diffusers.models.attention_processor")
    layer = module.Attention(32, heads=2, dim_head=8, spatial_norm_dim=4)
    x, mask, spatial = torch.randn(2, 32, 4, 4), torch.randn(2, 1, 16), torch.randn(2, 4, 4, 4)
    expected = layer(x, attention_mask=mask, temb=spatial)
    use_attention(nn.Sequential(layer), "by_layer")
    usual, own = (
        set(inspect.signature(kind.__call__).parameters) for kind in (module.AttnProcessor2_0, type(layer.processor))
    )
    assert usual - own == {"args", "kwargs"}
    with torch.no_grad():
        torch.testing.assert_close(layer(x, attention_mask=mask, temb=spatial), expected)


def test_attention_that_the_product_of_diffusers_does_not_know_is_left_alone() -> None:
    module = pytest.importorskip("diffusers.models.attention_processor")
    layer = module.Attention(16, heads=2, dim_head=8, qk_norm="layer_norm")
    before = layer.processor
    use_attention(nn.Sequential(layer), "product")
    assert layer.processor is before
