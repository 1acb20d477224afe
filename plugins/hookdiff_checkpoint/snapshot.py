"""A copy of the state of a run in memory, from which a thread can write while training goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hookdiff import UserError
from hookdiff.disk import check_tensors, flatten
from hookdiff_checkpoint.folder import Parts


def split(state: Mapping[str, Any]) -> Parts:
    """Return the parts of a state, as the loop gives it; the tensors are the live ones, all else is copied.

    Raises UserError for what no file can hold.
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


def num_bytes(parts: Parts) -> int:
    """Return how many bytes the tensors of `parts` take."""
    return sum(tensor.numel() * tensor.itemsize for tensors, _ in parts.values() for tensor in tensors.values())


class Staging:
    """Host memory that each snapshot uses again: page-locked where a GPU is copied from.

    A GPU's copies are queued behind the step that made the values and before the next one that changes them, so it is
    the device that waits, and not the host: `ready` is when they have arrived.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._events: list[torch.cuda.Event] = []

    def copy(self, parts: Parts) -> Parts:
        """Copy the tensors of `parts`; what an earlier call returned is overwritten."""
        before, self._buffers = self._buffers, {}
        sources, targets, result = [], [], {}
        seen: dict[Any, Tensor] = {}  # weights that are tied are copied, and stored in memory, once
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
        """Wait until the copies have arrived."""
        for event in self._events:
            event.synchronize()
