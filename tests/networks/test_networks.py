"""Test facts that hold for both the U-Net and the DiT."""

import inspect
from typing import Any, get_type_hints

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hookdiff_networks import DiT, UNet
from hookdiff_networks.layers import Block
from tests.conftest import refused, wide
from tests.networks.conftest import both, grad_of, images, small, text_for, trained


@both
def test_arguments_are_plain_keywords_with_defaults(kind: Any) -> None:
    parameters = inspect.signature(kind).parameters
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in parameters.values())
    hints = get_type_hints(kind.__init__)
    tuples = {tuple[int, ...], tuple[int, ...] | None} if kind is UNet else set()
    assert {hints[name] for name in parameters} == {bool, int, float} | tuples


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (UNet, {}),
        (UNet, {"image_size": 32, "in_channels": 3, "channel_mults": (1, 2, 2), "attention_resolutions": (16, 8)}),
        *wide(
            (
                UNet,
                {"image_size": 64, "in_channels": 3, "channel_mults": (1, 2, 3, 4), "attention_resolutions": (16, 8)},
            )
        ),
        (DiT, {}),
        (DiT, {"image_size": 32, "in_channels": 3, "patch_size": 4}),
        (DiT, {"image_size": 28}),
    ],
)
def test_the_initial_output_is_exactly_zero(kind: Any, options: dict[str, Any]) -> None:
    model, size = kind(num_classes=10, **options), options.get("image_size", 8)
    x = images(2, model.in_channels, size, size)
    assert torch.equal(model(x, torch.tensor([0, 500]), torch.tensor([3, -1])), torch.zeros_like(x))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (UNet, {"channel_mults": (1,), "attention_resolutions": (8,), "num_res_blocks": 2}),
        (UNet, {"channel_mults": (1, 2), "attention_resolutions": (8,), "num_res_blocks": 2}),
        (UNet, {"channel_mults": (2, 1, 3), "attention_resolutions": (8,), "num_res_blocks": 2}),
        (UNet, {"text_dim": 3}),
        (DiT, {}),
        (DiT, {"text_dim": 3}),
    ],
)
def test_every_parameter_is_trained(kind: Any, options: dict[str, Any]) -> None:
    model = small(kind, in_channels=3, num_classes=2, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, t, labels = images(4, 3, 8, 8), torch.tensor([0, 10, 100, 999]), torch.tensor([0, 1, -1, 0])

    def backward() -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x, t, labels, **text_for(model, 4)), x.flip(0)).backward()

    backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    for _ in range(3):  # gradients reach the output first, then its norm, then residual branches and gates
        optimizer.step()
        backward()
    assert [name for name, p in model.named_parameters() if not grad_of(p).any()] == []
    assert grad_of(model.label.weight).any(dim=1).all()  # includes the row for "no class"


@pytest.mark.wide
@pytest.mark.parametrize(
    ("kind", "options", "steps"), [(UNet, {"channels": 16}, 60), (DiT, {"hidden_size": 32, "patch_size": 4}, 150)]
)
def test_training_overfits_a_batch_by_time_and_class(kind: Any, options: dict[str, Any], steps: int) -> None:
    model = small(kind, num_classes=2, **options)
    x, target = images(1, 1, 8, 8).expand(4, 1, 8, 8), images(4, 1, 8, 8)
    # the four inputs differ only in time and label
    t, labels = torch.tensor([0, 0, 999, 999]), torch.tensor([0, 1, 1, -1])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        F.mse_loss(model(x, t, labels), target).backward()
        optimizer.step()
    assert F.mse_loss(model(x, t, labels), target) < 0.05
    assert F.mse_loss(model(x, t.flip(0), labels), target) > 0.2
    assert F.mse_loss(model(x, t, labels.flip(0)), target) > 0.2


@both
def test_the_condition_is_the_sum_of_time_and_class_for_every_block(kind: Any) -> None:
    model = trained(kind, num_classes=3)
    t, labels = torch.tensor([5, 50, 50]), torch.tensor([2, 0, -1])  # the last row is that of no class
    read: list[Tensor] = []
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for block in blocks:
        block.register_forward_pre_hook(lambda module, args: read.append(args[1]))
    model(images(3, 1, 8, 8), t, labels)
    expected = F.silu(model.time(t) + model.label.weight[labels])
    assert len(read) == len(blocks) == (6 if kind is UNet else 2)
    assert all(torch.equal(condition, expected) for condition in read)


@both
def test_labels_without_classes_and_classes_without_labels_are_refused(kind: Any) -> None:
    x, t = images(2, 1, 8, 8), torch.tensor([5, 50])
    with refused(ValueError, "num_classes=3", "model(x, timesteps, labels)"):
        small(kind, num_classes=3)(x, t)
    with refused(ValueError, "num_classes"):
        small(kind)(x, t, torch.tensor([0, 1]))
    with refused(ValueError, "labels", 3, -1, 2):
        small(kind, num_classes=3)(x, t, torch.tensor([0, 3]))


