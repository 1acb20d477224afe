"""The plugin with which a tested run records its own state."""

import hashlib
import io
import json
import os
import pickle
import random
import signal
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from attrs import define, field
from attrs.validators import ge
from torch import Tensor, nn

from hookdiff import Batch, Loop, Reason, hookimpl
from hookdiff.device_part import is_recording
from hookdiff.disk import flatten
from hookdiff.options import about
from hookdiff_selftest.compare import DIGEST

SAVED, RESUMED, END = "saved", "resumed", "end"  # the moments, and the files about them
_NOTHING: Any = object()
# Hooks after which weights, gradients and hyper-parameters are traced; some of them must not change any.
_CHANGING = (
    *("before_epoch", "before_step", "accumulate", "micro_step", "reduce_loss", "backward", "unscale"),
    *("after_backward", "optimizer_step", "after_optimizer_step", "on_epoch_end", "between_steps"),
)
_MOST = 10_000  # larger mappings and lists, and longer strings, are not compared
_DEPTH = 4


@define
class _Call:
    """A call of one plugin's hook, while it runs."""

    plugin: str
    generators: tuple[Any, ...]  # the last states of the global generators
    drew: bool = False


@define(eq=False)
class Witness:
    """Records the state of a run when it is saved, when it is resumed, and at its end.

    It has to be the last plugin of the list, so that all others have had their turn. With `kill` it kills its own
    process, as a power cut would, some steps after a checkpoint was complete. It notes which plugin logs each number,
    changes weights, and draws from generators that no checkpoint holds.
    """

    out: Path = field(metadata=about("the folder of its notes"))
    at: int = field(validator=ge(1), metadata=about("the step at which the run is saved"))
    stop: int = field(validator=ge(1), metadata=about("the step at which the run is done"))
    kill: bool = field(default=False, metadata=about("kill the process after the save"))
    fields: list[str] = field(
        factory=list, metadata=about("PLUGIN/FIELD: kept at the save, and put back when the run is resumed")
    )
    _complete: int | None = field(default=None, init=False)  # the step at which `on_checkpoint` fired
    _waited: int = field(default=0, init=False)  # times
    _folders: set[str] = field(factory=set, init=False)  # of checkpoints, in the run directory
    _owners: dict[str, str] = field(factory=dict, init=False)  # plugin by name of a logged number
    _drew: dict[str, set[str]] = field(factory=dict, init=False)  # by plugin: hooks in which it drew
    _trace: list[tuple[int, str, str, int]] = field(factory=list, init=False)  # position, hook, plugin, fingerprint
    _calls: list[_Call] = field(factory=list, init=False)  # running calls, the innermost last
    _batch: Batch | None = field(default=None, init=False)  # during before_step

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        @contextmanager
        def watch(plugin: str, hook: str) -> Iterator[None]:
            begun = self._look(loop)
            self._calls.append(_Call(plugin, begun))
            try:
                yield
            finally:
                generators = self._look(loop)
                call = self._calls.pop()
                if call.drew and generators != begun:  # a plugin may draw if it restores the generators
                    self._drew.setdefault(plugin, set()).add(hook)
                if hook in _CHANGING and loop.progress.step >= self.at and not is_recording(loop.device):
                    self._trace.append((loop.progress.position, hook, plugin, _fingerprint(loop, hook, self._batch)))
                if self._calls:
                    self._calls[-1].generators = generators

        self.out.mkdir(parents=True, exist_ok=True)
        loop.plugins.instrument(watch)

    def _look(self, loop: Loop) -> tuple[Any, ...]:
        """Note what the current call logged and drew since the last look; return the states of the generators."""
        call, generators = self._calls[-1] if self._calls else None, _global_generators(loop.device)
        for name in loop.log.names:
            self._owners.setdefault(name, call.plugin if call else "")
        if call and call.generators != generators:
            call.drew = True
        return generators

    @hookimpl(wrapper=True)
    def before_step(self, loop: Loop, batch: Batch) -> Generator[None, None, None]:
        if loop.resume and not (self.out / f"{RESUMED}.json").exists():
            self._write(RESUMED, loop)
            self._put_back(loop)
        self._batch = batch
        yield
        self._batch = None

    @hookimpl(trylast=True)
    def between_steps(self, loop: Loop) -> None:
        step = loop.progress.step
        if step >= self.stop:  # not by the config: learning rates may follow the length of the run
            loop.stop("done")
        if not loop.resume and step == self.at and not (self.out / f"{SAVED}.json").exists():
            self._write(SAVED, loop)
            self._keep(loop)
        if not self.kill or not self.at <= step < self.stop:
            return
        if self._complete is None:
            time.sleep(min(5.0, 0.05 * 2**self._waited))  # the run must not end before a large checkpoint is complete
            self._waited += 1
        elif step > self._complete and (loop.log.due or step + 1 == self.stop):
            os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))  # on Windows SIGTERM kills as hard

    @hookimpl
    def on_checkpoint(self, loop: Loop, path: Path) -> None:
        if self._complete is None and loop.progress.step >= self.at:
            self._complete = loop.progress.step
        self._folders.add(path.name if path.parent == loop.run_dir else path.parent.name)

    @hookimpl(trylast=True)
    def on_stop(self, loop: Loop, reason: Reason) -> None:
        if reason in ("done", "plugin"):
            self._write(END, loop)

    def _keep(self, loop: Loop) -> None:
        for index, name in enumerate(self.fields):
            plugin, _, attribute = name.rpartition("/")
            buffer = io.BytesIO()
            with suppress(AttributeError, TypeError, RuntimeError, pickle.PicklingError):  # an open file, say
                torch.save((name, getattr(loop.plugins[plugin], attribute)), buffer)
                (self.out / f"{index}.pt").write_bytes(buffer.getvalue())

    def _put_back(self, loop: Loop) -> None:
        files = sorted(self.out.glob("*.pt")) if self.fields else []
        # The pickles are of the process before the kill, in a temporary folder.
        kept = dict(torch.load(path, weights_only=False) for path in files)
        for name in kept.keys() & set(self.fields):
            plugin, _, attribute = name.rpartition("/")
            held = loop.plugins[plugin]
            setattr(held, attribute, put_back(getattr(held, attribute), kept[name]))

    def _write(self, moment: str, loop: Loop) -> None:
        note = snapshot(loop) | {"owners": self._owners, "trace": self._trace}
        note["checkpoints"] = sorted(self._folders)
        note["drew"] = {plugin: sorted(hooks) for plugin, hooks in self._drew.items()}
        (self.out / f"{moment}.json").write_text(json.dumps(note), "utf-8")


