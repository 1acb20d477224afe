"""Chooses the layers that get an adapter, by the names of the layers."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from hookdiff import UserError, listed, nearest

KEY = "plugins.lora.targets"
_SHOWN = 5  # names in a message


def layers_of(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the names of the linear layers and 2d convolutions that match a pattern, in the order of the model.

    A pattern stands for the whole name or for its end after a dot, and `*` for any letters: `to_q` matches
    "mid_block.attn1.to_q", and `mid_block*` all layers of the block. Without patterns these are the linear layers of
    attention.

    Raises:
        UserError: for a pattern that matches no such layer, and for a model that has none.
    """
    layers = [name for name, module in model.named_modules() if _is_adaptable(module)]
    if not layers:
        kind = type(model).__name__
        raise UserError(f"plugins.lora: the network, a {kind}, has no linear layer and no convolution to adapt")
    if not patterns:
        named = _of_attention(model)
        if not named:
            raise UserError(f"{KEY}: the network has no attention; name its layers, such as {listed(layers, _SHOWN)}")
        return named
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in layers):
            raise UserError(f"{KEY}: {_why_none(model, pattern, layers)}")
    return [name for name in layers if any(_matches(name, pattern) for pattern in patterns)]


def _is_adaptable(module: nn.Module) -> bool:
    # The weight of a convolution with groups cannot be merged with an adapter.
    return isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)


def _of_attention(model: nn.Module) -> list[str]:
    blocks = [f"{name}." for name, module in model.named_modules() if "Attention" in type(module).__name__]
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return [name for name in linear if any(name.startswith(block) for block in blocks)]


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _why_none(model: nn.Module, pattern: str, layers: Sequence[str]) -> str:
    others = {name: module for name, module in model.named_modules() if name and _matches(name, pattern)}
    with_weights = [name for name, module in others.items() if any(True for _ in module.parameters(recurse=False))]
    if with_weights:
        kind = type(others[with_weights[0]]).__name__
        return f"{pattern!r} matches {with_weights[0]}, a {kind}; expected a linear layer or a 2d convolution"
    if others:
        return f"{pattern!r} matches {min(others)}, which is no layer; for its layers write {pattern + '.*'!r}"
    ends = {name.rpartition(".")[2]: None for name in layers}
    return f"{pattern!r} matches no layer{nearest(pattern.strip('*.'), [*ends, *layers])}"