@both
def test_images_of_a_batch_do_not_affect_each_other(kind: Any) -> None:
    model = trained(kind, num_classes=4, text_dim=3)
    x, t, labels = images(3, 1, 8, 8), torch.tensor([0, 20, 999]), torch.tensor([3, -1, 0])
    text = text_for(model, 3)
    rows = [slice(i, i + 1) for i in range(3)]
    alone = [model(x[row], t[row], labels[row], **{name: part[row] for name, part in text.items()}) for row in rows]
    torch.testing.assert_close(model(x, t, labels, **text), torch.cat(alone), atol=1e-5, rtol=1e-4)


@both
@pytest.mark.parametrize("dropout", [*wide(0.0), 0.5])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("text_dim", [0, 3])
def test_gradient_checkpointing_gives_the_same_gradients(
    kind: Any, dropout: float, autocast: bool, text_dim: int
) -> None:
    options = {"dropout": dropout, "num_classes": 3, "text_dim": text_dim}
    plain, saving = trained(kind, **options), trained(kind, **options, gradient_checkpointing=True)
    x, t, labels = images(4, 1, 8, 8), torch.tensor([0, 5, 50, 999]), torch.tensor([0, -1, 2, 2])
    text, calls = text_for(plain, 4), []
    for block in saving.modules():
        if isinstance(block, Block):
            first = next(module for module in block.children() if isinstance(module, nn.Linear))
            first.register_forward_hook(lambda *_: calls.append(1))
    for model in (plain, saving):
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(x, t, labels, **text).square().sum()
        loss.backward()
    for (name, ours), theirs in zip(saving.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(grad_of(ours), grad_of(theirs)), name
    num_blocks = 6 if kind is UNet else 2
    assert len(calls) == 2 * num_blocks
    with torch.no_grad():
        saving(x, t, labels, **text)
    saving.eval()(x, t, labels, **text)
    assert len(calls) == 4 * num_blocks  # without gradients or training, no block runs twice


@both
def test_dropout_acts_in_training_only(kind: Any) -> None:
    model, dry = trained(kind, dropout=0.5), trained(kind)
    x, t = images(2, 1, 8, 8), torch.tensor([5, 50])
    assert not torch.equal(model(x, t), model(x, t))
    assert torch.equal(model.eval()(x, t), dry(x, t))


@both
def test_bf16_autocast_keeps_the_dtype_and_999_apart_from_1000(kind: Any) -> None:
    model = trained(kind)
    x, t = images(1, 1, 8, 8).expand(2, 1, 8, 8), torch.tensor([999, 1000])
    expected, expected_time = model(x, t), model.time(t)
    with torch.autocast("cpu", torch.bfloat16):
        out, time = model(x, t), model.time(t)
        assert torch.equal(out, model(x, t.float()))
    assert (out.dtype, torch.equal(out[0], out[1])) == (torch.float32, False)
    assert (out - expected).norm() < 0.05 * expected.norm()
    # If the time were rounded on the way, the difference between the two embeddings would be wrong.
    step, expected_step = time[0] - time[1], expected_time[0] - expected_time[1]
    assert (step - expected_step).norm() < 0.1 * expected_step.norm()


@both
def test_a_model_cast_as_a_whole_keeps_the_dtype_and_999_apart_from_1000(kind: Any) -> None:
    model = trained(kind).bfloat16()
    x = images(1, 1, 8, 8).bfloat16().expand(2, 1, 8, 8)
    out = model(x, torch.tensor([999, 1000]))
    assert (out.dtype, torch.equal(out[0], out[1])) == (torch.bfloat16, False)


@both
def test_a_model_can_be_built_on_the_meta_device_and_drawn_later(kind: Any) -> None:
    with torch.device("meta"):
        model = small(kind, num_classes=3, text_dim=4)
    assert all(p.is_meta for p in model.parameters())
    x, t, labels, text = images(2, 1, 8, 8), torch.tensor([1, 2]), torch.tensor([0, -1]), text_for(model, 2)
    on_meta = {name: part.to("meta") for name, part in text.items()}
    assert model(x.to("meta"), t.to("meta"), labels.to("meta"), **on_meta).shape == x.shape
    model.to_empty(device="cpu")
    fresh = small(kind, num_classes=3, text_dim=4)
    for each in (model, fresh):
        torch.manual_seed(4)
        each.reset_parameters()
    assert torch.equal(model(x, t, labels, **text), torch.zeros_like(x))
    assert model.state_dict().keys() == fresh.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))


@both
def test_a_state_dict_gives_the_same_model(kind: Any) -> None:
    model, other = trained(kind), small(kind)
    x, t = images(2, 1, 8, 8), torch.tensor([5, 50])
    assert not torch.equal(model(x, t), other(x, t))
    other.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(model(x, t), other(x, t))
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]
    assert list(model.buffers()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "text_dim"), [(UNet, 0), (DiT, 0), (DiT, 3)])
