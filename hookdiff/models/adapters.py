"""The contract of models, and hooks that let models of other libraries follow it.

A model is called as `model(x, timesteps)`, or as `model(x, timesteps, labels)` if its `num_classes` is above 0, where
label -1 stands for "no class". A model with another second argument gets the time as `timestep`. All get the
objective's conditions by keyword, and return a tensor. Hooks change neither the class of a model nor the names of its
parameters.
"""

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hookdiff.errors import nearest
from hookdiff.models.base import half_computed
from hookdiff.models.weights import Buffers, evaluating

_TIME = "timestep"  # networks of diffusers with a text take this argument later
_SMALL = 1 << 30  # weights times pixels: at most a second on a CPU


def adapt(model: nn.Module) -> nn.Module:
    """Return `model`, with hooks that make it follow the contract if it is of diffusers, or takes the time later.

    In a UNet2DModel the last of `num_class_embeds` embeddings stands for "no class", so it has one class less. A
    DiTTransformer2DModel has `num_embeds_ada_norm` classes and one more embedding for "no class". Its own label dropout
    in training is switched off, because the objective drops labels.

    Raises:
        ValueError: for a number of embeddings that leaves no class.
    """
    theirs: Any = model
    if takes_time_later(model) and _name_time not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_name_time, with_kwargs=True)
    if not any(map(is_of_diffusers, type(model).__mro__)) or _take_sample in model._forward_hooks.values():
        return model
    config, num_classes = getattr(theirs, "config", {}), 0
    if (num := config.get("num_class_embeds")) is not None:
        if num < 2:
            raise ValueError(f"num_class_embeds={num} leaves no class: the last embedding is for no class; nearest: 2")
        num_classes = num - 1
    elif config.get("norm_type") == "ada_norm_zero":
        num_classes = config.get("num_embeds_ada_norm") or 0
        for module in theirs.modules():
            if hasattr(module, "token_drop"):
                module.dropout_prob = 0.0
    if num_classes:
        theirs.num_classes = num_classes
        model.register_forward_pre_hook(_use_null_row, with_kwargs=True)
    model.register_forward_hook(_take_sample)
    return model


def _forward(model: nn.Module | type[nn.Module]) -> inspect.Signature | None:
    """Return the signature of `forward`, without `self`; None if it has none, as that of a compiled function."""
    with suppress(ValueError, TypeError):
        return inspect.signature(partial(model.forward, None) if isinstance(model, type) else model.forward)
    return None


def takes_time_later(model: nn.Module | type[nn.Module]) -> bool:
    """Return whether the model takes the time as an argument `timestep` after its second argument."""
    forward = _forward(model)
    return forward is not None and _TIME in list(forward.parameters)[2:]


