"""The state of plugins: which of their fields go into checkpoints, and how these are read back."""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Mapping
from typing import Any, TypeGuard, get_origin

import attrs
from torch import Tensor

from hookdiff.machine.dtensor import fill_

_PLAIN = (bool, int, float, str, dict, list, tuple)
_MARK = "saved"  # key of the metadata of a field


@attrs.frozen
class _Saved:
    """How a field goes into checkpoints."""

    key: str  # in the state; "": the name of the field, stripped of leading underscores
    validator: Any


def saved(default: Any = attrs.NOTHING, *, factory: Any = None, validator: Any = None, key: str = "") -> Any:
    """Return a field of an attrs class that goes into checkpoints, and that no argument sets.

    `lowest: float = saved(math.inf)` is all that a plugin needs to be resumed. Before anything of a checkpoint is
    loaded, the value is checked by the type of the field. It is set right after `on_start`. If the field has a tensor
    or a dict of tensors by then, these are filled in place and keep their device, dtype and place on the ranks. A field
    may hold an object with saved fields of its own, or with `state_dict` and `load_state_dict`.

    Args:
        default: value of the field at the start. A field with neither default nor `factory` is set by `on_start`.
        factory: function that makes the default.
        validator: attrs validator of a saved value, such as `hookdiff.options.COUNT`. It is not called during training.
        key: name in the checkpoint. Default: the name of the field, stripped of leading underscores.
    """
    start = default if factory is None else attrs.Factory(factory)
    return attrs.field(default=start, init=False, metadata=as_saved(key, validator))


def as_saved(key: str = "", validator: Any = None) -> dict[str, _Saved]:
    """Return the metadata of a field that `saved` makes."""
    return {_MARK: _Saved(key, validator)}


def keeps_state(value: object) -> bool:
    """Return whether an object, or a class, has a state: saved fields, or a `state_dict`."""
    return _is_keeper(value) or bool(saved_fields(value))


def _is_keeper(value: object) -> bool:
    """Return whether an object writes and reads its state itself, as modules of torch do."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def saved_fields(owner: object) -> dict[str, attrs.Attribute[Any]]:
    """Return the saved fields of an object, or of a class, by their keys in a checkpoint."""
    kind: Any = owner if inspect.isclass(owner) else type(owner)
    return _fields_of(kind)


@functools.cache
def _fields_of(kind: Any) -> dict[str, attrs.Attribute[Any]]:
    fields = [field for field in attrs.fields(kind) if _MARK in field.metadata] if attrs.has(kind) else []
    return {field.metadata[_MARK].key or field.name.lstrip("_"): field for field in fields}


def state_of(owner: Any) -> Any:
    """Return the state of `owner`. The tensors are not copied."""
    if _is_keeper(owner):
        return owner.state_dict()
    return {key: _value_state(getattr(owner, field.name)) for key, field in saved_fields(owner).items()}


def _value_state(value: Any) -> Any:
    if keeps_state(value):
        return state_of(value)
    if isinstance(value, Mapping):
        return {key: _value_state(item) for key, item in value.items()}
    return [_value_state(item) for item in value] if isinstance(value, (list, tuple, deque)) else value


def checked(kind: type, state: Any) -> Any:
    """Return `state` as an object with the saved fields of `kind`. Raises ValueError if it does not fit."""
    from hookdiff.options.structure import structured

    return structured(_state_type(kind), state)


def restore_state(owner: object, state: Any) -> None:
    """Restore a state of `owner`.

    Raises:
        ValueError: if the state does not fit.
    """
    _load(owner, checked(type(owner), state))


def _load(owner: Any, state: Any) -> None:
    if _is_keeper(owner):
        owner.load_state_dict(state)
        return
    for key, field in saved_fields(owner).items():
        now, value = getattr(owner, field.name, None), getattr(state, key)
        if keeps_state(now):
            _load(now, value)
        else:
            setattr(owner, field.name, _filled(key, now, value))


def _filled(key: str, now: Any, value: Any) -> Any:
    """Return `value`, or `now` with the tensors of `value`."""
    ours, its = ({key: state} if isinstance(state, Tensor) else state for state in (now, value))
    if not (_are_tensors(ours) and _are_tensors(its)):
        return value
    if differing := ours.keys() ^ its.keys():
        raise ValueError(f"{key}: only one of the state and the run has {min(differing)!r}")
    for name, tensor in ours.items():
        if tensor.shape != its[name].shape:
            where, shapes = key if name == key else f"{key}.{name}", (tuple(its[name].shape), tuple(tensor.shape))
            raise ValueError(f"{where}: a tensor of shape {shapes[0]}, expected {shapes[1]}")
        fill_(tensor, its[name])
    return now


def _are_tensors(value: Any) -> TypeGuard[dict[str, Tensor]]:
    return isinstance(value, dict) and bool(value) and all(isinstance(item, Tensor) for item in value.values())


@functools.cache
def _state_type(kind: Any) -> Any:
    """Return the type of the states of `kind`, the type of a field or the class of a plugin.

    For a class with saved fields it is an attrs class with their keys. For a class with `load_state_dict` it is the
    annotation of the argument, if that is an attrs class or a plain type. Else it is `kind` itself.
    """
    from hookdiff.options.structure import hint_of

    if _is_keeper(kind):
        taken = list(inspect.signature(kind.load_state_dict).parameters.values())[1:2]
        hint = hint_of(taken[0].annotation, kind.load_state_dict) if taken else Any
        return hint if (get_origin(hint) or hint) in _PLAIN or attrs.has(hint) else Any
    if not (inspect.isclass(kind) and saved_fields(kind)):
        return kind
    fields = {
        key: attrs.field(type=_state_type(hint_of(field.type, kind)), validator=field.metadata[_MARK].validator)
        for key, field in saved_fields(kind).items()
    }
    return attrs.make_class(f"StateOf{kind.__name__}", fields, frozen=True, slots=True)
