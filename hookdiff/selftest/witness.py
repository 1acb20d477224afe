"""What a run that is tested writes down of itself: a plugin, since it sees of a run what plugins see."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch
from attrs import define, field
from attrs.validators import ge
from torch import Tensor, nn

from hookdiff.disk.files import check_tensors, write_tensors
from hookdiff.disk.tree import flatten
from hookdiff.hookspecs import hookimpl
from hookdiff.progress import Reason
from hookdiff.selftest.compare import DIGEST

if TYPE_CHECKING:
    from hookdiff.data import Batch
    from hookdiff.loop import Loop

SAVED, RESUMED, END = "saved", "resumed", "end"  # the moments, and the files about them
_NOTHING: Any = object()
# The hooks in which weights, gradients and hyper-parameters may change, or do although they must not.
_CHANGING = (
    *("before_step", "micro_step", "backward", "unscale", "after_backward", "optimizer_step", "after_optimizer_step"),
    *("on_epoch_end", "between_steps"),
)
_MOST = 10_000  # entries of a list, and characters of a string, that are looked at
_DEPTH = 4


@define
class _Call:
    """A plugin's part of a hook, while it runs."""

    plugin: str
    hook: str
    begun: tuple[Any, ...]  # the states of the global generators when it began
    generators: tuple[Any, ...]  # and when they were last looked at
    drew: bool = False


@define(eq=False)
class Witness:
    """Writes down the state of a run where it is saved, where it is resumed, and at its end.

    It is to be listed last, so that all others have had their turn. With `kill` it kills its own process, as a power
    cut would, some steps after a checkpoint was complete.
    """

    out: Path  # the folder for what it saw
    at: int = field(validator=ge(1))  # the step at which the run is saved
    stop: int = field(validator=ge(1))  # the step at which the run is taken to be done
    kill: bool = False
    _complete: int | None = field(default=None, init=False)  # the step at which the checkpoint was told of
    _waited: int = field(default=0, init=False)  # times
    _folders: set[str] = field(factory=set, init=False)  # in the run directory that hold checkpoints
    _owners: dict[str, str] = field(factory=dict, init=False)  # plugin by name of what is logged
    _drew: dict[str, set[str]] = field(factory=dict, init=False)  # by plugin: hooks in which it drew globally
    _trace: list[tuple[int, str, str, int]] = field(factory=list, init=False)  # position, hook, plugin, fingerprint
    _calls: list[_Call] = field(factory=list, init=False)  # under way: hooks call hooks
    _batch: Batch | None = field(default=None, init=False)  # while others hear of it

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        """Begin to watch who logs what, who changes weights, and who draws from generators that no checkpoint holds."""

        @contextmanager
        def watch(plugin: str, hook: str) -> Iterator[None]:
            self._look(loop)
            generators = _global_generators(loop.device)
            self._calls.append(_Call(plugin, hook, generators, generators))
            try:
                yield
            finally:
                self._look(loop)
                call = self._calls.pop()
                generators = _global_generators(loop.device)
                if call.drew and generators != call.begun:  # who put them back has drawn for itself
                    self._drew.setdefault(plugin, set()).add(hook)
                if hook in _CHANGING and loop.progress.step >= self.at:
                    self._trace.append((loop.progress.position, hook, plugin, _fingerprint(loop, hook, self._batch)))
                if self._calls:
                    self._calls[-1].generators = generators

        self.out.mkdir(parents=True, exist_ok=True)
        loop.plugins.instrument(watch)

    def _look(self, loop: Loop) -> None:
        """Note what whose call is under way has logged and drawn since the last look."""
        call = self._calls[-1] if self._calls else None
        for name in loop.log.names:
            self._owners.setdefault(name, call.plugin if call else "")
        if call and call.generators != _global_generators(loop.device):
            call.drew = True

    @hookimpl(wrapper=True)
    def before_step(self, loop: Loop, batch: Batch) -> Generator[None, None, None]:
        """Before the first step of a resumed run all is as it was loaded: ahead of whoever hears of the step."""
        if loop.resume and not (self.out / f"{RESUMED}.json").exists():
            self._write(RESUMED, snapshot(loop))
        self._batch = batch
        yield
        self._batch = None

    @hookimpl(trylast=True)
    def between_steps(self, loop: Loop) -> None:
        """Note the state at the save, wait for the checkpoint, and kill the process when lines were logged after it.

        The run also ends here, and not by its config: learning rates that follow its length would be others.
        """
        step = loop.progress.step
        if step >= self.stop:
            loop.stop("done")
        if not loop.resume and step == self.at and not (self.out / f"{SAVED}.json").exists():
            self._write(SAVED, snapshot(loop))
        if not self.kill or not self.at <= step < self.stop:
            return
        if self._complete is None:
            time.sleep(min(5.0, 0.05 * 2**self._waited))  # a large one takes its time; so the run does not end before
            self._waited += 1
        elif step > self._complete and (loop.log.due or step + 1 == self.stop):
            os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))  # Windows has only the latter, as hard

    @hookimpl
    def on_checkpoint(self, loop: Loop, path: Path) -> None:
        """Note that a checkpoint is complete."""
        if self._complete is None and loop.progress.step >= self.at:
            self._complete = loop.progress.step
        self._folders.add(path.name if path.parent == loop.run_dir else path.parent.name)

    @hookimpl(trylast=True)
    def on_stop(self, loop: Loop, reason: Reason) -> None:
        """Write down what the run has become, unless it broke off."""
        if reason not in ("done", "plugin"):
            return
        tensors, tree = flatten(loop.state_dict())
        write_tensors(self.out / f"{END}.safetensors", tensors)
        seen = {
            "values": leaves(tree),
            "checkpoints": sorted(self._folders),
            "owners": self._owners,
            "trace": self._trace,
        }
        self._write(END, {**seen, "drew": {plugin: sorted(hooks) for plugin, hooks in self._drew.items()}})

    def _write(self, moment: str, seen: Mapping[str, Any]) -> None:
        (self.out / f"{moment}.json").write_text(json.dumps(seen), "utf-8")


