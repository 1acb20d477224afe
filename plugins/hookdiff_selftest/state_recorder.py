"""The plugin that records the state of a tested run, and kills its process."""

import io
import json
import os
import pickle
import signal
import time
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import attrs
import torch
from attrs import define, field
from attrs.validators import ge
from torch import Tensor, nn

from hookdiff import Batch, Loop, Reason, hookimpl
from hookdiff.authors import is_recording
from hookdiff.loop import hooks_of, keeps_state, restore_state, state_of
from hookdiff.machine import fill_
from hookdiff.options import about
from hookdiff.testing import Calls, ValueKey, snapshot

SAVED, RESUMED, END = "saved", "resumed", "end"  # the moments, and the names of their files
# Hooks after which weights, gradients and hyper-parameters are traced; some of the hooks must change none of these.
_BEFORE_PASSES = hooks_of("epoch", "batch")
_CHANGING = (*_BEFORE_PASSES, *hooks_of("passes", "scale", "update", "after"))
# Parts of a state that are not compared: the proof changes the config, and lines of JSON have times in them.
_DIFFERENT = ("config/", "plugins/metrics/", "plugins/texts/", "plugins/distributions/")


@define(frozen=True)
class Note:
    """The state and the trace of a run at one moment; a file holds a note as JSON."""

    step: int = -1
    values: dict[ValueKey, Any] = field(factory=dict)  # values of the state, and of the fields of plugins
    owners: dict[str, str] = field(factory=dict)  # the plugin that logs each number, by its name
    drew: dict[str, list[str]] = field(factory=dict)  # the hooks in which each plugin drew from a global generator
    trace: list[Any] = field(factory=list)  # position, hook, plugin, and fingerprint of the weights after it
    checkpoints: list[str] = field(factory=list)  # folders of checkpoints in the run directory

    @property
    def state(self) -> dict[ValueKey, Any]:
        """The values of the state that are compared."""
        saved = {key: value for key, value in self.values.items() if key.kind == "saved value"}
        return {key: value for key, value in saved.items() if not key.name.startswith(_DIFFERENT)}

    def write(self, path: Path) -> None:
        values = [[*key[:2], value] for key, value in self.values.items()]
        path.write_text(json.dumps({**attrs.asdict(self, recurse=False), "values": values}), "utf-8")

    @classmethod
    def read(cls, path: Path) -> Self:
        entries = json.loads(path.read_text("utf-8"))
        return cls(**{**entries, "values": {ValueKey(kind, name): value for kind, name, value in entries["values"]}})


@define(eq=False)
class StateRecorder:
    """Records the state of a run when it is saved, when it is resumed, and at its end.

    It has to be the last plugin of the list, so that its hooks run last. With `kill` it kills its
    process, as a power cut would, some steps after a checkpoint was complete. It notes the plugins that log each
    number, change weights, and draw from generators that no checkpoint holds.
    """

    out: Path = field(metadata=about("the folder of its notes"))
    at: int = field(validator=ge(1), metadata=about("the step at which the run is saved"))
    stop: int = field(validator=ge(1), metadata=about("the step at which the run is done"))
    kill: bool = field(default=False, metadata=about("kill the process after the save"))
    fields: list[str] = field(factory=list, metadata=about("PLUGIN/FIELD: saved, and restored after the resume"))
    _complete: int | None = field(default=None, init=False)  # the step at which `on_checkpoint` fired
    _waited: int = field(default=0, init=False)  # number of waits for the checkpoint
    _folders: set[str] = field(factory=set, init=False)  # folders of checkpoints in the run directory
    _calls: Calls = field(init=False)
    _trace: list[tuple[int, str, str, int]] = field(factory=list, init=False)  # position, hook, plugin, fingerprint
    _batch: Batch | None = field(default=None, init=False)  # during before_step

    @hookimpl
    def on_start(self, loop: Loop) -> None:
        self._calls = Calls(loop)

        @contextmanager
        def watch(plugin: str, hook: str) -> Iterator[None]:
            with self._calls(plugin, hook):
                yield
            if hook in _CHANGING and loop.progress.step >= self.at and not is_recording(loop.device):
                self._trace.append((loop.progress.position, hook, plugin, _fingerprint(loop, hook, self._batch)))

        self.out.mkdir(parents=True, exist_ok=True)
        loop.plugins.instrument(watch)

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
            os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))  # on Windows SIGTERM also kills at once

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
            with suppress(AttributeError, TypeError, RuntimeError, pickle.PicklingError):  # for example, an open file
                torch.save((name, getattr(loop.plugins[plugin], attribute)), buffer)
                (self.out / f"{index}.pt").write_bytes(buffer.getvalue())

    def _put_back(self, loop: Loop) -> None:
        files = sorted(self.out.glob("*.pt")) if self.fields else []
        # The pickles are safe to load: the process before the kill wrote them to a temporary folder.
        values = dict(torch.load(path, weights_only=False) for path in files)
        for name in values.keys() & set(self.fields):
            plugin, _, attribute = name.rpartition("/")
            held = loop.plugins[plugin]
            setattr(held, attribute, put_back(getattr(held, attribute), values[name]))

    def _write(self, moment: str, loop: Loop) -> None:
        drew = {plugin: list(hooks) for plugin, hooks in self._calls.drew.items()}
        folders = sorted(self._folders)
        note = Note(loop.progress.step, snapshot(loop), self._calls.owners, drew, self._trace, folders)
        note.write(self.out / f"{moment}.json")


def put_back(held: Any, kept: Any) -> Any:
    """Return a field's value with the content of `kept`. If `held` may be shared, it is changed in-place."""
    if isinstance(held, Tensor) and isinstance(kept, Tensor) and (held.shape, held.dtype) == (kept.shape, kept.dtype):
        fill_(held, kept)
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
    if keeps_state(held) and not isinstance(held, nn.Module):
        restore_state(held, state_of(kept))
        return held
    return kept


def _fingerprint(loop: Loop, hook: str, batch: Batch | None) -> int:
    """Return a hash of the weights, buffers, gradients, learning rates and `batch`."""
    weights = [*loop.model.parameters(), *(parameter for _, parameter in loop.adopted.named_parameters())]
    held = [*weights, *loop.model.buffers()]
    if batch is not None:
        columns = (batch.inputs, *batch.conditions.values(), *batch.draws.values())
        held += [value for value in columns if isinstance(value, Tensor)]
    if hook not in (*_BEFORE_PASSES, "on_epoch_end"):  # gradients may still be there from the step before
        held += [weight.grad for weight in weights if weight.grad is not None]
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    plain = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in held]
    sums = [each.detach().view(whole[each.itemsize]).sum() for each in plain if each.layout == torch.strided]
    groups = [group for optimizer in loop.optimizers for group in optimizer.param_groups]
    # Learning rates are set in before_step: until then a resumed run has the rates of its config.
    rates = [float(group.get("lr", 0.0)) for group in groups if hook not in _BEFORE_PASSES]
    return hash((int(torch.stack(sums).sum()), *rates))
