"""The state of a run: nested dicts, and the flat named tensors and JSON values that files hold.

Flat names are paths joined by "/", with "~" and "/" inside a key escaped as in JSON Pointer (RFC 6901). Names of a
flat state (a model's parameters) therefore stay as they are.
"""

from __future__ import annotations

import datetime
import inspect
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookdiff.errors import UserError, nearest

if TYPE_CHECKING:
    from hookdiff.loop import Loop

State = Mapping[str, Any]
Optimizers = Optimizer | Sequence[Optimizer]
log = logging.getLogger("hookdiff")


def flatten(state: State, where: str = "state") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split `state` into its tensors, by flat name, and the rest of the tree.

    A tensor leaves None behind in a list. Raises TypeError, naming the place, for anything but tensors, None, bool,
    int, float, str, lists of those, which tuples become, and dicts with string keys.
    """
    tensors: dict[str, Tensor] = {}

    def walk(node: Any, path: tuple[str, ...]) -> Any:
        place = "/".join((where, *path))
        if isinstance(node, Mapping):
            rest = {}
            for key, value in node.items():
                if not isinstance(key, str):
                    raise TypeError(f"{place}: the key {key!r} is not a string")
                inner = (*path, _escape(key))
                if isinstance(value, Tensor):
                    tensors["/".join(inner)] = value
                else:
                    rest[key] = walk(value, inner)
            return rest
        if isinstance(node, (list, tuple)):
            return [walk(item, (*path, str(index))) for index, item in enumerate(node)]
        if isinstance(node, Tensor):  # in a list
            tensors["/".join(path)] = node
            return None
        if node is None or type(node) in (bool, int, float, str):
            return node
        kind = f"{type(node).__module__}.{type(node).__name__}".removeprefix("builtins.")
        raise TypeError(
            f"{place} is a {kind}; a state holds tensors, Python's numbers and strings, None, lists of those, and "
            "dicts with string keys"
        )

    tree: dict[str, Any] = walk(state, ())
    return tensors, tree


def unflatten(tensors: Mapping[str, Tensor], tree: State) -> dict[str, Any]:
    """Put back together what `flatten` took apart."""

    def copied(node: Any) -> Any:
        if isinstance(node, list):
            return [copied(item) for item in node]
        return {key: copied(value) for key, value in node.items()} if isinstance(node, Mapping) else node

    state: dict[str, Any] = copied(tree)
    for name, tensor in tensors.items():
        *path, last = [part.replace("~1", "/").replace("~0", "~") for part in name.split("/")]
        node: Any = state
        for key in path:
            node = node[int(key)] if isinstance(node, list) else node.setdefault(key, {})
        node[int(last) if isinstance(node, list) else last] = tensor
    return state


def _escape(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def plain(config: Any) -> Any:
    """Return `config`, of nested tables and lists, as a state holds it: the dates and times that TOML has as text."""
    if isinstance(config, Mapping):
        return {key: plain(value) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [plain(value) for value in config]
    return config.isoformat() if isinstance(config, (datetime.date, datetime.time)) else config


def as_tuple(optimizers: Optimizers) -> tuple[Optimizer, ...]:
    """Return one or several optimizers as a tuple."""
    return (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)


def run_state(loop: Loop) -> dict[str, Any]:
    """Return all that a run is: weights, optimizers, every plugin, counts. The tensors are the live ones."""
    assert loop.weights == "model", "the state of a run was asked for while other weights were borrowed"
    return {
        "config": plain(loop.hparams),
        "data": {"num_samples": len(loop.feed.training)},
        "random": {"seed": loop.config.seed},
        "progress": loop.progress.state_dict(),
        "log": loop.log.state_dict(),
        "model": loop.model.state_dict(),
        "optimizers": {
            str(index): _optimizer_state(optimizer, loop.model) for index, optimizer in enumerate(loop.optimizers)
        },
        "plugins": {
            name: plugin.state_dict() for name, plugin in loop.plugins.items() if hasattr(plugin, "state_dict")
        },
    }


def load_weights(loop: Loop, state: State) -> None:
    """Load counts, weights and optimizer state; hyper-parameters stay as the config made them.

    An optimizer of which nothing was kept has an empty state.
    """
    if not state:
        return
    with told_if_unfit("model"):
        _load_model(loop.model, state["model"])
    with told_if_unfit("optimizers"):
        saved = state["optimizers"]
        if len(saved) != len(loop.optimizers):
            raise UserError(f"the checkpoint has {len(saved)} optimizers, the run has {len(loop.optimizers)}")
        for index, optimizer in enumerate(loop.optimizers):
            _load_optimizer(optimizer, loop.model, saved[str(index)])
    with told_if_unfit("progress"):
        loop.progress.load_state_dict(state["progress"])
        loop.log.load_state_dict(state["log"])


def load_plugins(loop: Loop, state: State, fresh: Collection[str]) -> None:
    """Load each plugin's state; a state that no plugin of the run claims is told and left.

    Raises UserError that names all plugins that keep state but have none in the file, unless `fresh` names them.
    """
    if not state:
        return
    saved: State = state["plugins"]
    keepers = {n: p for n, p in loop.plugins.items() if hasattr(p, "load_state_dict") and n not in fresh}
    if new := [name for name in keepers if name not in saved]:
        many = len(new) > 1
        raise UserError(
            f"the checkpoint has no state of the plugin{'s' * many} {', '.join(map(repr, new))}, which "
            f"{'keep' if many else 'keeps'} one; to start {'them' if many else 'it'} fresh from the restored weights "
            f"add {' '.join(f'--fresh {name}' for name in new)} (in a script: Loop(..., fresh={[*fresh, *new]}))"
        )
    for name, plugin in keepers.items():
        with told_if_unfit(name, f"; --fresh {name} starts it anew from the restored weights"):
            plugin.load_state_dict(saved[name])
    if unclaimed := [name for name in saved if name not in loop.plugins]:
        log.warning("the checkpoint has state of plugins that this run has not: %s", ", ".join(unclaimed))


def roll_back(loop: Loop) -> None:
    """Load what the `restore` seam returns but keep the place in the data, so that other batches follow."""
    saved = loop.hook.restore(loop=loop)
    if not saved:
        raise UserError("on_nan asked for a rollback, but no plugin has a state to go back to")
    here = loop.progress.state_dict()
    load_weights(loop, saved)
    # What began anew in this process has its state in what this process saved, and not in anything older.
    load_plugins(loop, saved, () if saved["progress"]["step"] > loop.begun_at else loop.fresh)
    loop.progress.load_state_dict({**here, "step": loop.progress.step})


@contextmanager
def told_if_unfit(part: str, way_out: str = "") -> Iterator[None]:
    """Turn what a state of another version, or one made by hand, leads to into a UserError."""
    try:
        yield
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"the checkpoint's state of {part!r} cannot be loaded: {reason}{way_out}") from error


def _load_model(model: nn.Module, saved: State) -> None:
    own = model.state_dict()
    problems = [f"missing {name}" for name in own if name not in saved]
    problems += [f"unexpected {name}{nearest(name, own)}" for name in saved if name not in own]
    both = [name for name in own if name in saved and isinstance(own[name], Tensor)]
    problems += [
        f"{name} has shape {tuple(saved[name].shape)}, the model has {tuple(own[name].shape)}"
        for name in both
        if own[name].shape != saved[name].shape
    ]
    problems += [
        f"{name} is {saved[name].dtype}, the model's is {own[name].dtype}"
        for name in both
        if own[name].dtype != saved[name].dtype
    ]
    if problems:
        more = f"\n  and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise UserError("the checkpoint is of another model:\n  " + "\n  ".join(problems[:5]) + more)
    model.load_state_dict(dict(saved))


def _names(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _optimizer_state(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """Name the state of each weight: keyed by position it would load onto the wrong ones without an error."""
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
    """Return the keys of the groups of weights that `optimizer` counts in, as schedule-free ones and Prodigy do.

    They have a default but are nobody's argument. All other keys are hyper-parameters.
    """
    makers = [vars(kind)["__init__"] for kind in type(optimizer).__mro__ if "__init__" in vars(kind)]
    arguments = {name for make in makers[:-1] for name in inspect.signature(make).parameters}  # the last is object's
    return [key for key in optimizer.defaults if key not in arguments and key != "lr"]


def _load_optimizer(optimizer: Optimizer, model: nn.Module, saved: State) -> None:
    kind = type(optimizer).__name__
    if saved.get("class", kind) != kind:
        raise UserError(f"the checkpoint's optimizer is {saved['class']}, the run's is {kind}")
    parameters = {name: parameter for parameter, name in _names(model).items()}
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    optimizer.state.clear()  # of a rollback: at the saved step, some parameters may not have had any
    for name, entry in saved.get("weights", {}).items():
        parameter = parameters.get(name)
        if parameter is None or parameter not in held:
            raise UserError(f"the checkpoint has optimizer state of {name!r}, which this optimizer does not hold")
        optimizer.state[parameter] = {key: _like(parameter, key, value, optimizer) for key, value in entry.items()}
    groups = saved.get("groups", {})
    if groups and len(groups) != len(optimizer.param_groups):
        raise UserError(
            f"{kind} counts in its groups of weights: there were {len(groups)} of them at the checkpoint, now there "
            f"are {len(optimizer.param_groups)}"
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
        # Fused and capturable kernels keep what depends on the step alone on the device, all others on the host.
        group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
        on_device = group.get("fused") or group.get("capturable")
        return value.to(parameter.device if on_device else "cpu", copy=True)
    if value.shape != parameter.shape:
        return value.to(parameter.device, copy=True)
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