def snapshot(loop: Loop) -> dict[str, Any]:
    """Return the state of a run and, by plugin, all plain fields, with a digest in place of each tensor."""
    fields = {name: digests(_all_plain(_fields(plugin), 0)) for name, plugin in loop.plugins.items()}
    return {"step": loop.progress.step, "state": digests(loop.state_dict()), "fields": fields}


def put_back(held: Any, kept: Any) -> Any:
    """Return what a field has to hold to be as `kept`: `held` itself, changed in place, where others may share it."""
    if isinstance(held, Tensor) and isinstance(kept, Tensor) and (held.shape, held.dtype) == (kept.shape, kept.dtype):
        held.detach().copy_(kept)
        return held
    if type(held) is not type(kept):
        return kept
    if isinstance(held, torch.Generator):
        return held.set_state(kept.get_state())
    if isinstance(held, dict):
        both = {key: put_back(held[key], value) if key in held else value for key, value in kept.items()}
        held.clear()
        held.update(both)
        return held
    if isinstance(held, list | deque):
        both_items = [put_back(held[k], value) if k < len(held) else value for k, value in enumerate(kept)]
        held.clear()
        held.extend(both_items)
        return held
    if hasattr(held, "load_state_dict") and not isinstance(held, nn.Module):
        held.load_state_dict(kept.state_dict())
        return held
    return kept


