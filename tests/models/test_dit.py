import copy
import inspect
import math
from typing import Any, get_type_hints

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hookdiff.models import DiT
from hookdiff.models.dit import DiTBlock, positions
from hookdiff.models.layers import sinusoids
from tests.conftest import refused

TINY: dict[str, Any] = {"hidden_size": 16, "depth": 2, "num_heads": 2}
SIZES = {"S": (384, 12, 6), "B": (768, 12, 12), "L": (1024, 24, 16), "XL": (1152, 28, 16)}


def tiny(**changes: Any) -> DiT:
    torch.manual_seed(0)
    return DiT(**{**TINY, **changes})


def awake(model: DiT) -> DiT:
    """Return the model with no layer left at zero, as after some training."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.2)
    return model


def images(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def grad_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


@pytest.mark.parametrize(("name", "millions"), [("S", 33), ("B", 130), ("L", 458), ("XL", 675)])
def test_the_sizes_of_the_paper(name: str, millions: int) -> None:
    hidden_size, depth, num_heads = SIZES[name]
    with torch.device("meta"):
        model = DiT(
            in_channels=4,
            image_size=32,
            patch_size=2,
            hidden_size=hidden_size,
            depth=depth,
            num_heads=num_heads,
            num_classes=1000,
        )
    count = sum(parameter.numel() for parameter in model.parameters())
    assert round(count / 1e6) == millions
    if name == "XL":
        # The authors' count has the fixed positions of 16 x 16 patches and as many outputs again for the variance.
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
    model = awake(DiT(**options))
    labels = torch.full(shape[:1], -1) if options["num_classes"] else None
    out = model(images(*shape), torch.arange(shape[0]), labels)
    assert out.shape == shape
    assert out.dtype == torch.float32
    assert out.isfinite().all()


@pytest.mark.parametrize(
    ("options", "size"), [({}, 8), ({"patch_size": 4, "in_channels": 3}, 32), ({"image_size": 28}, 28)]
)
def test_starts_at_exactly_zero(options: dict[str, Any], size: int) -> None:
    model = DiT(num_classes=10, **options)
    x = images(2, model.in_channels, size, size)
    assert torch.equal(model(x, torch.tensor([0, 500]), torch.tensor([3, -1])), torch.zeros_like(x))


def test_every_block_starts_as_the_identity() -> None:
    model, h = tiny(), images(2, 9, 16)
    for block in model.blocks:
        assert torch.equal(block(h, images(2, 16)), h)


def test_weights_start_as_in_the_paper() -> None:
    torch.manual_seed(0)
    model = DiT(hidden_size=256, num_heads=4, depth=1, num_classes=500, patch_size=4, in_channels=3)
    drawn = {
        "time.linear1": 0.02,
        "time.linear2": 0.02,
        "label": 0.02,
        # Xavier's uniform has the variance 2 / (in + out); all four maps of attention are drawn as one.
        "patch_in": math.sqrt(2 / (48 + 256)),
        "blocks.0.qkv": math.sqrt(2 / (4 * 256)),
        "blocks.0.proj": math.sqrt(2 / (2 * 256)),
        "blocks.0.mlp_in": math.sqrt(2 / (5 * 256)),
        "blocks.0.mlp_out": math.sqrt(2 / (5 * 256)),
        "blocks.0.modulation": 0.0,
        "modulation_out": 0.0,
        "patch_out": 0.0,
    }
    values = model.state_dict()
    assert values.keys() == {f"{n}.{kind}" for n in drawn for kind in ("weight", "bias")} - {"label.bias"}
    for name, std in drawn.items():
        assert abs(values[f"{name}.weight"].std().item() - std) < 0.02 * std or std == 0, name
        assert name == "label" or not values[f"{name}.bias"].any()


def test_arguments_are_plain_keywords_with_defaults() -> None:
    parameters = inspect.signature(DiT).parameters
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in parameters.values())
    hints = get_type_hints(DiT.__init__)
    assert {hints[name] for name in parameters} == {bool, int, float}


def test_every_parameter_is_trained() -> None:
    model = tiny(in_channels=3, num_classes=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, t, labels = images(4, 3, 8, 8), torch.tensor([0, 10, 100, 999]), torch.tensor([0, 1, -1, 0])

    def backward() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(F.mse_loss(model(x, t, labels), x.flip(0)))

    backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    for _ in range(3):  # wakes the output, then the last norm, then the gates
        optimizer.step()
        backward()
    assert [name for name, p in model.named_parameters() if not grad_of(p).any()] == []
    assert grad_of(model.label.weight).any(dim=1).all()  # the row for no class, too


def test_overfits_a_batch_and_learns_to_read_time_and_class() -> None:
    model = tiny(hidden_size=32, patch_size=4, num_classes=2)
    x, target = images(1, 1, 8, 8).expand(4, 1, 8, 8), images(4, 1, 8, 8)
    t, labels = torch.tensor([0, 0, 999, 999]), torch.tensor([0, 1, 1, -1])  # the four differ in nothing else
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        torch.autograd.backward(F.mse_loss(model(x, t, labels), target))
        optimizer.step()
    assert F.mse_loss(model(x, t, labels), target) < 0.05
    assert F.mse_loss(model(x, t.flip(0), labels), target) > 0.2
    assert F.mse_loss(model(x, t, labels.flip(0)), target) > 0.2


def test_minus_one_is_the_last_row() -> None:
    model = awake(tiny(num_classes=3))
    x, t = images(2, 1, 8, 8), torch.tensor([5, 50])
    none = model(x, t, torch.tensor([-1, -1]))
    assert not torch.allclose(none, model(x, t, torch.tensor([1, 1])))
    with torch.no_grad():
        model.label.weight[1] = model.label.weight[3]
    assert torch.equal(none, model(x, t, torch.tensor([1, 1])))


def test_labels_without_classes_and_classes_without_labels() -> None:
    x, t = images(2, 1, 8, 8), torch.tensor([5, 50])
    with refused(ValueError, "num_classes=3", "model(x, timesteps, labels)"):
        tiny(num_classes=3)(x, t)
    with refused(ValueError, "num_classes"):
        tiny()(x, t, torch.tensor([0, 1]))
    with refused(ValueError, "labels", 3, -1, 2):
        tiny(num_classes=3)(x, t, torch.tensor([0, 3]))


def test_positions_are_those_of_the_paper() -> None:
    """Row 2, column 1 of a grid of 3 x 5, from the formula, one number at a time."""
    got = positions(3, 5, 8, torch.device("cpu"))
    assert (got.shape, got.dtype) == ((15, 8), torch.float32)
    expected = []
    for place in (2, 1):
        angles = [place / 10000 ** (i / 2) for i in range(2)]
        expected += [math.cos(angle) for angle in angles] + [math.sin(angle) for angle in angles]
    torch.testing.assert_close(got[2 * 5 + 1], torch.tensor(expected), atol=1e-6, rtol=0)
    assert len(torch.unique(got, dim=0)) == 15


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.integers(1, 6))
def test_a_place_is_the_same_on_any_grid(rows: int, columns: int, more_rows: int, more_columns: int) -> None:
    small = positions(rows, columns, 12, torch.device("cpu")).view(rows, columns, 12)
    big = positions(rows + more_rows, columns + more_columns, 12, torch.device("cpu"))
    assert torch.equal(small, big.view(rows + more_rows, columns + more_columns, 12)[:rows, :columns])


def test_positions_stay_float32_and_out_of_the_state() -> None:
    model = tiny()
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]
    assert list(model.buffers()) == []
    with torch.autocast("cpu", torch.bfloat16):
        assert positions(2, 2, 8, torch.device("cpu")).dtype == torch.float32


def test_a_patch_is_one_token_and_comes_back_to_its_place() -> None:
    """With blocks that do nothing and a linear map back, each patch of the output depends on its own alone."""
    model = awake(tiny(patch_size=2, in_channels=3))
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


def test_a_patch_knows_its_place_and_sees_all_others() -> None:
    model = awake(tiny())
    x, t = images(1, 1, 2, 2).repeat(1, 1, 4, 4), torch.tensor([9])  # sixteen patches that are all alike
    out = F.pixel_unshuffle(model(x, t), 2).flatten(2)[0].T
    assert len(torch.unique(out, dim=0)) == 16
    changed = x.clone()
    changed[..., 0, 0] += 1
    assert (model(x, t) != model(changed, t)).any(dim=1).all()


def test_a_block_is_that_of_the_paper() -> None:
    """adaLN-Zero, with torch's own attention, layer norm and GELU."""
    torch.manual_seed(0)
    block = DiTBlock(12, 3, 24, dropout=0.0, gradient_checkpointing=False)
    nn.init.normal_(block.modulation.weight, std=0.3)
    attention = nn.MultiheadAttention(12, 3, batch_first=True)
    attention.load_state_dict(
        {
            "in_proj_weight": block.qkv.weight,
            "in_proj_bias": block.qkv.bias,
            "out_proj.weight": block.proj.weight,
            "out_proj.bias": block.proj.bias,
        }
    )
    mlp = nn.Sequential(block.mlp_in, nn.GELU("tanh"), block.mlp_out)
    norm = nn.LayerNorm(12, eps=1e-6, elementwise_affine=False)
    h, condition = images(2, 5, 12), images(2, 12)
    scale1, shift1, gate1, scale2, shift2, gate2 = block.modulation(condition).reshape(2, 6, 1, 12).unbind(1)
    inner = norm(h) * (1 + scale1) + shift1
    expected = h + gate1 * attention(inner, inner, inner)[0]
    expected = expected + gate2 * mlp(norm(expected) * (1 + scale2) + shift2)
    torch.testing.assert_close(block(h, condition), expected)


