"""The state of an optimizer, by the names of the weights in a model."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookdiff.errors import UserError


def _names(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def optimizer_state(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """Return the state by names of weights; by position, it could be loaded for the wrong weights unnoticed."""
    names = _names(model)
    kind = type(optimizer).__name__
    if strange := [key for key in optimizer.state if not isinstance(key, Tensor)]:
        raise UserError(f"this run cannot be saved: {kind} keeps state for {strange[0]!r}, which is no parameter")
    if any(parameter not in names for parameter in optimizer.state):
        raise UserError(f"this run cannot be saved: {kind} keeps state for a parameter that is not the model's")
    counted = _counted_in_groups(optimizer)
    return {
        "class": kind,
        "weights": {names[parameter]: dict(entry) for parameter, entry in optimizer.state.items()},
        "groups": {
            str(index): {key: group[key] for key in counted if key in group}
            for index, group in enumerate(optimizer.param_groups)
            if counted
        },
    }


def _counted_in_groups(optimizer: Optimizer) -> list[str]:
    """Return the keys of parameter groups that hold state of `optimizer`, as in schedule-free ones and Prodigy.

    These keys have a default and are no argument of the class. All other keys are hyper-parameters.
    """
    makers = [vars(kind)["__init__"] for kind in type(optimizer).__mro__ if "__init__" in vars(kind)]
    arguments = {name for make in makers[:-1] for name in inspect.signature(make).parameters}  # the last is object's
    return [key for key in optimizer.defaults if key not in arguments and key != "lr"]


def load_optimizer(optimizer: Optimizer, model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Restore what `optimizer_state` has returned. Raises UserError if it is of another optimizer or model."""
    kind = type(optimizer).__name__
    if saved.get("class", kind) != kind:
        raise UserError(f"the checkpoint's optimizer is {saved['class']}, the run's is {kind}")
    parameters = {name: parameter for parameter, name in _names(model).items()}
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    optimizer.state.clear()  # for a rollback: at the saved step, some parameters may have had no state
    for name, entry in saved.get("weights", {}).items():
        parameter = parameters.get(name)
        if parameter is None or parameter not in held:
            raise UserError(f"the checkpoint has optimizer state of {name!r}, which this optimizer does not hold")
        optimizer.state[parameter] = {key: _like(parameter, key, value, optimizer) for key, value in entry.items()}
    groups = saved.get("groups", {})
    if groups and len(groups) != len(optimizer.param_groups):
        raise UserError(
            f"{kind} keeps state in its parameter groups: the checkpoint has {len(groups)} of them, the run "
            f"has {len(optimizer.param_groups)}"
        )
    for index, entry in groups.items():
        optimizer.param_groups[int(index)].update(entry)


def _like(parameter: Tensor, key: str, value: Any, optimizer: Optimizer) -> Any:
    """Copy a loaded value to the device and, where it has the parameter's shape, to the parameter's memory format."""
    if isinstance(value, list):
        return [_like(parameter, key, item, optimizer) for item in value]
    if isinstance(value, Mapping):
        return {name: _like(parameter, name, item, optimizer) for name, item in value.items()}
    if not isinstance(value, Tensor):
        return value
    if key in ("step", "mu_product"):  # the latter is NAdam's
        # Fused and capturable kernels keep values that depend only on the step on the device, others on the host.
        group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
        on_device = group.get("fused") or group.get("capturable")
        return value.to(parameter.device if on_device else "cpu", copy=True)
    if value.shape != parameter.shape:
        return value.to(parameter.device, copy=True)
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
