"""A copy of the state of a run in memory, which a thread can write while training goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hookdiff import UserError
from hookdiff.disk import check_tensors, flatten
from hookdiff_checkpoint.folder import Parts


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


def num_bytes(parts: Parts) -> int:
    """Return the size of the tensors of `parts` in bytes."""
    return sum(tensor.numel() * tensor.itemsize for tensors, _ in parts.values() for tensor in tensors.values())


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
