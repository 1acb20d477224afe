"""The state of a run: collected for a checkpoint, checked and loaded when the run is resumed."""

import inspect
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from attrs import define
from torch import Tensor, nn
from torch.optim import Optimizer

from hookdiff.data import Feed
from hookdiff.disk.paths import is_empty, no_such_folder
from hookdiff.disk.tree import State, plain
from hookdiff.errors import NoCheckpoint, UserError
from hookdiff.log import Log
from hookdiff.models.load import differences
from hookdiff.models.names import plain_name
from hookdiff.progress import Progress
from hookdiff.versions import changed, versions

Optimizers = Optimizer | Sequence[Optimizer]
log = logging.getLogger("hookdiff")


def as_tuple(optimizers: Optimizers) -> tuple[Optimizer, ...]:
    """Return one or several optimizers as a tuple."""
    return (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)


@define(eq=False)
class RunState:
    """The state of a run: weights, optimizers, plugins, counts, config, seed and versions."""

    model: nn.Module
    plugins: Mapping[str, Any]
    progress: Progress
    log: Log
    feed: Feed
    hparams: Mapping[str, Any]  # the config
    optimizers: tuple[Optimizer, ...] = ()

    @cached_property
    def versions(self) -> dict[str, str]:
        """The versions of python, torch, hookdiff and the plugins' distributions."""
        return versions(self.plugins.values())

    def hold(self, optimizers: Optimizers) -> tuple[Optimizer, ...]:
        """Make `optimizers`, one or several, part of the state, and return them as a tuple."""
        self.optimizers = as_tuple(optimizers)
        return self.optimizers

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, nested. The tensors are not copied."""
        return {
            "versions": dict(self.versions),
            "config": plain(self.hparams),
            "data": {"num_samples": len(self.feed.training)},
            "random": {"seed": self.feed.seed},
            "progress": self.progress.state_dict(),
            "log": self.log.state_dict(),
            "model": self.model.state_dict(),
            "optimizers": {
                str(index): _optimizer_state(optimizer, self.model) for index, optimizer in enumerate(self.optimizers)
            },
            "plugins": {
                name: plugin.state_dict() for name, plugin in self.plugins.items() if hasattr(plugin, "state_dict")
            },
        }

    def check(self, saved: State, place: Path | None, must_exist: bool, is_read: bool) -> None:
        """Raise UserError unless the run can resume from `place`; None means that the run starts anew.

        `saved` is empty if the place has no checkpoint. The run then starts anew, unless the place `must_exist`
        (NoCheckpoint) or no plugin reads checkpoints (`is_read`). A run with another seed cannot resume.
        """
        if not place:
            return
        if not saved:
            _check_start(place, must_exist, is_read)
            return
        with refused_if_unfit("versions"):
            changes = changed(saved.get("versions", {}), self.versions)
        if changes:
            log.info("changed since the checkpoint: %s", ", ".join(changes))
        own, num_samples = self.feed.seed, len(self.feed.training)
        with refused_if_unfit("random"):
            seed = saved.get("random", {}).get("seed", own)
        with refused_if_unfit("data"):
            before = saved.get("data", {}).get("num_samples", num_samples)
        if seed != own:
            raise UserError(
                f"the checkpoint was made with the seed {seed}, from which all randomness follows; this run has {own}"
            )
        if before != num_samples:
            log.warning("the data has %s samples to train on; the checkpoint was made with %s", num_samples, before)

    def load(self, saved: State) -> None:
        """Load counts, weights and optimizer state; hyper-parameters stay those of the config.

        An optimizer without a saved state begins with an empty one.
        """
        if not saved:
            return
        with refused_if_unfit("model"):
            _load_model(self.model, saved["model"])
        with refused_if_unfit("optimizers"):
            optimizers = saved["optimizers"]
            if len(optimizers) != len(self.optimizers):
                raise UserError(f"the checkpoint has {len(optimizers)} optimizers, the run has {len(self.optimizers)}")
            for index, optimizer in enumerate(self.optimizers):
                _load_optimizer(optimizer, self.model, optimizers[str(index)])
        with refused_if_unfit("progress"):
            self.progress.load_state_dict(saved["progress"])
            self.log.load_state_dict(saved["log"])

    def load_plugins(self, saved: State, fresh: Collection[str]) -> None:
        """Load the state of each plugin; warn of a saved state that belongs to no plugin of the run.

        Raises UserError, with their names, if plugins that keep state have none in the file and are not `fresh`.
        """
        if not saved:
            return
        states: State = saved["plugins"]
        keepers = {n: p for n, p in self.plugins.items() if hasattr(p, "load_state_dict") and n not in fresh}
        if new := [name for name in keepers if name not in states]:
            many = len(new) > 1
            raise UserError(
                f"the checkpoint has no state of the plugin{'s' * many} {', '.join(map(repr, new))}, which "
                f"{'keep' if many else 'keeps'} one; to start {'them' if many else 'it'} fresh from the restored "
                f"weights add {' '.join(f'--fresh {name}' for name in new)} (in a script: Loop(..., "
                f"fresh={[*fresh, *new]}))"
            )
        for name, plugin in keepers.items():
            with refused_if_unfit(name, f"; --fresh {name} starts it anew from the restored weights"):
                plugin.load_state_dict(states[name])
        if unclaimed := [name for name in states if name not in self.plugins]:
            log.warning("the checkpoint has the state of plugins that this run does not have: %s", ", ".join(unclaimed))

    def roll_back(self, saved: State, first_step: int, fresh: Collection[str]) -> None:
        """Load `saved` but keep the position in the data, so that other batches follow.

        A checkpoint made by this process, after `first_step`, has the state of `fresh` plugins; an older one does not.
        """
        if not saved:
            raise UserError("on_nan asked for a rollback, but no plugin has a state to go back to")
        here = self.progress.state_dict()
        self.load(saved)
        self.load_plugins(saved, () if saved["progress"]["step"] > first_step else fresh)
        self.progress.load_state_dict({**here, "step": self.progress.step})


def _check_start(place: Path, must_exist: bool, is_read: bool) -> None:
    if not is_read:
        raise UserError(
            f"{place}: none of the run's plugins reads checkpoints (implements the hook restore); add the plugin "
            "that saved it (`hookdiff plugins` lists what is installed)"
        )
    if must_exist:
        raise NoCheckpoint(f"{place} has no checkpoint") if place.exists() else no_such_folder(place)
    if place.is_dir() and not is_empty(place):
        log.info("%s has no checkpoint to go on from: the run starts anew", place)


@contextmanager
def refused_if_unfit(part: str, way_out: str = "") -> Iterator[None]:
    """Turn an error because of a state of another version, or one made by hand, into a UserError."""
    try:
        yield
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"the checkpoint's state of {part!r} cannot be loaded: {reason}{way_out}") from error


def _load_model(model: nn.Module, saved: State) -> None:
    own = model.state_dict()
    if changed := sorted({plain_name(name) for name in own.keys() ^ saved.keys() if plain_name(name) != name}):
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise UserError(
            f"the checkpoint is of a model with other parametrisations of {', '.join(changed[:3])}{more}; the plugin "
            "that makes them has to be in the run, with the same keys as at the checkpoint"
        )

    def compared(kind: str, read: Callable[[Tensor], object]) -> str:
        ours, its = ({n: read(v) for n, v in state.items() if isinstance(v, Tensor)} for state in (own, saved))
        return differences(ours, its, kind)

    if found := compared("shape", lambda value: tuple(value.shape)) or compared("dtype", lambda value: value.dtype):
        raise UserError(f"the checkpoint is of another model: {found}")
    model.load_state_dict(dict(saved))


def _names(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _optimizer_state(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
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


def _load_optimizer(optimizer: Optimizer, model: nn.Module, saved: State) -> None:
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
