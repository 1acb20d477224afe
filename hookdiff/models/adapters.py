"""Models of other libraries keep our contract: hooks on the model itself, so that its class and its keys stay.

The contract: `model(x, timesteps)`, or `model(x, timesteps, labels)` for one whose `num_classes` is above 0, with
label -1 for "no class"; the answer is a tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hookdiff.models.checks import check_labels
from hookdiff.weights import evaluating


def adapt(model: nn.Module) -> nn.Module:
    """Make a model of diffusers follow our contract; any other is returned as it is. Twice is once.

    Of a UNet2DModel the last of `num_class_embeds` embeddings stands for "no class", so it has one class less. A
    DiTTransformer2DModel has `num_embeds_ada_norm` classes, and a row of its own for none; it drops labels in
    training by itself, which is switched off, because that is up to the objective.

    Raises ValueError for a number of embeddings that leaves no class.
    """
    if not _is_of(model, "diffusers") or _take_sample in model._forward_hooks.values():
        return model
    config: Mapping[str, Any] = getattr(model, "config", {})
    if (num := config.get("num_class_embeds")) is not None:
        if num < 2:
            raise ValueError(
                f"num_class_embeds={num} leaves no class, since the last embedding is for no class; nearest: 2"
            )
        _condition(model, num - 1)
    elif (num := config.get("num_embeds_ada_norm")) is not None and config.get("norm_type") == "ada_norm_zero":
        _condition(model, num)
        drops: Any
        for drops in model.modules():
            if hasattr(drops, "token_drop"):
                drops.dropout_prob = 0.0
    model.register_forward_hook(_take_sample)
    return model


def checkpointable(kind: Any) -> Any:
    """Return `kind` with an argument `gradient_checkpointing`, if it is a class with a method that switches it on.

    So diffusers has it: `enable_gradient_checkpointing`. Anything else is returned as it is.
    """
    if not inspect.isclass(kind) or not hasattr(kind, "enable_gradient_checkpointing"):
        return kind
    signature, name = inspect.signature(kind), "gradient_checkpointing"
    if name in signature.parameters:
        return kind

    def make(*args: Any, gradient_checkpointing: bool = False, **kwargs: Any) -> Any:
        model: Any = kind(*args, **kwargs)
        if gradient_checkpointing:
            model.enable_gradient_checkpointing()
        return model

    extra = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool)
    make.__signature__ = signature.replace(parameters=[*signature.parameters.values(), extra])  # type: ignore[attr-defined]
    return make


def check_contract(
    model: nn.Module, shape: Sequence[int], *, labels: bool = False, times: torch.dtype = torch.int64
) -> None:
    """Call `model` once, as training will, and let it return the `sample` of its output if that is no tensor.

    `times` is the dtype of what it is told of the time: flow and EDM tell it floats.

    Raises ValueError, which goes on after the model's name, unless it maps images of `shape` (c h w) to the same.
    """
    given = (2, *shape)
    try:
        output = _tried(model, given, labels, times)
    except Exception as error:  # whatever a model may raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        told = "" if times == torch.int64 else f" and times in {str(times).removeprefix('torch.')}"
        raise ValueError(f"cannot be called with images of shape {given}{told}: {reason}") from error
    if not isinstance(output, Tensor) and isinstance(getattr(output, "sample", None), Tensor):
        model.register_forward_hook(_take_sample)
        output = output.sample
    if not isinstance(output, Tensor):
        raise ValueError(f"returned a {type(output).__name__}, expected a tensor")
    if output.shape != given:
        raise ValueError(f"returned shape {tuple(output.shape)} for images of shape {given}, expected the same")


def _tried(model: nn.Module, shape: tuple[int, ...], labels: bool, times: torch.dtype) -> Any:
    """Return what `model` makes of zeros: on the meta device, which computes nothing, if the model can go there."""

    def zeros(device: torch.device) -> tuple[Tensor, ...]:
        classes = torch.zeros(shape[0], dtype=torch.int64, device=device)
        return (torch.zeros(shape, device=device), classes.to(times), *([classes] if labels else []))

    meta = torch.device("meta")
    there = {
        f"{path}.{name}" if path else name: tensor.to(meta)
        for path, module in model.named_modules()  # each once: functional_call puts a second one back as it found it
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    }
    with evaluating(model):
        try:
            return functional_call(model, there, zeros(meta), tie_weights=False)
        except Exception:  # it looks at values, say; a mistake will show again
            return model(*zeros(next(model.parameters()).device))


def _take_sample(model: nn.Module, args: Any, output: Any) -> Any:
    return output if isinstance(output, Tensor) else getattr(output, "sample", output)


def _condition(model: Any, num_classes: int) -> None:
    model.num_classes = num_classes
    model.register_forward_pre_hook(_use_null_row, with_kwargs=True)


def _use_null_row(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Turn label -1 into the index after the last class, whether labels are the third argument or `class_labels`."""
    labels: Tensor | None = kwargs.get("class_labels", args[2] if len(args) > 2 else None)
    check_labels(labels, labels.numel() if labels is not None else 0, model.num_classes)
    assert labels is not None
    rows = torch.where(labels < 0, model.num_classes, labels)
    if "class_labels" in kwargs:
        return args, {**kwargs, "class_labels": rows}
    return (*args[:2], rows, *args[3:]), kwargs


def _is_of(module: nn.Module, package: str) -> bool:
    return any(kind.__module__.partition(".")[0] == package for kind in type(module).__mro__)
