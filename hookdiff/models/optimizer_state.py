"""The state of an optimizer, by the names of the weights in a model; checked before it is loaded."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import define
from torch import Tensor, nn
from torch.optim import Optimizer

from hookdiff.errors import UserError
from hookdiff.machine.dtensor import fill_, is_sharded, layout, names_of_all_ranks, place
from hookdiff.models.optimizer_copy import copy_optimizer
from hookdiff.options.structure import structured

# Means of squares, as torch and others name them.
_SQUARES = {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "row_var", "col_var", "acc_delta", "exp_inf", "step"}
Entry = Mapping[str, Any]  # the state of one weight


@define(frozen=True)
class _Saved:
    kind: str  # the class of the optimizer
    weights: dict[str, dict[str, Any]]
    keys: list[str]  # of the entries of all weights
    groups: list[dict[str, Any]]


def _names(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def optimizer_state(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """Return the state by names of weights. State by position could be loaded for the wrong weights unnoticed."""
    names = _names(model)
    kind = type(optimizer).__name__
    if strange := [key for key in optimizer.state if not isinstance(key, Tensor)]:
        raise UserError(f"this run cannot be saved: {kind} keeps state for {strange[0]!r}, which is no parameter")
    if any(parameter not in names for parameter in optimizer.state):
        raise UserError(f"this run cannot be saved: {kind} keeps state for a parameter that is not the model's")
    counted = _counted_in_groups(optimizer)
    return {
        "kind": kind,
        "weights": {names[parameter]: dict(entry) for parameter, entry in optimizer.state.items()},
        "keys": sorted({key for entry in optimizer.state.values() for key in entry}),
        "groups": [{key: group[key] for key in counted} for group in optimizer.param_groups if counted],
    }


def _counted_in_groups(optimizer: Optimizer) -> list[str]:
    """Return the keys of parameter groups that hold state of `optimizer`, as in schedule-free ones and Prodigy.

    These keys have a default and are no argument of the class. All other keys are hyper-parameters.
    """
    makers = [vars(kind)["__init__"] for kind in type(optimizer).__mro__ if "__init__" in vars(kind)]
    arguments = {name for make in makers[:-1] for name in inspect.signature(make).parameters}  # the last is object's
    counted = [key for key in optimizer.defaults if key not in arguments and key != "lr"]
    return [key for key in counted if all(key in group for group in optimizer.param_groups)]


def check_optimizer(optimizer: Optimizer, model: nn.Module, saved: Entry, is_finite: bool = True) -> None:
    """Raise ValueError unless `optimizer` can continue with the state `saved`.

    A fused kernel does not check its tensors, and would write past the end of a tensor that is too small. The right
    shapes and dtypes are those after a step, which is tried on copies. A weight that had no gradient yet has no state.
    If `is_finite`, the values must be finite. Each rank checks its part of sharded values, after all tried steps, in
    which the ranks may work together.
    """
    state, kind = structured(_Saved, saved), type(optimizer).__name__
    if state.kind != kind:
        raise ValueError(f"the checkpoint's optimizer is {state.kind}, the run's is {kind}")
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    parameters = {name: parameter for parameter, name in _names(model).items() if parameter in groups}
    first_state, impossible = _rehearsals(optimizer), list[str]()
    for name, entry in state.weights.items():
        if name not in parameters:
            raise ValueError(f"the checkpoint has optimizer state of {name!r}, which this optimizer does not hold")
        parameter, group = parameters[name], groups[parameters[name]]
        rehearsed = first_state(group, parameter)
        _check_entry(name, entry, rehearsed, parameter)
        lacking = [key for key in rehearsed or () if key not in entry]
        # A new hyper-parameter, such as momentum, may need state that the checkpoint has for no weight.
        is_new = bool(lacking) and not any(key in state.keys for key in lacking)
        if lacking and not (is_new and _rehearsed(optimizer, group, parameter, entry)):
            raise ValueError(f"{name} lacks {', '.join(lacking)}, which {kind} needs")
    if not state.weights and state.keys:
        raise ValueError(f"the checkpoint has state of {kind}, but of no weight: it is damaged")
    counted = _counted_in_groups(optimizer)
    if len(state.groups) != (len(optimizer.param_groups) if counted else 0):
        raise ValueError(
            f"{kind} keeps state in {len(optimizer.param_groups) if counted else 'none'} of its parameter groups, the "
            f"checkpoint in {len(state.groups)}"
        )
    for index, (group, saved_group) in enumerate(zip(optimizer.param_groups, state.groups, strict=False)):
        counts, where = {key: group[key] for key in counted}, f"parameter group {index}"
        if counts.keys() != saved_group.keys():
            raise ValueError(f"{where} has {', '.join(saved_group)}; expected {', '.join(counts)}")
        _check_entry(where, saved_group, counts, None)
        impossible += [f"{key} of {where}" for key, value in saved_group.items() if not _is_possible(key, value)]
    for name, entry in state.weights.items():
        rehearsed = first_state(groups[parameters[name]], parameters[name])
        for key, value in entry.items():
            pattern = _pattern(parameters[name], key, value, rehearsed)
            part = value if pattern is None else value[place(pattern)]
            impossible += [] if _is_possible(key, part) else [f"{key} of {name}"]
    if is_finite and (names := names_of_all_ranks(impossible, parameters.values())):
        raise ValueError(f"{names[0]} holds values that no step makes: not finite, or a negative square")


def _rehearsals(optimizer: Optimizer) -> Callable[[dict[str, Any], Tensor], Entry | None]:
    """Return a function of a group and its weight, which returns the state after a first step; None if not known."""
    states: dict[Any, Entry | None] = {}

    def rehearsed(group: dict[str, Any], parameter: Tensor) -> Entry | None:
        # These values decide about the state. A network has few shapes.
        key = id(group), parameter.shape, parameter.dtype, parameter.device, layout(parameter)
        if key not in states:
            states[key] = _rehearsed(optimizer, group, parameter, {})
        return states[key]

    return rehearsed


def _rehearsed(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor, entry: Entry) -> Entry | None:
    """Return the state of `parameter` after a step from `entry`, made on copies; None if that is not possible.

    An optimizer may not work with one weight alone, or need more than gradients.
    """
    copy = parameter.detach().clone().requires_grad_()
    copy.grad = torch.ones_like(copy)
    tried = copy_optimizer(optimizer, [{**group, "params": [parameter]}], lambda _: copy)
    if entry:
        tried.state[copy] = {key: _like(copy, key, value, tried, None) for key, value in entry.items()}
    try:
        tried.step()
    except Exception:
        return None
    result: Entry = tried.state[copy]
    return result


def _check_entry(where: str, entry: Entry, rehearsed: Entry | None, parameter: Tensor | None) -> None:
    """Raise ValueError for a value in `entry` of another kind than in `rehearsed`; None: the kinds are not known."""
    for key, value in entry.items():
        expected = None if rehearsed is None else rehearsed.get(key)
        later = None if rehearsed is None or key in rehearsed or parameter is None else ((), parameter.shape)
        if isinstance(expected, Tensor):
            form = tuple(expected.shape), expected.dtype
            saved = (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else type(value).__name__
            if saved != form:
                raise ValueError(f"{key} of {where} is {saved}, expected {form}")
        elif isinstance(expected, int | float) and not isinstance(value, int | float):
            raise ValueError(f"{key} of {where} is a {type(value).__name__}, expected a number")
        elif later and isinstance(value, Tensor) and value.shape not in later:  # not there after the first step
            raise ValueError(f"{key} of {where} has the shape {tuple(value.shape)}, expected that of the weight")


def _is_possible(key: str, value: Any) -> bool:
    if isinstance(value, Tensor):
        floats = value.is_floating_point() or value.is_complex()
        return not floats or bool(value.isfinite().all() and (key not in _SQUARES or (value >= 0).all()))
    return not isinstance(value, float) or math.isfinite(value)


def load_optimizer(optimizer: Optimizer, model: nn.Module, saved: Entry) -> None:
    """Restore the state that `optimizer_state` has returned and `check_optimizer` has checked."""
    parameters = {name: parameter for parameter, name in _names(model).items()}
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    first_state = _rehearsals(optimizer)
    optimizer.state.clear()  # for a rollback: at the saved step, some parameters may have had no state
    for name, entry in saved["weights"].items():
        parameter = parameters[name]
        rehearsed = first_state(groups[parameter], parameter) if is_sharded(parameter) else None
        state = {key: _like(parameter, key, value, optimizer, rehearsed) for key, value in entry.items()}
        optimizer.state[parameter] = state
    for group, counts in zip(optimizer.param_groups, saved["groups"], strict=False):
        group.update(counts)


def _like(parameter: Tensor, key: str, value: Any, optimizer: Optimizer, rehearsed: Entry | None) -> Any:
    """Copy a loaded value to the device and, where it has the parameter's shape, to the parameter's memory format.

    It is sharded as in `rehearsed`, the state of the parameter after a step, or else as the parameter.
    """
    if isinstance(value, list):
        return [_like(parameter, key, item, optimizer, None) for item in value]
    if isinstance(value, Mapping):
        return {name: _like(parameter, name, item, optimizer, None) for name, item in value.items()}
    if not isinstance(value, Tensor):
        return value
    pattern = _pattern(parameter, key, value, rehearsed)
    if key in ("step", "mu_product") and (pattern is None or not is_sharded(pattern)):  # the latter is NAdam's
        # Fused and capturable kernels keep values that depend only on the step on the device, others on the host.
        group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
        on_device = group.get("fused") or group.get("capturable")
        return value.to(parameter.device if on_device else "cpu", copy=True)
    if pattern is None:
        return value.to(parameter.device, copy=True)
    fresh = torch.empty_like(pattern, dtype=value.dtype, requires_grad=False)
    fill_(fresh, value)
    return fresh


def _pattern(parameter: Tensor, key: str, value: Any, rehearsed: Entry | None) -> Tensor | None:
    """Return the tensor that has the layout of `value`, state of `parameter`; None: each rank has the whole value."""
    first = (rehearsed or {}).get(key)
    pattern = first if isinstance(first, Tensor) else parameter
    return pattern if isinstance(value, Tensor) and pattern.shape == value.shape else None
