import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import Tensor, nn

from hookdiff_networks import DiT
from hookdiff_networks.dit import DiTBlock, positions
from hookdiff_networks.layers import sinusoids
from tests.networks.conftest import images, small, trained


@pytest.mark.parametrize(
    ("sizes", "millions"),
    [((384, 12, 6), 33), ((768, 12, 12), 130), ((1024, 24, 16), 458), ((1152, 28, 16), 675)],
    ids=["S", "B", "L", "XL"],
)
def test_the_sizes_of_the_paper(sizes: tuple[int, int, int], millions: int) -> None:
    options: dict[str, Any] = dict(zip(("hidden_size", "depth", "num_heads"), sizes, strict=True))
    with torch.device("meta"):
        model = DiT(in_channels=4, image_size=32, num_classes=1000, **options)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert round(count / 1e6) == millions
    if millions == 675:
        # The authors also count the fixed positions of 16 x 16 patches and the outputs for the variance.
        assert count + 16 * 16 * 1152 + 2 * 2 * 4 * (1152 + 1) == 675_129_632


@st.composite
def shapes(draw: st.DrawFn) -> tuple[dict[str, Any], tuple[int, ...]]:
    patch_size, num_heads, in_channels = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    options: dict[str, Any] = {
        "in_channels": in_channels,
        "image_size": patch_size * draw(st.integers(1, 4)),
        "patch_size": patch_size,
        "hidden_size": 4 * num_heads * draw(st.integers(1, 3)),
        "depth": draw(st.integers(1, 3)),
        "num_heads": num_heads,
        "mlp_ratio": draw(st.sampled_from([0.5, 1.0, 2.7, 4.0])),
        "num_classes": draw(st.integers(0, 3)),
    }
    height, width = (patch_size * draw(st.integers(1, 5)) for _ in range(2))
    return options, (draw(st.integers(0, 3)), in_channels, height, width)


@given(shapes())
def test_output_has_the_shape_of_the_input(case: tuple[dict[str, Any], tuple[int, ...]]) -> None:
    options, shape = case
    model = trained(DiT, **options)
    labels = torch.full(shape[:1], -1) if options["num_classes"] else None
    out = model(images(*shape), torch.arange(shape[0]), labels)
    assert (out.shape, out.dtype) == (shape, torch.float32)
    assert out.isfinite().all()


def test_every_block_starts_as_the_identity() -> None:
    model, h = small(DiT), images(2, 9, 16)
    for block in model.blocks:
        assert torch.equal(block(h, images(2, 16)), h)


def test_weights_start_as_in_the_paper() -> None:
    torch.manual_seed(0)
    model = DiT(hidden_size=256, num_heads=4, depth=1, num_classes=500, patch_size=4, in_channels=3)
    drawn = {
        **dict.fromkeys(("time.linear1", "time.linear2", "label"), 0.02),
        # Xavier's uniform has the variance 2 / (in + out); query, key and value are drawn as one map.
        "patch_in": math.sqrt(2 / (48 + 256)),
        "blocks.0.qkv": math.sqrt(2 / (4 * 256)),
        "blocks.0.proj": math.sqrt(2 / (2 * 256)),
        **dict.fromkeys(("blocks.0.mlp_in", "blocks.0.mlp_out"), math.sqrt(2 / (5 * 256))),
        **dict.fromkeys(("blocks.0.modulation", "modulation_out", "patch_out"), 0.0),
    }
    values = model.state_dict()
    assert values.keys() == {f"{n}.{kind}" for n in drawn for kind in ("weight", "bias")} - {"label.bias"}
    for name, std in drawn.items():
        assert abs(values[f"{name}.weight"].std().item() - std) < 0.02 * std or std == 0, name
        assert name == "label" or not values[f"{name}.bias"].any()


def test_positions_match_the_paper() -> None:
    """Compare row 2, column 1 of a grid of 3 x 5 with the formula, for squares of 8 x 8."""
    with torch.autocast("cpu", torch.bfloat16):
        got = positions(3, 5, 8, 8, torch.device("cpu"))
    assert (got.shape, got.dtype) == ((15, 8), torch.float32)
    expected = []
    for place in (2 + (8 - 3) / 2, 1 + (8 - 5) / 2):
        angles = [place / 10000 ** (i / 2) for i in range(2)]
        expected += [math.cos(angle) for angle in angles] + [math.sin(angle) for angle in angles]
    torch.testing.assert_close(got[2 * 5 + 1], torch.tensor(expected), atol=1e-6, rtol=0)
    assert len(torch.unique(got, dim=0)) == 15


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 3), st.integers(0, 3), st.integers(1, 9))
def test_the_middle_has_the_same_positions_in_every_grid(
    rows: int, columns: int, above: int, left: int, side: int
) -> None:
    small = positions(rows, columns, side, 12, torch.device("cpu")).view(rows, columns, 12)
    height, width = rows + 2 * above, columns + 2 * left
    big = positions(height, width, side, 12, torch.device("cpu")).view(height, width, 12)
    assert torch.equal(small, big[above : above + rows, left : left + columns])


@given(st.integers(1, 40), st.integers(1, 4))
def test_the_positions_of_training_squares_are_counted_from_the_corner(side: int, quarters: int) -> None:
    half = sinusoids(torch.arange(side), 2 * quarters)
    expected = torch.cat([half.repeat_interleave(side, dim=0), half.repeat(side, 1)], dim=1)
    assert torch.equal(positions(side, side, side, 4 * quarters, torch.device("cpu")), expected)


