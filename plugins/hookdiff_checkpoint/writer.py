"""Writes checkpoints on a thread, from a copy of the state in memory."""

import ctypes
import errno
import logging
import os
import shutil
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from attrs import define, evolve, field
from torch import Tensor

from hookdiff.disk import check_place, make_folder
from hookdiff.loop import ADOPTED
from hookdiff.machine import BackgroundGroup, first_rank_says, rank, thread_beside
from hookdiff_checkpoint.folder import CheckpointInfo, newest_first
from hookdiff_checkpoint.keep import remove
from hookdiff_checkpoint.saving import Parts, write_checkpoint

logger = logging.getLogger("hookdiff")

_SPARE = 1 << 20  # bytes for manifest, headers and folders
_EXTRA = "_extra_state"  # in the key under which torch saves what a module's `get_extra_state` returns

Buffer = tuple[str, torch.Size]  # name and shape; after a change of shape it counts as another buffer


class NotFinite(Exception):
    """A tensor, which the message names, is not finite. The checkpoint has not been written."""


class BufferNotFinite(NotFinite):
    """The tensor is a buffer. The weights and the state of the optimizers, which an update changes, are finite."""


class Staging:
    """Host memory for the copy of the state, which all saves use again; page-locked for tensors of a GPU.

    The copies from a GPU are queued between two steps, so the host need not wait for them until `wait`.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._events: list[torch.cuda.Event] = []

    def reserve(self, parts: Parts) -> None:
        """Take the memory for a copy of `parts` now, by writing it: the system assigns a page at its first write."""
        for _, _, _, buffer, is_first in self._places(parts):
            if is_first and not buffer.is_pinned():
                ctypes.memset(buffer.data_ptr(), 0, buffer.nbytes)  # on one thread, without the lock of Python

    def copy(self, parts: Parts) -> Parts:
        """Return `parts` with copied tensors, which overwrite the copies of an earlier call."""
        copies: dict[str, dict[str, Tensor]] = {part: {} for part in parts}
        sources, targets = list[Tensor](), list[Tensor]()
        for part, name, tensor, buffer, is_first in self._places(parts):
            copies[part][name] = buffer
            if is_first:
                sources.append(tensor)
                targets.append(buffer)
        devices = {source.device for source in sources if source.is_cuda}
        if sources:  # without sharded tensors, only the first rank has sources
            with torch.no_grad():
                torch._foreach_copy_(targets, sources, non_blocking=bool(devices))
        self._events = [torch.cuda.current_stream(device).record_event() for device in devices]
        return {
            name: evolve(
                part,
                tensors={key: copies[name][key] for key in part.tensors},
                pieces={key: copies[name][key] for key in part.pieces},
            )
            for name, part in parts.items()
        }

    def _places(self, parts: Parts) -> list[tuple[str, str, Tensor, Tensor, bool]]:
        """Return part, name, tensor and buffer of each tensor, and whether it is the first of tied tensors."""
        before, self._buffers = self._buffers, {}
        places, seen = list[tuple[str, str, Tensor, Tensor, bool]](), dict[int, list[tuple[Tensor, Tensor]]]()
        for part, content in parts.items():
            for name, tensor in (*content.tensors.items(), *content.pieces.items()):
                at_address = seen.setdefault(tensor.data_ptr(), [])
                tied = next((copy for earlier, copy in at_address if _is_same(earlier, tensor)), None)
                buffer = before.get((part, name)) if tied is None else tied
                if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                    buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
                if tied is None:
                    self._buffers[part, name] = buffer
                    at_address.append((tensor, buffer))
                places.append((part, name, tensor, buffer, tied is None))
        return places

    def wait(self) -> None:
        for event in self._events:
            event.synchronize()


def _is_same(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors at one address hold the same values."""

    def form(tensor: Tensor) -> tuple[object, ...]:
        return tensor.device, tensor.shape, tensor.stride(), tensor.dtype

    return bool(first.numel()) and form(first) == form(second)


def check_finite(parts: Parts, weights: Container[str]) -> None:
    """Raise NotFinite if a parameter, an average of parameters, or a tensor of an optimizer is not finite.

    `weights` are the names of the parameters. Other tensors may hold infinities on purpose: a mask among the buffers,
    the state of a plugin.
    """
    for part, name, tensor in _floating(parts):
        of_optimizer = part == "optimizers" or (name.startswith(f"{ADOPTED}/") and "/optimizer/" in name)
        if (of_optimizer or name.rpartition("/")[2] in weights) and not _is_finite(tensor):
            raise NotFinite(f"{part}/{name}")


def finite_buffers(parts: Parts, weights: Container[str], before: Container[Buffer] = ()) -> set[Buffer]:
    """Return the floating-point buffers in `parts` that are finite, of the model and of modules that plugins train.

    Raises BufferNotFinite for a buffer that was finite `before` and is no longer. A mask holds its infinities from the
    beginning, but the variance of a batch norm becomes infinite once activations are too large.
    """
    finite = set[Buffer]()
    for part, name, tensor in _floating(parts):
        of_module = part == "model" or (name.startswith(f"{ADOPTED}/") and "/module/" in name)
        if not of_module or name.rpartition("/")[2] in weights or _EXTRA in name:
            continue
        buffer = f"{part}/{name}", tensor.shape
        if _is_finite(tensor):
            finite.add(buffer)
        elif buffer in before:
            raise BufferNotFinite(f"{part}/{name}")
    return finite


