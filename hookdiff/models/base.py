"""Keeps the frozen weights of a base, which a folder holds already, out of the state of a model."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from hookdiff.errors import UserError

# Attributes of a module: the names of its tensors that the base gave, and of those that the state leaves out.
_GIVEN, _LEFT_OUT = "_hookdiff_given", "_hookdiff_left_out"
_FOUND = "_hookdiff_found"  # attribute of a model
_HALF = (torch.bfloat16, torch.float16)


def mark_base(model: nn.Module, **found: Any) -> None:
    """Mark the tensors that `model` has now as those of a base, which a folder holds.

    The marks stay with the modules. They hold when an adapter is put around a module, when weights are sharded, and in
    a copy of the model. `found` are values of keys in [model] that were found when the base was read, such as a digest;
    they go into the config of the run.
    """
    for module in model.modules():
        setattr(module, _GIVEN, frozenset({*module._parameters, *module._buffers}))
    setattr(model, _FOUND, found)


def has_base(model: nn.Module) -> bool:
    """Return whether `model` is a base, or has one."""
    return hasattr(model, _FOUND)


def found_in_base(model: nn.Module) -> Mapping[str, Any]:
    """Return the values of keys in [model] that were found when the base was read."""
    found: Mapping[str, Any] = getattr(model, _FOUND, {})
    return found


def half_computed(model: object, device: torch.device, always: bool = False) -> AbstractContextManager[object]:
    """Return autocast to bf16 if `model` has weights in bf16, or `always`; else a context that does nothing.

    Weights in bf16 cannot be multiplied with inputs in float32.
    """
    weights = model.parameters() if isinstance(model, nn.Module) else ()
    is_half = always or any(weight.dtype == torch.bfloat16 for weight in weights)
    return torch.autocast(device.type, torch.bfloat16) if is_half else nullcontext()


def leave_out_base(model: nn.Module) -> None:
    """Leave the weights of the base that are frozen now, and its buffers, out of the state of `model` from now on.

    `model.state_dict()` lacks them, and `model.load_state_dict` keeps their values. The statistics of batch norm stay
    in the state, since they change in training. If no weight of the base is frozen, the state stays whole. A later
    `state_dict()` refuses such a weight that was thawed.
    """
    for path, module in model.named_modules():
        for name in _names(module, _GIVEN) & module._parameters.keys():
            weight = module._parameters[name]
            if weight is not None and weight.requires_grad and weight.dtype in _HALF:
                dtype = str(weight.dtype).removeprefix("torch.")
                raise UserError(
                    f"model.precision: {path}.{name} trains in {dtype}, which loses small updates; freeze the weights "
                    'by a plugin such as lora, or use "float32"'
                )
    given = {module: names for module in model.modules() if (names := _names(module, _GIVEN))}
    frozen = {module: frozenset(n for n in names if _is_frozen(module, n)) for module, names in given.items()}
    for module, names in given.items() if any(frozen.values()) else ():
        if not _names(module, _LEFT_OUT):
            module.register_state_dict_post_hook(_remove)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(_put_in)  # type: ignore[no-untyped-call]
        saved = module._buffers.keys() - module._non_persistent_buffers_set
        setattr(module, _LEFT_OUT, frozen[module] | (frozenset() if isinstance(module, _NormBase) else names & saved))


def left_out(model: nn.Module) -> Iterator[str]:
    """Yield the names of the tensors that `leave_out_base` leaves out of the state of `model`."""
    for path, module in model.named_modules(remove_duplicate=False):
        yield from (f"{path}.{name}".lstrip(".") for name in _names(module, _LEFT_OUT))


def _names(module: nn.Module, key: str) -> frozenset[str]:
    names: frozenset[str] = getattr(module, key, frozenset())
    return names


def _is_frozen(module: nn.Module, name: str) -> bool:
    weight = module._parameters.get(name)
    return weight is not None and not weight.requires_grad


def _remove(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name in _names(module, _LEFT_OUT):
        weight = module._parameters.get(name)
        if weight is not None and weight.requires_grad:
            raise UserError(
                f"{prefix}{name} belongs to the base and was frozen when the optimizers were made, so it is not saved; "
                "to train it, thaw it in the hook prepare_model"
            )
        state.pop(prefix + name, None)


def _put_in(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    held = {**module._parameters, **module._buffers}
    state.update({prefix + name: held[name] for name in _names(module, _LEFT_OUT) if held.get(name) is not None})