def snapshot(loop: Loop) -> dict[str, Any]:
    """Return the state of a run and, by plugin, all plain fields: each tensor as what tells it from another."""
    fields = {}
    for name, plugin in loop.plugins.items():
        held = {key: _plain(value, loop) for key, value in _fields(plugin).items()}
        fields[name] = _digested({key: value for key, value in held.items() if value is not _NOTHING})
    return {"step": loop.progress.step, "state": _digested(loop.state_dict()), "fields": fields}


def leaves(tree: Any, where: str = "") -> dict[str, Any]:
    """Return the values in nested dicts by path, as flat names of tensors are."""
    if not isinstance(tree, Mapping):
        return {where: tree}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        escaped = key.replace("~", "~0").replace("/", "~1")
        found |= leaves(value, f"{where}/{escaped}" if where else escaped)
    return found


def _digested(state: Mapping[str, Any]) -> dict[str, Any]:
    tensors, tree = flatten(state)
    return leaves(tree) | {name: _digest(tensor) for name, tensor in tensors.items()}


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous()
    if data.numel() == 1:
        return f"{DIGEST}{data.item()!r}"
    digest = hashlib.sha256(data.reshape(-1).view(torch.uint8).numpy().data).hexdigest()[:16]
    return f"{DIGEST}{str(data.dtype).removeprefix('torch.')} {list(data.shape)} {digest}"


def _fields(plugin: object) -> dict[str, Any]:
    kind = type(plugin)
    names = [each.name for each in attrs.fields(kind)] if attrs.has(kind) else []
    found = {name: getattr(plugin, name, _NOTHING) for name in names}
    return found | getattr(plugin, "__dict__", {})


def _plain(value: Any, loop: Loop, depth: int = 0) -> Any:
    """Return `value` as `flatten` takes it, or _NOTHING for what is no plain value and has no state of its own."""
    if value is None or isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) < _MOST):
        return value
    if isinstance(value, Tensor):
        try:
            check_tensors({"": value})
        except TypeError:
            return _NOTHING
        return value
    if isinstance(value, np.ndarray | np.generic):
        return _plain(torch.from_numpy(np.array(value)), loop) if value.dtype.kind in "biuf" else _NOTHING
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return hashlib.sha256(repr(value.getstate()).encode()).hexdigest()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, list | tuple | deque):
        value = {str(index): each for index, each in enumerate(value)}
    elif hasattr(value, "state_dict") and not isinstance(value, nn.Module):  # the loop's own model, most likely
        value = value.state_dict()
    if not isinstance(value, Mapping) or len(value) > _MOST or depth == _DEPTH:
        return _NOTHING
    inner = {str(key): _plain(each, loop, depth + 1) for key, each in value.items() if isinstance(key, str | int)}
    return {key: each for key, each in inner.items() if each is not _NOTHING}


def _fingerprint(loop: Loop, hook: str, batch: Batch | None) -> int:
    """Return a number that another bit in weights, buffers, gradients, learning rates or `batch` makes another."""
    held = [*loop.model.parameters(), *loop.model.buffers()]
    if batch is not None:
        held += [value for value in (batch.inputs, *batch.draws.values()) if isinstance(value, Tensor)]
    if hook not in ("before_step", "on_epoch_end"):  # where those of the step before may be left, or not
        held += [weight.grad for weight in loop.model.parameters() if weight.grad is not None]
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    plain = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in held]
    sums = [each.detach().view(whole[each.itemsize]).sum() for each in plain if each.layout == torch.strided]
    groups = [group for optimizer in loop.optimizers for group in optimizer.param_groups]
    # While they are set, a resumed run still has those of its config, and the other those of the step before.
    rates = [float(group.get("lr", 0.0)) for group in groups if hook != "before_step"]
    return hash((int(torch.stack(sums).sum()), *rates))


def _global_generators(device: torch.device) -> tuple[Any, ...]:
    """Return what tells whether someone draws from the generators that belong to no one."""
    _, keys, *rest = np.random.get_state(legacy=True)
    states = [torch.get_rng_state().numpy().tobytes(), random.getstate(), np.asarray(keys).tobytes(), rest]
    if device.type != "cpu":
        states.append(torch.get_device_module(device.type).get_rng_state().numpy().tobytes())
    return tuple(states)