def _floating(parts: Parts) -> Iterator[tuple[str, str, Tensor]]:
    for part, content in parts.items():
        for name, tensor in (*content.tensors.items(), *content.pieces.items()):
            if tensor.is_floating_point():
                yield part, name, tensor


def _is_finite(tensor: Tensor) -> bool:
    if tensor.itemsize == 1:  # torch cannot sum float8
        tensor = tensor.float()
    # A sum takes a tenth of the time, but a sum of finite values may overflow.
    return bool(tensor.sum().isfinite() or tensor.isfinite().all())


@define(eq=False)
class Writer:
    """Writes the checkpoints of one run, one at a time, and removes those that `choose` does not return.

    Each rank has a writer with a thread. The threads agree after each part of a save, so that it succeeds or fails on
    all ranks with the same error. They run beside the training and go on if that fails. If the process of a rank dies,
    the other threads notice it at once.
    """

    folder: Path
    weights: Container[str]  # names of the parameters
    finite: set[Buffer]  # buffers that have been finite, and must stay finite
    known: dict[Path, CheckpointInfo]  # checkpoints of the run; used by the thread alone during a save
    choose: Callable[[Sequence[CheckpointInfo]], list[CheckpointInfo]]  # from all, newest first, those to keep
    _aside: BackgroundGroup = field(factory=BackgroundGroup, init=False)
    _staging: Staging = field(factory=Staging, init=False)
    _pool: ThreadPoolExecutor = field(factory=lambda: ThreadPoolExecutor(1, "checkpoint"), init=False)
    _reserving: Future[None] | None = field(default=None, init=False)
    job: Future[Path] | None = field(default=None, init=False)  # current save, until its `result` is taken

    def __attrs_post_init__(self) -> None:
        with thread_beside() as begin:
            self._pool.submit(begin)

    def reserve(self, parts: Parts) -> None:
        """Let the thread take the memory for copies of `parts`, so that the first save need not wait for it."""
        self._reserving = self._pool.submit(self._staging.reserve, parts)

    def start(self, name: str, parts: Parts, facts: Mapping[str, Any]) -> None:
        """Copy `parts` in memory, and let the thread write the copy to the folder `name`."""
        assert self.job is None, "two saves at once"
        if self._reserving:
            self._reserving.result()
            self._reserving = None
        self.job = self._pool.submit(self._write, self.folder / name, self._staging.copy(parts), facts)

    def is_done(self) -> bool:
        """Return whether a save has been begun and is done; all ranks must call this between the same steps."""
        return self.job is not None and first_rank_says(self.job.done())

    def result(self) -> Path:
        """Wait for the current save, and return its path or raise its error."""
        assert self.job
        wait([self.job])  # if this is interrupted, the save is still the current one
        job, self.job = self.job, None
        return job.result()

    def last_good(self) -> str:
        """Return a sentence about the newest checkpoint from which a run can resume."""
        checkpoints = self._newest_first()
        return f"the last good checkpoint is {checkpoints[0].path}" if checkpoints else "there is no checkpoint yet"

    def close(self) -> None:
        self._pool.shutdown()
        self._aside.close()

    def _write(self, path: Path, parts: Parts, facts: Mapping[str, Any]) -> Path:
        """Run on the thread. Raises NotFinite for weights that are not finite, or buffers that are no longer finite."""
        size = sum(self._aside.gathered_or_raised(lambda: self._checked(parts)))
        try:
            self._write_once(path, parts, facts, size)
        except FileNotFoundError:
            self._aside.gathered_or_raised(self._make_folder)
            self._write_once(path, parts, facts, size)
        self.known = self._aside.gathered_or_raised(self.prune)[0]
        return path

    def _checked(self, parts: Parts) -> int:
        """Wait for the copies, check them, and return their size in bytes."""
        self._staging.wait()
        check_finite(parts, self.weights)
        self.finite |= finite_buffers(parts, self.weights, self.finite)
        return sum(part.bytes for part in parts.values())

    def _write_once(self, path: Path, parts: Parts, facts: Mapping[str, Any], size: int) -> None:
        self._aside.gathered_or_raised(lambda: self._check_room(size))
        self.known[path] = write_checkpoint(path, parts, facts, self._aside)

    def _check_room(self, size: int) -> None:
        if rank() == 0 and shutil.disk_usage(self.folder).free < size + _SPARE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _make_folder(self) -> None:
        if rank() == 0:
            make_folder(self.folder)  # only in the run directory that is locked
            logger.warning("%s was missing, and was created again", self.folder)

    def prune(self) -> dict[Path, CheckpointInfo]:
        """Remove the checkpoints that are not kept, and return the others. Not to be called during a save."""
        if rank() > 0:
            return self.known
        check_place(self.folder)
        checkpoints = self._newest_first()  # a checkpoint that the user has removed does not count
        kept = self.choose(checkpoints)
        self.known = {info.path: info for info in kept}
        for info in checkpoints:
            if info not in kept:
                try:
                    remove(info.path)
                except OSError as error:  # the new checkpoint is complete nevertheless
                    logger.warning("%s cannot be removed: %s", info.path, error.strerror or error)
        return self.known

    def _newest_first(self) -> list[CheckpointInfo]:
        return newest_first(info for info in self.known.values() if info.path.exists())
