import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import Tensor, nn

from hookdiff_networks import UNet
from hookdiff_networks.unet import Attention, ResBlock
from tests.conftest import refused
from tests.networks.conftest import grad_of, images, small, text_for, trained


@st.composite
def shapes(draw: st.DrawFn) -> tuple[dict[str, Any], tuple[int, ...]]:
    mults = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    sides = [16 >> level for level in range(len(mults))]
    channels, in_channels = draw(st.integers(1, 13)), draw(st.integers(1, 4))
    options: dict[str, Any] = {
        "in_channels": in_channels,
        "image_size": 16,
        "channels": channels,
        "channel_mults": mults,
        "num_res_blocks": draw(st.integers(1, 3)),
        "attention_resolutions": tuple(draw(st.sets(st.sampled_from(sides)))),
        "head_dim": draw(st.sampled_from([n for n in range(1, channels + 1) if channels % n == 0])),
    }
    divisor = 2 ** (len(mults) - 1)
    height, width = (divisor * draw(st.integers(1, 16 // divisor)) for _ in range(2))
    # torch refuses to normalize a single value: one image of one pixel at the lowest level.
    num = draw(st.integers(0, 3).filter(lambda num: num != 1 or height * width > divisor**2))
    return options, (num, in_channels, height, width)


@given(shapes())
def test_output_has_the_shape_of_the_input(case: tuple[dict[str, Any], tuple[int, ...]]) -> None:
    options, shape = case
    model = trained(UNet, **options)
    out = model(images(*shape), torch.arange(shape[0]))
    assert (out.shape, out.dtype) == (shape, torch.float32)
    assert out.isfinite().all()


@pytest.mark.parametrize(
    "changes",
    [
        {"channel_mults": (1, 2)},
        {"channel_mults": (2,), "attention_resolutions": (8,), "in_channels": 1},
        {"channel_mults": (1, 2, 1, 2), "attention_resolutions": (8, 2), "num_res_blocks": 2},  # down to 1x1
        {"channel_mults": (1, 2), "text_dim": 3},
    ],
)
def test_channels_last_stays_and_changes_nothing(changes: dict[str, Any]) -> None:
    model = trained(UNet, **{"in_channels": 3, **changes})
    x, t = images(4, model.in_channels, 8, 8), torch.tensor([1, 10, 100, 1000])
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)
    seen: list[Tensor] = []
    for module in last.modules():
        if isinstance(module, ResBlock):
            module.register_forward_hook(lambda module, args, out: seen.extend((args[0], out)))

    text = text_for(model, 4)
    out = last(x.contiguous(memory_format=torch.channels_last), t, **text)
    assert all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in (*seen, out))
    expected = model(x, t, **text)
    assert expected.is_contiguous()
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)

    out.square().sum().backward()
    expected.square().sum().backward()
    for (name, ours), theirs in zip(last.named_parameters(), model.parameters(), strict=True):
        options: dict[str, Any] = {"atol": 1e-4 * grad_of(theirs).abs().max().item(), "rtol": 1e-3, "msg": name}
        torch.testing.assert_close(grad_of(ours), grad_of(theirs), check_stride=False, **options)


def test_a_mirrored_image_gives_a_mirrored_output() -> None:
    """Resampling is centred on every level, so the network does not shift the image sideways."""
    model = trained(UNet, channel_mults=(1, 1, 2), attention_resolutions=(4,))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.weight.add_(module.weight.flip(-1))
    x, t = images(2, 1, 8, 16), torch.tensor([3, 700])
    torch.testing.assert_close(model(x.flip(-1), t), model(x, t).flip(-1), atol=1e-4, rtol=1e-4)