def _name_time(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if len(args) < 2 or _TIME in kwargs:
        return args, kwargs
    image, times, *others = args
    if others:
        raise ValueError("takes no labels: its second argument is not the time; leave the labels out")
    return (image,), {**kwargs, _TIME: times}


def call_text(model: nn.Module | type[nn.Module], words: Sequence[str], conditions: Mapping[str, str]) -> str:
    """Return how a model is called, such as "forward(x = images, timesteps = times, context = text)".

    `words` stand for the image, the times and perhaps the labels, `conditions` for the arguments by keyword. A keyword
    with a dot is a key in a dict.

    Raises ValueError if `forward` cannot be called so. The message continues a sentence that begins with the model's
    name.
    """
    args, kwargs = tuple(words), dict.fromkeys(keyword.partition(".")[0] for keyword in conditions)
    by_keyword = [f"{keyword} = {name}" for keyword, name in conditions.items()]
    if takes_time_later(model):
        args, kwargs = _name_time(model, args, kwargs)
    names: dict[str, str] = {}
    hooks = getattr(model, "_forward_pre_hooks", {}).values()  # others may change the arguments
    if (forward := _forward(model)) and {*hooks} <= {_name_time, _use_null_row}:
        try:
            bound = forward.bind(*args, **kwargs).arguments
        except TypeError as error:
            near = next((nearest(name, forward.parameters) for name in kwargs if name not in forward.parameters), "")
            raise ValueError(f"cannot be called with {', '.join([*words, *by_keyword])}: {error}{near}") from None
        names = {word: name for name, word in bound.items() if isinstance(word, str)}
    by_place = [f"{names[word]} = {word}" if word in names else word for word in words]
    return f"forward({', '.join([*by_place, *by_keyword])})"


def num_classes_of(model: nn.Module) -> int:
    """Return the number of classes whose labels `model` takes; 0 if it takes no labels."""
    num: int | None = getattr(model, "num_classes", None)
    return num or 0


def is_of_diffusers(kind: object) -> bool:
    """Return whether the class or function `kind` is written in diffusers, without importing it."""
    return getattr(kind, "__module__", "").partition(".")[0] == "diffusers"


def checkpointable(kind: Any) -> Any:
    """Return a function that makes a `kind`, a class of diffusers, and has an argument `gradient_checkpointing`.

    A `kind` without a method `enable_gradient_checkpointing` is returned unchanged.
    """
    name = "gradient_checkpointing"
    has_method = inspect.isclass(kind) and hasattr(kind, "enable_gradient_checkpointing")
    if not has_method or name in inspect.signature(kind).parameters:
        return kind

    def make(*args: Any, gradient_checkpointing: bool = False, **kwargs: Any) -> Any:
        model = kind(*args, **kwargs)
        if gradient_checkpointing:
            model.enable_gradient_checkpointing()
        return model

    signature = inspect.signature(kind)
    extra = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool)
    make.__module__ = kind.__module__
    make.__signature__ = signature.replace(parameters=[*signature.parameters.values(), extra])  # type: ignore[attr-defined]
    return make


def no_weights(target: Any) -> dict[str, None]:
    """Return None for each argument with published weights as its default, such as `weights_backbone`.

    torchvision would download these weights even if `weights` is None, but a run trains a network from its seed.
    """
    signature = inspect.signature(target).parameters if callable(target) else {}
    named = [name for name, parameter in signature.items() if isinstance(parameter.default, Enum)]
    return dict.fromkeys(name for name in named if name.startswith("weights"))


def check_forward(
    model: nn.Module,
    shape: Sequence[int],
    *,
    labels: bool = False,
    times: torch.dtype = torch.int64,
    conditions: Mapping[str, Any] | None = None,
    trains: bool = False,
) -> None:
    """Call `model` once with `times` of this dtype; if its output has a tensor `sample`, let the model return it.

    `conditions` are given by keyword: tensors of two rows by name, or dicts of such tensors.

    Raises ValueError unless the model maps images of `shape` (c h w) to the same shape, and NoGradient, a ValueError,
    if it `trains` and its output has no gradient. The message continues a sentence that begins with the model's name.
    """
    stack = (2, *shape)
    try:
        output = _call(model, stack, labels, times, conditions or {}, trains)
    except Exception as error:  # a model may raise anything
        reason = str(error).partition("\n")[0] or type(error).__name__
        and_times = "" if times == torch.int64 else f" and times in {str(times).removeprefix('torch.')}"
        and_conditions = "".join(f", {name} {shape}" for name, shape in _shapes(conditions or {}))
        raise ValueError(
            f"cannot be called with images of shape {stack}{and_times}{and_conditions}: {reason}"
        ) from error
    if isinstance(getattr(output, "sample", None), Tensor):
        model.register_forward_hook(_take_sample)
        output = output.sample
    if not isinstance(output, Tensor):
        raise ValueError(f"returned a {type(output).__name__}, expected a tensor")
    if output.shape != stack:
        raise ValueError(f"returned shape {tuple(output.shape)} for images of shape {stack}, expected the same")
    if trains and not output.requires_grad and any(weight.requires_grad for weight in model.parameters()):
        # Some models switch gradients off only when they are evaluated.
        output = _call(model, stack, labels, times, conditions or {}, trains, nullcontext())
        if not getattr(getattr(output, "sample", output), "requires_grad", True):
            raise NoGradient("cannot be trained: no gradient reaches its output, look for torch.no_grad() and detach()")


