"""Writes checkpoints on a thread, from a copy of the state in memory."""

import errno
import logging
import os
import shutil
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from hookdiff import UserError
from hookdiff.adopted import ADOPTED
from hookdiff.disk import check_place, check_tensors, flatten, make_folder
from hookdiff_checkpoint.folder import CheckpointInfo, Parts, write_checkpoint
from hookdiff_checkpoint.keep import remove

log = logging.getLogger("hookdiff")

_SPARE = 1 << 20  # bytes for manifest, headers and folders


class NotFinite(Exception):
    """A tensor, which the message names, is not finite. The checkpoint has not been written."""


def split(state: Mapping[str, Any]) -> Parts:
    """Return the parts of the state of a loop; the tensors are not copied, all other values are.

    Raises UserError for a value that no file can hold.
    """
    parts = {name: content for name, content in state.items() if name != "plugins"}
    parts |= {f"plugins/{name}": content for name, content in state["plugins"].items()}
    result = {}
    for name, content in parts.items():
        try:
            tensors, values = flatten(content, name)
            check_tensors({f"{name}/{key}": tensor for key, tensor in tensors.items()})
        except TypeError as error:
            raise UserError(f"this run cannot be saved: {error}") from None
        result[name] = tensors, values
    return result


class Staging:
    """Memory on the host that all snapshots share, page-locked for tensors of a GPU.

    The copies from a GPU are queued after the step that made the values and before the next step, so the host need not
    wait for them; `wait` does.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._events: list[torch.cuda.Event] = []

    def copy(self, parts: Parts) -> Parts:
        """Return `parts` with copied tensors, which overwrite those of an earlier call."""
        before, self._buffers = self._buffers, {}
        sources, targets, result = [], [], {}
        seen: dict[Any, Tensor] = {}  # tied weights are copied once
        for part, (tensors, values) in parts.items():
            copies = {}
            for name, tensor in tensors.items():
                tensor = tensor.detach()
                same = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
                if same not in seen or not tensor.numel():
                    buffer = before.get((part, name))
                    if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                        buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
                    self._buffers[part, name] = seen[same] = buffer
                    sources.append(tensor)
                    targets.append(buffer)
                copies[name] = seen[same]
            result[part] = copies, values
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=source.is_cuda)
        self._events = [
            torch.cuda.current_stream(device).record_event()
            for device in {source.device for source in sources if source.is_cuda}
        ]
        return result

    def wait(self) -> None:
        """Wait until the copies are complete."""
        for event in self._events:
            event.synchronize()


def check_finite(parts: Parts, weights: Container[str]) -> None:
    """Raise NotFinite if a parameter, an average of parameters, or a tensor of an optimizer is not finite.

    `weights` are the names of the parameters. Other tensors may hold infinities on purpose: a mask among the buffers,
    the state of a plugin.
    """
    for part, (tensors, _) in parts.items():
        for name, tensor in tensors.items():
            of_optimizer = part == "optimizers" or (name.startswith(f"{ADOPTED}/") and "/optimizer/" in name)
            if not tensor.is_floating_point() or not (of_optimizer or name.rpartition("/")[2] in weights):
                continue
            # A sum takes a tenth of the time; that of finite values may overflow.
            if not tensor.sum().isfinite() and not tensor.isfinite().all():
                raise NotFinite(f"{part}/{name}")


@define(eq=False)
class Writer:
    """Writes the checkpoints of one run, one at a time, and removes those that `choose` does not return."""

    folder: Path
    weights: Container[str]  # names of the parameters
    known: dict[Path, CheckpointInfo]  # checkpoints of the run; used by the thread alone during a save
    choose: Callable[[Sequence[CheckpointInfo]], list[CheckpointInfo]]  # of all, newest first, those to keep
    _staging: Staging = field(factory=Staging, init=False)
    _pool: ThreadPoolExecutor = field(factory=lambda: ThreadPoolExecutor(1, "checkpoint"), init=False)
    job: Future[Path] | None = field(default=None, init=False)  # current save, until its `result` is taken

    def start(self, name: str, parts: Parts, facts: Mapping[str, Any]) -> None:
        """Copy `parts` in memory, and let the thread write the copy to the folder `name`."""
        assert self.job is None, "two saves at once"
        self.job = self._pool.submit(self._write, self.folder / name, self._staging.copy(parts), facts)

    def result(self) -> Path:
        """Wait for the current save, and return its path or raise its error."""
        assert self.job
        wait([self.job])  # if this is interrupted, the save is still the current one
        job, self.job = self.job, None
        return job.result()

    def last_good(self) -> str:
        """Return a sentence about the newest checkpoint from which a run can resume."""
        found = self._newest_first()
        return f"the last good one is {found[0].path}" if found else "there is none yet"

    def close(self) -> None:
        """Wait for the thread to end."""
        self._pool.shutdown()

    def _write(self, path: Path, parts: Parts, facts: Mapping[str, Any]) -> Path:
        """Run on the thread. Raises NotFinite for weights with which no run can go on."""
        self._staging.wait()
        check_finite(parts, self.weights)
        try:
            self._write_once(path, parts, facts)
        except FileNotFoundError:
            make_folder(self.folder)  # only in the run directory that is locked
            log.warning("%s was missing, and was created again", self.folder)
            self._write_once(path, parts, facts)
        self.prune()
        return path

    def _write_once(self, path: Path, parts: Parts, facts: Mapping[str, Any]) -> None:
        size = sum(tensor.numel() * tensor.itemsize for tensors, _ in parts.values() for tensor in tensors.values())
        if shutil.disk_usage(self.folder).free < size + _SPARE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.known[path] = write_checkpoint(path, parts, facts)

    def prune(self) -> None:
        """Remove the checkpoints that are not kept. Not to be called during a save."""
        check_place(self.folder)
        found = self._newest_first()  # a checkpoint that the user has removed does not count
        kept = self.choose(found)
        self.known = {one.path: one for one in kept}
        for one in found:
            if one not in kept:
                try:
                    remove(one.path)
                except OSError as error:  # the new checkpoint is complete nevertheless
                    log.warning("%s cannot be removed: %s", one.path, error.strerror or error)

    def _newest_first(self) -> list[CheckpointInfo]:
        found = [one for one in self.known.values() if one.path.exists()]
        return sorted(found, key=lambda one: (one.place, one.number), reverse=True)