def test_names_are_stable() -> None:
    model = small(UNet, num_res_blocks=2)
    assert small(UNet, num_classes=1).state_dict().keys() - small(UNet).state_dict().keys() == {"label.weight"}
    layers = [name.removesuffix(".weight") for name in model.state_dict() if name.endswith(".weight")]
    block = ["norm1", "conv1", "time", "conv2"]
    attention = ["attention.norm", "attention.qkv", "attention.proj"]
    assert layers == [
        *("time.linear1", "time.linear2", "conv_in"),
        *(f"down.0.0.{layer}" for layer in block),
        *(f"down.0.1.{layer}" for layer in block),
        *(f"down.1.0.{layer}" for layer in (*block, "skip", *attention)),
        *(f"down.1.1.{layer}" for layer in (*block, *attention)),
        *(f"mid.0.{layer}" for layer in (*block, *attention)),
        *(f"mid.1.{layer}" for layer in block),
        *(f"up.1.0.{layer}" for layer in (*block, "skip", *attention)),
        *(f"up.1.1.{layer}" for layer in (*block, "skip", *attention)),
        "up.0.upsample",
        *(f"up.0.0.{layer}" for layer in (*block, "skip")),
        *(f"up.0.1.{layer}" for layer in (*block, "skip")),
        *("norm_out", "conv_out"),
    ]


def test_blocks_are_listed_in_the_order_they_run() -> None:
    model = small(UNet, channel_mults=(1, 1, 1), num_res_blocks=2)
    blocks = [(name, module) for name, module in model.named_modules() if isinstance(module, ResBlock)]
    ran: list[str] = []
    for name, module in blocks:
        module.register_forward_hook(lambda module, args, out, name=name: ran.append(name))
    model(images(1, 1, 8, 8), torch.tensor([1]))
    assert ran == [name for name, _ in blocks]


def test_blocks_on_the_way_up_get_their_skips_in_reverse_order() -> None:
    model = trained(UNet, num_res_blocks=2)
    seen: dict[str, tuple[Tensor, Tensor]] = {}  # input and output of each block
    for name, module in model.named_modules():
        if isinstance(module, ResBlock):
            module.register_forward_hook(lambda module, args, out, name=name: seen.update({name: (args[0], out)}))
    model(images(1, 1, 8, 8), torch.tensor([1]))
    for level in (0, 1):
        for i in (0, 1):
            _, skip = seen[f"down.{level}.{1 - i}"]
            assert torch.equal(seen[f"up.{level}.{i}"][0][:, -skip.shape[1] :], skip)


def test_a_block_is_scaled_and_shifted_by_the_time() -> None:
    torch.manual_seed(0)
    block = ResBlock(4, 8, 6, num_heads=0, text_dim=0, dropout=0.0, gradient_checkpointing=False)
    x, time = images(2, 4, 3, 5), images(2, 6)
    scale, shift = block.time(time).reshape(2, 2, 8, 1, 1).unbind(1)
    h = F.group_norm(block.conv1(F.silu(F.group_norm(x, 1))), 2)
    expected = block.skip(x) + block.conv2(F.silu(h * (1 + scale) + shift))
    torch.testing.assert_close(block(x, time), expected)


def test_attention_matches_torch() -> None:
    torch.manual_seed(0)
    ours, theirs = Attention(12, 3), nn.MultiheadAttention(12, 3, batch_first=True)
    theirs.in_proj_weight = ours.qkv.weight
    nn.init.zeros_(theirs.in_proj_bias)
    theirs.out_proj.load_state_dict(ours.proj.state_dict())
    x = images(2, 12, 4, 2)
    tokens = F.group_norm(x, 3).reshape(2, 12, 8).permute(0, 2, 1)
    expected = x + theirs(tokens, tokens, tokens)[0].permute(0, 2, 1).reshape(x.shape)
    torch.testing.assert_close(ours(x), expected)


def test_the_nearest_head_dim_is_found_for_very_many_channels() -> None:
    with refused(ValueError, "head_dim=33", 32), torch.device("meta"):
        UNet(channels=2**39, head_dim=33)


def test_head_dim_matters_only_where_there_is_attention() -> None:
    UNet(channels=10, head_dim=32, attention_resolutions=())


@pytest.mark.parametrize(
    ("size", "mults", "attends"),
    [(8, (1, 2), 4), (28, (1, 2, 2), 7), (64, (1, 2), 32), (128, (1, 2), None), (8, (2,), 8)],
)
def test_attention_is_on_the_last_level_by_default(size: int, mults: tuple[int, ...], attends: int | None) -> None:
    with torch.device("meta"):
        asked = UNet(image_size=size, channel_mults=mults, attention_resolutions=() if attends is None else (attends,))
        assert UNet(image_size=size, channel_mults=mults).state_dict().keys() == asked.state_dict().keys()