def test_a_compiled_network_takes_images_of_other_shapes() -> None:
    torch.compiler.reset()  # graphs of other tests count towards torch's limit for a function
    model = trained(DiT, num_classes=3)
    compiled = torch.compile(model, backend="eager", dynamic=None, fullgraph=True)
    for height, width in ((8, 8), (4, 12), (12, 4), (6, 10), (8, 8), (16, 2)):
        x, t, labels = images(2, 1, height, width), torch.tensor([3, 700]), torch.tensor([1, -1])
        torch.testing.assert_close(compiled(x, t, labels), model(x, t, labels))


def test_each_patch_of_the_output_depends_on_its_own_patch() -> None:
    """The blocks do nothing here, so a change in one patch of the input changes only this patch of the output."""
    model = trained(DiT, patch_size=2, in_channels=3)
    for block in model.blocks:
        nn.init.zeros_(block.modulation.weight)
        nn.init.zeros_(block.modulation.bias)
    x, t = images(1, 3, 6, 4), torch.tensor([9])
    changed = x.clone()
    changed[:, :, 2:4, 0:2] += 1
    different = (model(x, t) != model(changed, t)).any(dim=1)[0]
    expected = torch.zeros(6, 4, dtype=torch.bool)
    expected[2:4, 0:2] = True
    assert torch.equal(different, expected)


def test_a_patch_depends_on_its_position_and_all_other_patches() -> None:
    model = trained(DiT)
    x, t = images(1, 1, 2, 2).repeat(1, 1, 4, 4), torch.tensor([9])  # sixteen equal patches
    out = F.pixel_unshuffle(model(x, t), 2).flatten(2)[0].T
    assert len(torch.unique(out, dim=0)) == 16
    changed = x.clone()
    changed[..., 0, 0] += 1
    assert (model(x, t) != model(changed, t)).any(dim=1).all()


def test_a_block_matches_the_paper() -> None:
    """Compare a block with adaLN-Zero, made of torch's own attention, layer norm and GELU."""
    torch.manual_seed(0)
    block = DiTBlock(12, 3, 24, text_dim=0, dropout=0.0, gradient_checkpointing=False)
    nn.init.normal_(block.modulation.weight, std=0.3)
    attention = nn.MultiheadAttention(12, 3, batch_first=True)
    attention.in_proj_weight, attention.in_proj_bias = block.qkv.weight, block.qkv.bias
    attention.out_proj.load_state_dict(block.proj.state_dict())
    mlp = nn.Sequential(block.mlp_in, nn.GELU("tanh"), block.mlp_out)
    norm = nn.LayerNorm(12, eps=1e-6, elementwise_affine=False)
    h, condition = images(2, 5, 12), images(2, 12)
    scale1, shift1, gate1, scale2, shift2, gate2 = block.modulation(condition).reshape(2, 6, 1, 12).unbind(1)
    inner = norm(h) * (1 + scale1) + shift1
    expected = h + gate1 * attention(inner, inner, inner)[0]
    expected = expected + gate2 * mlp(norm(expected) * (1 + scale2) + shift2)
    torch.testing.assert_close(block(h, condition), expected)


def test_the_model_equals_its_layers_in_sequence() -> None:
    model = trained(DiT, num_classes=2, depth=1, in_channels=2)
    x, t, labels = images(3, 2, 4, 6), torch.tensor([0, 20, 999]), torch.tensor([1, 0, -1])
    condition = F.silu(model.time(t) + model.label.weight[labels])
    patches = F.unfold(x, 2, stride=2).transpose(1, 2)  # shape n, tokens, values; the values of a channel are adjacent
    h = model.patch_in(patches) + positions(2, 3, 4, 16, x.device)  # squares of 8 x 8 pixels have 4 x 4 patches
    h = model.blocks[0](h, condition)
    scale, shift = model.modulation_out(condition)[:, None].chunk(2, dim=2)
    h = model.patch_out(F.layer_norm(h, (16,), eps=1e-6) * (1 + scale) + shift)
    expected = F.fold(h.transpose(1, 2), (4, 6), 2, stride=2)
    torch.testing.assert_close(model(x, t, labels), expected)


@pytest.mark.parametrize("autocast", [False, True])
def test_the_condition_is_float32_with_or_without_autocast(autocast: bool) -> None:
    model, t = small(DiT, num_classes=2), torch.tensor([999, 1000])
    read: list[Tensor] = []
    model.blocks[1].register_forward_pre_hook(lambda module, args: read.extend(args))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(images(2, 1, 8, 8), t, torch.tensor([1, -1]))
    tokens, condition = read
    assert tokens.dtype == torch.float32
    assert torch.equal(condition, F.silu(model.time(t) + model.label.weight[[1, 2]]))


def test_channels_last_changes_nothing() -> None:
    model = trained(DiT, in_channels=3)
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)
    x, t = images(2, 3, 8, 8), torch.tensor([1, 10])
    torch.testing.assert_close(last(x.contiguous(memory_format=torch.channels_last), t), model(x, t))


def test_the_time_embedding_uses_256_sinusoids() -> None:
    model, t = small(DiT), torch.tensor([3, 700])
    hidden = F.silu(model.time.linear1(sinusoids(t, 256)))
    torch.testing.assert_close(model.time(t), model.time.linear2(hidden))