def _shapes(conditions: Mapping[str, Any], outer: str = "") -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, value in conditions.items():
        if isinstance(value, Tensor):
            yield outer + name, tuple(value.shape)
        else:
            yield from _shapes(value, f"{outer}{name}.")


class NoGradient(ValueError):
    """The output of a model has no gradient with respect to its weights."""


def _call(
    model: nn.Module,
    shape: tuple[int, ...],
    labels: bool,
    times: torch.dtype,
    conditions: Mapping[str, Any],
    trains: bool,
    mode: AbstractContextManager[None] | None = None,
) -> Any:
    """Return the output of `model` for zeros, with its graph if it `trains`; it is evaluated unless `mode` is given.

    A large model runs on the meta device, which computes nothing, if it can. A small one is faster on its own device,
    because torch imports its compiler at the first division on the meta device.
    """

    def zeros(device: torch.device) -> tuple[Tensor, ...]:
        classes = torch.zeros(shape[0], dtype=torch.int64, device=device)
        return (torch.zeros(shape, device=device), classes.to(times), *([classes] if labels else []))

    def by_name(device: torch.device, values: Mapping[str, Any] = conditions) -> dict[str, Any]:
        return {
            name: torch.zeros_like(value, device=device) if isinstance(value, Tensor) else by_name(device, value)
            for name, value in values.items()
        }

    device, meta = next(model.parameters()).device, torch.device("meta")
    on_gpu = [device] if device.type == "cuda" else []
    with mode or evaluating(model), torch.random.fork_rng(on_gpu), torch.set_grad_enabled(trains):
        if sum(weight.numel() for weight in model.parameters()) * math.prod(shape[-2:]) > _SMALL:
            tensors = {
                f"{path}.{name}" if path else name: tensor.to(meta)
                for path, module in model.named_modules()  # each once: functional_call does not restore a second one
                for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            }
            # A model may need values; the call below repeats other errors.
            with suppress(Exception):
                return functional_call(model, tensors, zeros(meta), by_name(meta), tie_weights=False)
        buffers = Buffers(model)
        buffers.keep()
        try:
            with half_computed(model, device) if device != meta else nullcontext():
                return model(*zeros(device), **by_name(device))
        finally:
            buffers.put_back()


def _take_sample(model: nn.Module, args: Any, output: Any) -> Any:
    return output if isinstance(output, Tensor) else getattr(output, "sample", output)


def _use_null_row(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Turn label -1 into the index after the last class, whether labels are the third argument or `class_labels`."""
    labels: Tensor | None = kwargs.get("class_labels", args[2] if len(args) > 2 else None)
    check_labels(labels, labels.numel() if labels is not None else 0, model.num_classes)
    assert labels is not None
    rows = torch.where(labels < 0, model.num_classes, labels)
    if "class_labels" in kwargs:
        return args, {**kwargs, "class_labels": rows}
    return (*args[:2], rows, *args[3:]), kwargs


def check_labels(labels: Tensor | None, num: int, num_classes: int) -> None:
    """Raise ValueError unless a model with classes gets a valid label per image, and a model without gets no labels.

    The range is checked only on the CPU: on a GPU the host would wait for the answer in every step.
    """
    if labels is None:
        if num_classes:
            raise ValueError(
                f"the model was built with num_classes={num_classes} and got no labels: call it as "
                "model(x, timesteps, labels), with -1 where there is no class"
            )
        return
    if not num_classes:
        raise ValueError("the model got labels and was built without classes: set num_classes, or give no labels")
    if labels.shape != (num,) or labels.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"labels has shape {tuple(labels.shape)} of {labels.dtype}, expected ({num},) of int64: one per image"
        )
    if labels.device.type == "cpu" and num and not torch.compiler.is_compiling():
        low, high = map(int, labels.aminmax())
        if low < -1 or high >= num_classes:
            raise ValueError(
                f"labels has {low if low < -1 else high}, expected -1 (no class) to {num_classes - 1}: "
                f"the model was built with num_classes={num_classes}"
            )
