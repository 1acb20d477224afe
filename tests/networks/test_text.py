"""Test the cross-attention to a text of both networks."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hookdiff import ConfigError, Loop, LoopConfig, SampleRequest, build_loop
from hookdiff.data import InMemory
from hookdiff.diffusion import Diffusion, Sampling
from hookdiff.models import Form, layers_called, use_attention
from hookdiff_networks import DiT, UNet
from hookdiff_networks.layers import CrossAttention
from tests.conftest import ran, refused
from tests.networks.conftest import both, grad_of, images, small, text_for, trained

X, T, LABELS = images(4, 1, 8, 8), torch.tensor([0, 5, 50, 999]), torch.tensor([0, -1, 2, 2])


def pair(kind: Any, trains_text: bool, **options: Any) -> tuple[Any, Any]:
    """Return a trained network without text, and one that reads text, with the same weights in its other layers."""
    options |= {"num_classes": 3}
    plain = trained(kind, **options)
    reading = (trained if trains_text else small)(kind, text_dim=3, **options)
    lacking, unexpected = reading.load_state_dict(plain.state_dict(), strict=False)
    assert ([name for name in lacking if ".cross_attention." not in name], unexpected) == ([], [])
    return plain, reading


@both
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_network_starts_as_the_one_without_text(
    kind: Any, trains: bool, gradient_checkpointing: bool, autocast: bool
) -> None:
    plain, reading = pair(kind, False, dropout=0.5, gradient_checkpointing=gradient_checkpointing)
    names, text = [name for name, _ in plain.named_parameters()], text_for(reading, 4)
    many = {"text": text["text"] * 100}

    def results(model: Any, **given: Any) -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model.train(trains)(X, T, LABELS, **given)
        out.square().sum().backward()
        return [out, *(grad_of(model.get_parameter(name)) for name in names)]

    expected = results(plain)
    for given in (text, many, {**many, "text_mask": torch.zeros(4, 5)}):
        assert all(map(torch.equal, results(reading, **given), expected)), given


@both
@pytest.mark.parametrize("form", get_args(Form))
@pytest.mark.parametrize("autocast", [False, True])
def test_a_sample_of_which_no_token_counts_reads_nothing(kind: Any, form: Form, autocast: bool) -> None:
    plain, reading = pair(kind, True)
    text = text_for(reading, 4)
    text["text"].requires_grad_()
    for model in (plain, reading):
        use_attention(model, form)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        without, out = plain(X, T, LABELS), reading(X, T, LABELS, **text)
        of_zeros = reading(X, T, LABELS, text=torch.zeros(4, 5, 3))
    assert torch.equal(of_zeros, without)
    assert torch.equal(out[3], without[3])
    assert all(not torch.allclose(out[row], without[row], atol=1e-3) for row in range(3))
    out.square().sum().backward()
    assert all(grad_of(parameter).isfinite().all() for parameter in reading.parameters())
    assert torch.equal(grad_of(text["text"]).any(dim=2), text["text_mask"])


@both
def test_tokens_that_do_not_count_change_nothing(kind: Any) -> None:
    model = trained(kind, text_dim=3)
    text, mask = text_for(model, 4).values()
    expected = model(X, T, text=text, text_mask=mask)
    other = torch.where(mask[..., None], text, 100.0)
    for same in (mask, mask.long(), mask.float()):
        assert torch.equal(model(X, T, text=other, text_mask=same), expected)
    longer = {"text": F.pad(text, (0, 0, 0, 2), value=9.0), "text_mask": F.pad(mask, (0, 2))}
    torch.testing.assert_close(model(X, T, **longer), expected, atol=1e-5, rtol=1e-4)
    everything = model(X, T, text=text)
    torch.testing.assert_close(model(X, T, text=text, text_mask=torch.ones_like(mask)), everything)
    assert not torch.allclose(everything[1:], expected[1:], atol=1e-3)
    torch.testing.assert_close(model(X, T, text=text.half()), model(X, T, text=text.half().float()))


def test_the_layer_matches_torch() -> None:
    torch.manual_seed(0)
    ours, theirs = CrossAttention(12, 3, 5), nn.MultiheadAttention(12, 3, kdim=5, vdim=5, batch_first=True)
    key, value = ours.key_value.weight.chunk(2)
    state = {"q_proj_weight": ours.query.weight, "k_proj_weight": key, "v_proj_weight": value}
    state |= {"out_proj.weight": ours.proj.weight, "out_proj.bias": torch.zeros(12)}
    theirs.load_state_dict({**state, "in_proj_bias": F.pad(ours.query.bias, (0, 24))})
    tokens, text = images(2, 7, 12), images(2, 4, 5)
    mask = torch.tensor([[True, False, True, True], [False] * 3 + [True]])
    expected = theirs(F.layer_norm(tokens, (12,)), text, text, key_padding_mask=~mask)[0]
    torch.testing.assert_close(ours(tokens, text, mask[:, None, None]), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "block", "before", "after"),
    [
        (UNet, "mid.0", ["conv1", "time", "conv2", "attention.qkv", "attention.proj"], []),
        (DiT, "blocks.0", ["modulation", "qkv", "proj"], ["mlp_in", "mlp_out"]),
    ],
)
def test_the_text_is_read_after_each_self_attention(kind: Any, block: str, before: Any, after: Any) -> None:
    model = trained(kind, text_dim=3)
    with layers_called(model) as called:
        model(X, T, **text_for(model, 4))
    of_block = [name.removeprefix(f"{block}.") for name in called if name.startswith(f"{block}.")]
    assert of_block == [*before, *(f"cross_attention.{layer}" for layer in ("query", "key_value", "proj")), *after]
    attending = [re.sub(r"(\.attention)?\.qkv$", "", name) for name in called if name.endswith(".qkv")]
    assert attending == [name.removesuffix(".cross_attention.query") for name in called if name.endswith(".query")]


@both
@pytest.mark.parametrize(
    ("text_dim", "given", "facts"),
    [
        (3, {}, ("text_dim=3", "no text", "text=text", "diffusion.conditions")),
        (3, {"text_mask": torch.ones(4, 5)}, ("text_dim=3", "no text")),
        (0, {"text": torch.zeros(4, 5, 3)}, ("got text and", "set text_dim")),
        (0, {"text_mask": torch.ones(4, 5)}, ("got text_mask and", "set text_dim")),
        (3, {"text": torch.zeros(4, 5, 2)}, ("(4, 5, 2)", "(4, tokens, 3)", "text_dim=3")),
        (3, {"text": torch.zeros(3, 5, 3)}, ("(3, 5, 3)", "(4, tokens, 3)")),
        (3, {"text": torch.zeros(4, 3)}, ("(4, 3)", "(4, tokens, 3)")),
        (3, {"text": torch.zeros(4, 5, 3).long()}, ("torch.int64", "floats")),
        (3, {"text": torch.zeros(4, 5, 3), "text_mask": torch.ones(4, 4)}, ("text_mask", "(4, 4)", "(4, 5)")),
        (3, {"text": torch.zeros(4, 5, 3), "text_mask": torch.full((4, 5), -9.0)}, ("text_mask", "0 and 1")),
    ],
)
def test_text_that_does_not_fit_is_refused(kind: Any, text_dim: int, given: Any, facts: Any) -> None:
    with refused(ValueError, *facts):
        small(kind, text_dim=text_dim)(X, T, **given)


@pytest.mark.parametrize("options", [{"attention_resolutions": ()}, {"image_size": 128}])
def test_text_needs_attention(options: dict[str, Any]) -> None:
    side = options.get("image_size", 8) // 2
    with refused(ValueError, "text_dim=3", "attention_resolutions=()", f"({side},)"), torch.device("meta"):
        UNet(text_dim=3, **options)


def test_a_text_that_the_config_does_not_give_is_refused(load_small: Any, tmp_path: Path) -> None:
    with refused(ConfigError, "model", "text_dim=3", "diffusion.conditions"):
        build_loop(load_small(model={"use": "dit", "hidden_size": 8, "num_heads": 2, "text_dim": 3}), tmp_path / "run")


@pytest.mark.wide
def test_a_text_decides_the_colour() -> None:
    """Four random texts stand for four colours; without them, a network can only guess."""
    colours = torch.tensor([[1.0, -1, -1], [-1, 1, -1], [-1, -1, 1], [1, 1, -1]])
    texts = {"text": images(4, 5, 8), "text_mask": torch.arange(5) < torch.tensor([[5], [4], [3], [2]])}
    which = torch.arange(4).repeat(16)
    pictures = colours[which, :, None, None].expand(-1, -1, 8, 8).contiguous()
    right = {}
    for text_dim in (0, 8):
        torch.manual_seed(0)
        names = tuple(texts) if text_dim else ()
        model = DiT(in_channels=3, patch_size=4, hidden_size=32, depth=2, num_heads=2, text_dim=text_dim)
        adamw, objective = torch.optim.AdamW(model.parameters(), lr=3e-3), Diffusion(conditions=names)
        data = InMemory(pictures, conditions={name: column[which] for name, column in texts.items()})
        config = LoopConfig(steps=100, batch_size=32)
        loop = ran(Loop(model, adamw, objective, data, config, sampler=Sampling(steps=8)))
        asked = {name: texts[name][which] for name in names}
        means = loop.sample(SampleRequest(64, conditions=asked)).images.mean(dim=(2, 3))
        right[text_dim] = (torch.cdist(means, colours).argmin(1) == which).sum().item()
    assert right[8] >= 60
    assert right[0] <= 32