def test_a_model_compiled_in_place_gives_the_same(kind: Any, text_dim: int) -> None:
    model = trained(kind, num_classes=3, text_dim=text_dim)
    x, t, labels, text = images(2, 1, 8, 8), torch.tensor([5, 50]), torch.tensor([2, -1]), text_for(model, 2)
    expected = model(x, t, labels, **text)
    keys = list(model.state_dict())
    model.compile(fullgraph=True)
    torch.testing.assert_close(model(x, t, labels, **text), expected, atol=1e-4, rtol=1e-4)
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [(UNet, {"channel_mults": (1, 1, 1)}, (3, "channel_mults")), (DiT, {"patch_size": 4}, ("patch_size",))],
)
@pytest.mark.parametrize(
    ("shape", "facts"), [((30, 45), ("45x30", 4, 28, 32, 44, 48)), ((8, 2), ("2x8", 4, 8)), ((0, 8), ("8x0", 4, 8))]
)
def test_sizes_that_do_not_fit_are_refused(kind: Any, options: Any, reason: Any, shape: Any, facts: Any) -> None:
    with refused(ValueError, *facts, *reason):
        small(kind, **options)(torch.zeros(1, 1, *shape), torch.tensor([1]))


@both
@pytest.mark.parametrize(
    ("shape", "timesteps", "facts"),
    [
        ((2, 3, 8, 8), torch.tensor([1, 2]), ("(2, 3, 8, 8)", "(n, 1, h, w)", "in_channels=1")),
        ((1, 8, 8), torch.tensor([1]), ("(1, 8, 8)", "(n, 1, h, w)", "in_channels=1")),
        ((2, 1, 8, 8), torch.tensor([1]), ("timesteps", "(1,)", "(2,)")),
        ((1, 1, 8, 8), torch.tensor(1), ("timesteps", "()", "(1,)")),
        ((1, 1, 8, 8), torch.tensor([999]).bfloat16(), ("timesteps", "torch.bfloat16", "float32")),
    ],
)
def test_inputs_that_do_not_fit_are_refused(kind: Any, shape: Any, timesteps: Tensor, facts: Any) -> None:
    with refused(ValueError, *facts):
        small(kind)(torch.zeros(shape), timesteps)


@pytest.mark.parametrize(
    ("kind", "options", "facts"),  # the last fact is the nearest valid value
    [
        (UNet, {"in_channels": 0}, ("in_channels=0", 1)),
        (UNet, {"channels": -8}, ("channels=-8", 1)),
        (UNet, {"num_res_blocks": 0}, ("num_res_blocks=0", 1)),
        (UNet, {"head_dim": 0}, ("head_dim=0", 1)),
        (UNet, {"channel_mults": ()}, ("channel_mults", (1,))),
        (UNet, {"channel_mults": (1, 0)}, ("channel_mults=(1, 0)", (1, 1))),
        (UNet, {"image_size": 30, "channel_mults": (1, 2, 2)}, ("image_size=30", 8, 4, 3, "channel_mults", 28, 32)),
        (UNet, {"image_size": 4}, ("image_size=4", 2, "channel_mults", 8)),
        (UNet, {"image_size": 9, "channel_mults": (1, 1, 1, 1, 1)}, ("image_size=9", 8, 5, "channel_mults", 16)),
        (UNet, {"attention_resolutions": (8, 16)}, ("attention_resolutions=(8, 16)", 16, 4, 8)),
        (UNet, {"channels": 48, "attention_resolutions": (4, 8)}, ("head_dim=32", 48, 96, "head_dim=24")),
        (UNet, {"num_classes": -1}, ("num_classes=-1", 0)),
        (UNet, {"dropout": 1.0}, ("dropout=1.0", 0.99)),
        (UNet, {"dropout": -0.1}, ("dropout=-0.1", 0.0)),
        (UNet, {"dropout": float("nan")}, ("dropout=nan", 0.0)),
        (DiT, {"in_channels": 0}, ("in_channels=0", 1)),
        (DiT, {"patch_size": 0}, ("patch_size=0", 1)),
        (DiT, {"depth": -1}, ("depth=-1", 1)),
        (DiT, {"num_heads": 0}, ("num_heads=0", 1)),
        (DiT, {"num_classes": -1}, ("num_classes=-1", 0)),
        (DiT, {"image_size": 28, "patch_size": 8}, ("image_size=28", "patch_size=8", 24, 32, "patch_size=7")),
        (DiT, {"hidden_size": 30}, ("hidden_size=30", 4, "hidden_size=28", 32)),
        (DiT, {"hidden_size": 64, "num_heads": 6}, ("num_heads=6", "hidden_size=64", "num_heads=4")),
        (DiT, {"mlp_ratio": 0.0}, ("mlp_ratio=0.0", 4.0)),
        (DiT, {"mlp_ratio": float("nan")}, ("mlp_ratio=nan", 4.0)),
        (DiT, {"dropout": 1.5}, ("dropout=1.5", 0.99)),
    ],
)
def test_options_that_do_not_fit_are_refused(kind: Any, options: dict[str, Any], facts: tuple[object, ...]) -> None:
    with refused(ValueError, *facts):
        kind(**options)