def digests(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a nested state by flat names; of a tensor its type, shape, first entries and SHA-256."""
    tensors, tree = flatten(state)
    return _leaves(tree) | {name: _digest(tensor) for name, tensor in tensors.items()}


def _leaves(tree: Any, where: str = "") -> dict[str, Any]:
    if not isinstance(tree, Mapping):
        return {where: tree}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        escaped = key.replace("~", "~0").replace("/", "~1")
        found |= _leaves(value, f"{where}/{escaped}" if where else escaped)
    return found


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1)
    shape = f"{DIGEST}{str(data.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    if len(data) == 1:
        return f"{shape} {data.item()!r}"
    digest = hashlib.sha256(data.view(torch.uint8).numpy().data).hexdigest()[:16]
    return f"{shape} {', '.join(map(repr, data[:2].tolist()))}, ... {digest}"


def _fields(plugin: object) -> dict[str, Any]:
    kind = type(plugin)
    names = [each.name for each in attrs.fields(kind)] if attrs.has(kind) else []
    found = {name: getattr(plugin, name, _NOTHING) for name in names}
    return found | getattr(plugin, "__dict__", {})


def _all_plain(values: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    inner = {str(key): _plain(each, depth) for key, each in values.items() if isinstance(key, str | int)}
    return {key: each for key, each in inner.items() if each is not _NOTHING}


def _plain(value: Any, depth: int) -> Any:
    """Return `value` as `flatten` takes it, or _NOTHING for an object without a value or a state of its own."""
    if value is None or isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) < _MOST):
        return value
    if isinstance(value, Tensor):
        return value if value.layout == torch.strided else _NOTHING
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return _NOTHING
    if isinstance(value, np.ndarray | np.generic | random.Random | np.random.Generator):
        return hashlib.sha256(pickle.dumps(value)).hexdigest()
    if isinstance(value, list | tuple | deque):
        value = dict(enumerate(value))
    elif hasattr(value, "state_dict") and not isinstance(value, nn.Module):  # the loop's own model, most likely
        value = value.state_dict()
    if not isinstance(value, Mapping) or len(value) > _MOST or depth == _DEPTH:
        return _NOTHING
    return _all_plain(value, depth + 1)


def _fingerprint(loop: Loop, hook: str, batch: Batch | None) -> int:
    """Return a hash of the weights, buffers, gradients, learning rates and `batch`."""
    weights = [*loop.model.parameters(), *(parameter for _, parameter in loop.adopted.named_parameters())]
    held = [*weights, *loop.model.buffers()]
    if batch is not None:
        columns = (batch.inputs, *batch.conditions.values(), *batch.draws.values())
        held += [value for value in columns if isinstance(value, Tensor)]
    if hook not in ("before_epoch", "before_step", "on_epoch_end"):  # which may have the gradients of the step before
        held += [weight.grad for weight in weights if weight.grad is not None]
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    plain = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in held]
    sums = [each.detach().view(whole[each.itemsize]).sum() for each in plain if each.layout == torch.strided]
    groups = [group for optimizer in loop.optimizers for group in optimizer.param_groups]
    # In before_step the rates are being set: until then a resumed run has those of its config.
    rates = [float(group.get("lr", 0.0)) for group in groups if hook not in ("before_epoch", "before_step")]
    return hash((int(torch.stack(sums).sum()), *rates))


def _global_generators(device: torch.device) -> tuple[Any, ...]:
    """Return the states of the global generators of torch, Python and numpy."""
    _, keys, *rest = np.random.get_state(legacy=True)
    states = [torch.get_rng_state().numpy().tobytes(), random.getstate(), np.asarray(keys).tobytes(), rest]
    if device.type != "cpu":
        states.append(torch.get_device_module(device.type).get_rng_state().numpy().tobytes())
    return tuple(states)
