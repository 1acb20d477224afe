import copy
import inspect
from typing import Any, get_type_hints

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hookdiff.models import UNet
from hookdiff.models.unet import Attention, ResBlock
from tests.conftest import refused

TINY: dict[str, Any] = {"channels": 8, "num_res_blocks": 1, "head_dim": 8}


def tiny(**changes: Any) -> UNet:
    torch.manual_seed(0)
    return UNet(**{**TINY, **changes})


def awake(model: UNet) -> UNet:
    """Return the model with no layer left at zero, as after some training."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return model


def images(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def grad_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


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
    return options, (draw(st.integers(0, 3)), in_channels, height, width)


@given(shapes())
def test_output_has_the_shape_of_the_input(case: tuple[dict[str, Any], tuple[int, ...]]) -> None:
    options, shape = case
    model = awake(UNet(**options))
    out = model(images(*shape), torch.arange(shape[0]))
    assert out.shape == shape
    assert out.dtype == torch.float32
    assert out.isfinite().all()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"image_size": 32, "in_channels": 3, "channel_mults": (1, 2, 2), "attention_resolutions": (16, 8)},
        {"image_size": 64, "in_channels": 3, "channel_mults": (1, 2, 3, 4), "attention_resolutions": (16, 8)},
    ],
)
def test_starts_at_exactly_zero(options: dict[str, Any]) -> None:
    model = UNet(**{"channels": 32, **options})
    size = options.get("image_size", 8)
    x = images(1, model.in_channels, size, size)
    assert torch.equal(model(x, torch.tensor([500])), torch.zeros_like(x))


def test_arguments_are_plain_keywords_with_defaults() -> None:
    parameters = inspect.signature(UNet).parameters
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in parameters.values())
    hints = get_type_hints(UNet.__init__)
    assert {hints[name] for name in parameters} == {bool, int, float, tuple[int, ...], tuple[int, ...] | None}


@pytest.mark.parametrize("mults", [(1,), (1, 2), (2, 1, 3)])
def test_every_parameter_is_trained(mults: tuple[int, ...]) -> None:
    model = tiny(channel_mults=mults, attention_resolutions=(8,), num_res_blocks=2, in_channels=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, t = images(4, 3, 8, 8), torch.tensor([0, 10, 100, 999])

    def backward() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(F.mse_loss(model(x, t), x.flip(0)))

    backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    optimizer.step()  # wakes the output,
    backward()
    optimizer.step()  # and then the residual branches
    backward()
    assert [name for name, p in model.named_parameters() if not grad_of(p).any()] == []


def test_overfits_a_batch_and_learns_to_read_the_time() -> None:
    model = tiny(channels=16)
    x, target = images(1, 1, 8, 8).expand(4, 1, 8, 8), images(4, 1, 8, 8)
    t = torch.tensor([0, 1, 500, 999])  # the four differ in nothing else
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        torch.autograd.backward(F.mse_loss(model(x, t), target))
        optimizer.step()
    assert F.mse_loss(model(x, t), target) < 0.05
    assert F.mse_loss(model(x, t.flip(0)), target) > 0.5


def test_bf16_autocast_keeps_999_apart_from_1000() -> None:
    model = awake(tiny())
    x, t = images(1, 1, 8, 8).expand(2, 1, 8, 8), torch.tensor([999, 1000])
    expected = model.time(t)
    with torch.autocast("cpu", torch.bfloat16):
        out, time = model(x, t), model.time(t)
        assert torch.equal(out, model(x, t.float()))
    assert out.dtype == torch.float32
    assert not torch.equal(out[0], out[1])
    # Not just any difference: had the time been rounded on the way, that of the embedding would be wrong.
    step, expected_step = time[0] - time[1], expected[0] - expected[1]
    assert (step - expected_step).norm() < 0.1 * expected_step.norm()


def test_a_model_cast_whole_keeps_999_apart_from_1000() -> None:
    model = awake(tiny()).bfloat16()
    x = images(1, 1, 8, 8).bfloat16().expand(2, 1, 8, 8)
    out = model(x, torch.tensor([999, 1000]))
    assert out.dtype == torch.bfloat16
    assert not torch.equal(out[0], out[1])


@pytest.mark.parametrize(
    "options",
    [
        {"channel_mults": (1, 2)},
        {"channel_mults": (2,), "attention_resolutions": (8,), "in_channels": 1},
        {"channel_mults": (1, 2, 1, 2), "attention_resolutions": (8, 2), "num_res_blocks": 2},  # down to 1x1
    ],
)
def test_channels_last_stays_and_changes_nothing(options: dict[str, Any]) -> None:
    model = awake(tiny(**{"in_channels": 3, **options}))
    x, t = images(4, model.in_channels, 8, 8), torch.tensor([1, 10, 100, 1000])
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)
    seen: list[Tensor] = []
    for module in last.modules():
        if isinstance(module, ResBlock):
            module.register_forward_hook(lambda module, args, out: seen.extend((args[0], out)))

    out = last(x.contiguous(memory_format=torch.channels_last), t)
    assert all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in (*seen, out))
    expected = model(x, t)
    assert expected.is_contiguous()
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)

    out.square().sum().backward()
    expected.square().sum().backward()
    for (name, ours), theirs in zip(last.named_parameters(), model.parameters(), strict=True):
        scale = grad_of(theirs).abs().max().item()
        message = f"the gradient of {name} differs"
        torch.testing.assert_close(
            grad_of(ours), grad_of(theirs), atol=1e-4 * scale, rtol=1e-3, msg=message, check_stride=False
        )


def test_a_mirrored_image_gives_a_mirrored_output() -> None:
    """Nothing moves the image sideways: resampling is centred, whatever the number of levels."""
    model = awake(tiny(channel_mults=(1, 1, 2), attention_resolutions=(4,)))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.weight.add_(module.weight.flip(-1))
    x, t = images(2, 1, 8, 16), torch.tensor([3, 700])
    torch.testing.assert_close(model(x.flip(-1), t), model(x, t).flip(-1), atol=1e-4, rtol=1e-4)


def test_images_of_a_batch_do_not_see_each_other() -> None:
    model = awake(tiny())
    x, t = images(3, 1, 8, 8), torch.tensor([0, 20, 999])
    alone = torch.cat([model(x[i : i + 1], t[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(model(x, t), alone, atol=1e-5, rtol=1e-4)


def test_dropout_acts_in_training_only() -> None:
    model, dry = awake(tiny(dropout=0.5)), awake(tiny())
    x, t = images(2, 1, 8, 8), torch.tensor([5, 50])
    assert not torch.equal(model(x, t), model(x, t))
    assert torch.equal(model.eval()(x, t), dry(x, t))


def test_dropout_draws_from_the_default_generator_so_checkpointing_repeats_it() -> None:
    model = awake(tiny(dropout=0.5))
    x, t = images(2, 1, 8, 8), torch.tensor([5, 50])

    def gradients(recompute: bool) -> list[Tensor]:
        torch.manual_seed(3)
        model.zero_grad()
        out = checkpoint(model, x, t, use_reentrant=False) if recompute else model(x, t)
        out.square().sum().backward()
        return [grad_of(p).clone() for p in model.parameters()]

    assert all(map(torch.equal, gradients(True), gradients(False)))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("autocast", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(dropout: float, autocast: bool) -> None:
    options = {"dropout": dropout, "num_classes": 3}
    plain, saving = awake(tiny(**options)), awake(tiny(**options, gradient_checkpointing=True))
    saving.load_state_dict(plain.state_dict())
    x, t, labels = images(4, 1, 8, 8), torch.tensor([0, 5, 50, 999]), torch.tensor([0, -1, 2, 2])
    calls = {"plain": 0, "saving": 0}
    for name, model in (("plain", plain), ("saving", saving)):

        def count(*_: Any, name: str = name) -> None:
            calls[name] += 1

        for module in model.modules():
            if isinstance(module, ResBlock):
                module.conv1.register_forward_hook(count)
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(x, t, labels).square().sum()
        torch.autograd.backward(loss)
    for (name, ours), theirs in zip(saving.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(grad_of(ours), grad_of(theirs)), name
    blocks = calls["plain"]
    assert calls["saving"] == 2 * blocks
    with torch.no_grad():
        saving(x, t, labels)
    saving.eval()(x, t, labels)
    assert calls["saving"] == 4 * blocks  # nothing is kept there, so nothing is computed twice


def test_minus_one_is_the_last_row() -> None:
    model = awake(tiny(num_classes=3))
    x, t = images(2, 1, 8, 8), torch.tensor([5, 50])
    none = model(x, t, torch.tensor([-1, -1]))
    assert not torch.allclose(none, model(x, t, torch.tensor([1, 1])))
    with torch.no_grad():
        model.label.weight[1] = model.label.weight[3]
    assert torch.equal(none, model(x, t, torch.tensor([1, 1])))


def test_the_class_is_added_to_the_time_before_any_block_reads_it() -> None:
    model = awake(tiny(num_classes=3))
    t, labels = torch.tensor([5, 50]), torch.tensor([2, 0])
    read: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, ResBlock):
            module.register_forward_pre_hook(lambda module, args: read.append(args[1]))
    model(images(2, 1, 8, 8), t, labels)
    expected = F.silu(model.time(t) + model.label.weight[labels])
    assert len(read) == 6
    assert all(torch.equal(time, expected) for time in read)


def test_labels_without_classes_and_classes_without_labels() -> None:
    x, t = images(2, 1, 8, 8), torch.tensor([5, 50])
    with refused(ValueError, "num_classes=3", "model(x, timesteps, labels)"):
        tiny(num_classes=3)(x, t)
    with refused(ValueError, "num_classes"):
        tiny()(x, t, torch.tensor([0, 1]))
    with refused(ValueError, "labels", 3, -1, 2):
        tiny(num_classes=3)(x, t, torch.tensor([0, 3]))


def test_learns_to_read_the_class() -> None:
    model = tiny(channels=16, num_classes=3)
    x, target = images(1, 1, 8, 8).expand(4, 1, 8, 8), images(4, 1, 8, 8)
    t, labels = torch.full((4,), 500), torch.tensor([0, 1, 2, -1])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        torch.autograd.backward(F.mse_loss(model(x, t, labels), target))
        optimizer.step()
    assert F.mse_loss(model(x, t, labels), target) < 0.05
    assert F.mse_loss(model(x, t, labels.flip(0)), target) > 0.5


@pytest.mark.slow
def test_compiles_in_place_to_the_same() -> None:
    model = awake(tiny(num_classes=3))
    x, t, labels = images(2, 1, 8, 8), torch.tensor([5, 50]), torch.tensor([2, -1])
    expected = model(x, t, labels)
    keys = list(model.state_dict())
    model.compile(fullgraph=True)
    torch.testing.assert_close(model(x, t, labels), expected, atol=1e-4, rtol=1e-4)
    assert list(model.state_dict()) == keys


def test_state_dict_round_trip() -> None:
    model, other = awake(tiny()), UNet(**TINY)
    x, t = images(2, 1, 8, 8), torch.tensor([5, 50])
    assert not torch.equal(model(x, t), other(x, t))
    other.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(model(x, t), other(x, t))


def test_names_are_stable() -> None:
    model = tiny(num_res_blocks=2)
    assert tiny(num_classes=1).state_dict().keys() - tiny().state_dict().keys() == {"label.weight"}
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]  # no buffers
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
    model = tiny(channel_mults=(1, 1, 1), num_res_blocks=2)
    blocks = [(name, module) for name, module in model.named_modules() if isinstance(module, ResBlock)]
    ran: list[str] = []
    for name, module in blocks:
        module.register_forward_hook(lambda module, args, out, name=name: ran.append(name))
    model(images(1, 1, 8, 8), torch.tensor([1]))
    assert ran == [name for name, _ in blocks]


def test_the_way_up_mirrors_the_way_down() -> None:
    model = awake(tiny(num_res_blocks=2))
    shown: dict[str, Tensor] = {}
    made: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, ResBlock):

            def keep(module: nn.Module, args: tuple[Tensor, ...], out: Tensor, name: str = name) -> None:
                shown[name], made[name] = args[0], out

            module.register_forward_hook(keep)
    model(images(1, 1, 8, 8), torch.tensor([1]))
    for level in (0, 1):
        for i in (0, 1):
            skip = made[f"down.{level}.{1 - i}"]
            assert torch.equal(shown[f"up.{level}.{i}"][:, -skip.shape[1] :], skip)


def test_a_block_is_scaled_and_shifted_by_the_time() -> None:
    torch.manual_seed(0)
    block = ResBlock(4, 8, 6, num_heads=0, dropout=0.0, gradient_checkpointing=False)
    x, time = images(2, 4, 3, 5), images(2, 6)
    scale, shift = block.time(time).reshape(2, 2, 8, 1, 1).unbind(1)
    h = F.group_norm(block.conv1(F.silu(F.group_norm(x, 1))), 2)
    expected = block.skip(x) + block.conv2(F.silu(h * (1 + scale) + shift))
    torch.testing.assert_close(block(x, time), expected)


def test_attention_is_that_of_torch() -> None:
    torch.manual_seed(0)
    ours, theirs = Attention(12, 3), nn.MultiheadAttention(12, 3, batch_first=True)
    theirs.load_state_dict(
        {
            "in_proj_weight": ours.qkv.weight,
            "in_proj_bias": torch.zeros(36),
            "out_proj.weight": ours.proj.weight,
            "out_proj.bias": ours.proj.bias,
        }
    )
    x = images(2, 12, 4, 2)
    tokens = F.group_norm(x, 3).reshape(2, 12, 8).permute(0, 2, 1)
    expected = x + theirs(tokens, tokens, tokens)[0].permute(0, 2, 1).reshape(x.shape)
    torch.testing.assert_close(ours(x), expected)


def test_can_be_built_on_the_meta_device_and_drawn_later() -> None:
    with torch.device("meta"):
        model = UNet()
    assert all(p.is_meta for p in model.parameters())
    x, t = images(2, 1, 8, 8), torch.tensor([1, 2])
    assert model(x.to("meta"), t.to("meta")).shape == x.shape
    model.to_empty(device="cpu")
    torch.manual_seed(4)
    model.reset_parameters()
    assert torch.equal(model(x, t), torch.zeros_like(x))
    torch.manual_seed(4)
    fresh = UNet()
    fresh.reset_parameters()  # the second draw of this seed,
    assert model.state_dict().keys() == fresh.state_dict().keys()
    torch.manual_seed(4)
    fresh.reset_parameters()  # and the first, with nothing left over from before
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))


@pytest.mark.parametrize(
    ("options", "facts"),  # the last fact is the nearest that fits
    [
        ({"in_channels": 0}, ("in_channels=0", 1)),
        ({"channels": -8}, ("channels=-8", 1)),
        ({"num_res_blocks": 0}, ("num_res_blocks=0", 1)),
        ({"head_dim": 0}, ("head_dim=0", 1)),
        ({"channel_mults": ()}, ("channel_mults", (1,))),
        ({"channel_mults": (1, 0)}, ("channel_mults=(1, 0)", (1, 1))),
        ({"image_size": 30, "channel_mults": (1, 2, 2)}, ("image_size=30", 8, 4, 3, "channel_mults", 28, 32)),
        ({"image_size": 4}, ("image_size=4", 2, "channel_mults", 8)),
        ({"image_size": 9, "channel_mults": (1, 1, 1, 1, 1)}, ("image_size=9", 8, 5, "channel_mults", 16)),
        ({"attention_resolutions": (8, 16)}, ("attention_resolutions=(8, 16)", 16, 4, 8)),
        ({"channels": 48, "attention_resolutions": (4, 8)}, ("head_dim=32", 48, 96, 24)),
        ({"num_classes": -1}, ("num_classes=-1", 0)),
        ({"dropout": 1.0}, ("dropout=1.0", 0.99)),
        ({"dropout": -0.1}, ("dropout=-0.1", 0.0)),
        ({"dropout": float("nan")}, ("dropout=nan", 0.0)),
    ],
)
def test_refuses_what_does_not_fit(options: dict[str, Any], facts: tuple[object, ...]) -> None:
    with refused(ValueError, *facts):
        UNet(**options)


def test_the_nearest_head_dim_is_found_among_a_great_many_channels() -> None:
    with refused(ValueError, "head_dim=33", 32), torch.device("meta"):
        UNet(channels=2**40, head_dim=33)


def test_head_dim_matters_only_where_there_is_attention() -> None:
    UNet(channels=10, head_dim=32, attention_resolutions=())


@pytest.mark.parametrize(
    ("shape", "timesteps", "facts"),
    [
        ((2, 3, 8, 8), torch.tensor([1, 2]), ("(2, 3, 8, 8)", "(n, 1, h, w)", "in_channels=1")),
        ((1, 8, 8), torch.tensor([1]), ("(1, 8, 8)", "(n, 1, h, w)", "in_channels=1")),
        ((1, 1, 30, 45), torch.tensor([1]), ("30x45", 4, 3, "channel_mults", 28, 32, 44, 48)),
        ((1, 1, 8, 2), torch.tensor([1]), ("8x2", 4, 3, "channel_mults", 8)),
        ((1, 1, 0, 8), torch.tensor([1]), ("0x8", 4, 3, "channel_mults", 8)),
        ((2, 1, 8, 8), torch.tensor([1]), ("timesteps", "(1,)", "(2,)")),
        ((1, 1, 8, 8), torch.tensor(1), ("timesteps", "()", "(1,)")),
        ((1, 1, 8, 8), torch.tensor([999]).bfloat16(), ("timesteps", "torch.bfloat16", "float32")),
    ],
)
def test_refuses_inputs_that_do_not_fit(shape: tuple[int, ...], timesteps: Tensor, facts: tuple[str, ...]) -> None:
    model = tiny(channel_mults=(1, 1, 1))
    with refused(ValueError, *facts):
        model(torch.zeros(shape), timesteps)


@pytest.mark.parametrize(
    ("size", "mults", "attends"),
    [(8, (1, 2), 4), (28, (1, 2, 2), 7), (64, (1, 2), 32), (128, (1, 2), None), (8, (2,), 8)],
)
def test_attention_is_on_the_last_level_by_default(size: int, mults: tuple[int, ...], attends: int | None) -> None:
    with torch.device("meta"):
        asked = UNet(image_size=size, channel_mults=mults, attention_resolutions=() if attends is None else (attends,))
        assert UNet(image_size=size, channel_mults=mults).state_dict().keys() == asked.state_dict().keys()