def test_the_whole_is_its_parts() -> None:
    model = awake(tiny(num_classes=2, depth=1, in_channels=2))
    x, t, labels = images(3, 2, 4, 6), torch.tensor([0, 20, 999]), torch.tensor([1, 0, -1])
    condition = F.silu(model.time(t) + model.label.weight[labels])
    patches = F.unfold(x, 2, stride=2).transpose(1, 2)  # n tokens values, the values of a channel side by side
    h = model.patch_in(patches) + positions(2, 3, 16, x.device)
    h = model.blocks[0](h, condition)
    scale, shift = model.modulation_out(condition)[:, None].chunk(2, dim=2)
    h = model.patch_out(F.layer_norm(h, (16,), eps=1e-6) * (1 + scale) + shift)
    expected = F.fold(h.transpose(1, 2), (4, 6), 2, stride=2)
    torch.testing.assert_close(model(x, t, labels), expected)


def test_images_of_a_batch_do_not_see_each_other() -> None:
    model = awake(tiny(num_classes=4))
    x, t, labels = images(3, 1, 8, 8), torch.tensor([0, 20, 999]), torch.tensor([3, -1, 0])
    alone = torch.cat([model(x[i : i + 1], t[i : i + 1], labels[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(model(x, t, labels), alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("autocast", [False, True])
def test_checkpointing_gives_the_same_gradients(dropout: float, autocast: bool) -> None:
    plain = awake(tiny(dropout=dropout, num_classes=3))
    saving = awake(tiny(dropout=dropout, num_classes=3, gradient_checkpointing=True))
    saving.load_state_dict(plain.state_dict())
    x, t, labels = images(4, 1, 8, 8), torch.tensor([0, 5, 50, 999]), torch.tensor([0, -1, 2, 2])
    calls = {"plain": 0, "saving": 0}
    for name, model in (("plain", plain), ("saving", saving)):

        def count(*_: Any, name: str = name) -> None:
            calls[name] += 1

        for block in model.blocks:
            assert isinstance(block, DiTBlock)
            block.qkv.register_forward_hook(count)
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(x, t, labels).square().sum()
        torch.autograd.backward(loss)
    for (name, ours), theirs in zip(saving.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(grad_of(ours), grad_of(theirs)), name
    assert calls == {"plain": 2, "saving": 4}
    with torch.no_grad():
        saving(x, t, labels)
    saving.eval()(x, t, labels)
    assert calls["saving"] == 8  # nothing is kept there, so nothing is computed twice


def test_dropout_acts_in_training_only() -> None:
    model, dry = awake(tiny(dropout=0.5)), awake(tiny())
    x, t = images(2, 1, 8, 8), torch.tensor([5, 50])
    assert not torch.equal(model(x, t), model(x, t))
    assert torch.equal(model.eval()(x, t), dry(x, t))


def test_bf16_autocast_keeps_the_dtype_and_999_apart_from_1000() -> None:
    model = awake(tiny(num_classes=2))
    x, t, labels = images(1, 1, 8, 8).expand(2, 1, 8, 8), torch.tensor([999, 1000]), torch.tensor([1, 1])
    expected = model(x, t, labels)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x, t, labels)
        assert torch.equal(out, model(x, t.float(), labels))
    assert out.dtype == torch.float32
    assert not torch.equal(out[0], out[1])
    assert (out - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("autocast", [False, True])
def test_the_condition_is_float32_whatever_the_autocast(autocast: bool) -> None:
    model, t = tiny(num_classes=2), torch.tensor([999, 1000])
    read: list[Tensor] = []
    model.blocks[1].register_forward_pre_hook(lambda module, args: read.extend(args))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(images(2, 1, 8, 8), t, torch.tensor([1, -1]))
    tokens, condition = read
    assert tokens.dtype == torch.float32
    assert torch.equal(condition, F.silu(model.time(t) + model.label.weight[[1, 2]]))


def test_a_model_cast_whole_keeps_its_dtype() -> None:
    model = awake(tiny()).bfloat16()
    x = images(1, 1, 8, 8).bfloat16().expand(2, 1, 8, 8)
    out = model(x, torch.tensor([0, 1000]))
    assert out.dtype == torch.bfloat16
    assert not torch.equal(out[0], out[1])


def test_channels_last_changes_nothing() -> None:
    model = awake(tiny(in_channels=3))
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)
    x, t = images(2, 3, 8, 8), torch.tensor([1, 10])
    torch.testing.assert_close(last(x.contiguous(memory_format=torch.channels_last), t), model(x, t))


def test_can_be_built_on_the_meta_device_and_drawn_later() -> None:
    with torch.device("meta"):
        model = DiT(num_classes=3)
    assert all(p.is_meta for p in model.parameters())
    x, t, labels = images(2, 1, 8, 8), torch.tensor([1, 2]), torch.tensor([0, -1])
    assert model(x.to("meta"), t.to("meta"), labels.to("meta")).shape == x.shape
    model.to_empty(device="cpu")
    torch.manual_seed(4)
    model.reset_parameters()
    assert torch.equal(model(x, t, labels), torch.zeros_like(x))
    fresh = DiT(num_classes=3)
    torch.manual_seed(4)
    fresh.reset_parameters()
    assert model.state_dict().keys() == fresh.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))


def test_time_is_read_from_256_sinusoids() -> None:
    model, t = tiny(), torch.tensor([3, 700])
    hidden = F.silu(model.time.linear1(sinusoids(t, 256)))
    torch.testing.assert_close(model.time(t), model.time.linear2(hidden))


@pytest.mark.slow
def test_compiles_in_place_to_the_same() -> None:
    model = awake(tiny(num_classes=3))
    x, t, labels = images(2, 1, 8, 8), torch.tensor([5, 50]), torch.tensor([2, -1])
    expected = model(x, t, labels)
    keys = list(model.state_dict())
    model.compile(fullgraph=True)
    torch.testing.assert_close(model(x, t, labels), expected, atol=1e-5, rtol=1e-4)
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize(
    ("options", "facts"),  # the last fact is the nearest that fits
    [
        ({"in_channels": 0}, ("in_channels=0", 1)),
        ({"patch_size": 0}, ("patch_size=0", 1)),
        ({"depth": -1}, ("depth=-1", 1)),
        ({"num_heads": 0}, ("num_heads=0", 1)),
        ({"num_classes": -1}, ("num_classes=-1", 0)),
        ({"image_size": 28, "patch_size": 8}, ("image_size=28", "patch_size=8", 24, 32, "patch_size=7")),
        ({"hidden_size": 30}, ("hidden_size=30", 4, 28, 32)),
        ({"hidden_size": 64, "num_heads": 6}, ("num_heads=6", "hidden_size=64", 4)),
        ({"mlp_ratio": 0.0}, ("mlp_ratio=0.0", 4.0)),
        ({"mlp_ratio": float("nan")}, ("mlp_ratio=nan", 4.0)),
        ({"dropout": 1.5}, ("dropout=1.5", 0.99)),
    ],
)
def test_refuses_what_does_not_fit(options: dict[str, Any], facts: tuple[object, ...]) -> None:
    with refused(ValueError, *facts):
        DiT(**options)


@pytest.mark.parametrize(
    ("shape", "timesteps", "facts"),
    [
        ((2, 3, 8, 8), torch.tensor([1, 2]), ("(2, 3, 8, 8)", "(n, 1, h, w)", "in_channels=1")),
        ((1, 1, 30, 44), torch.tensor([1]), ("30x44", 4, "patch_size", 28, 32, 44)),
        ((2, 1, 8, 8), torch.tensor([1]), ("timesteps", "(1,)", "(2,)")),
    ],
)
def test_refuses_inputs_that_do_not_fit(shape: tuple[int, ...], timesteps: Tensor, facts: tuple[object, ...]) -> None:
    with refused(ValueError, *facts):
        tiny(patch_size=4)(torch.zeros(shape), timesteps)
