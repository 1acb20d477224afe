"""What a plugin does on the device in a step that is recorded once and replayed, such as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import torch
from attrs import define
from torch import Tensor

if TYPE_CHECKING:
    from hookdiff.loop import Loop


def _nothing() -> None:
    """Do nothing before a replay."""


def is_recording(device: torch.device) -> bool:
    """Return whether `device` only notes its work now, for later replays. No value can be read meanwhile."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def wait_for(device: torch.device) -> None:
    """Wait until `device` has done its work, for a clock; not while it is recording, which allows no waiting."""
    if device.type == "cuda" and not is_recording(device):
        torch.cuda.synchronize(device)


@define(frozen=True)
class DevicePart:
    """The work of a hook on the device, without a decision by the host.

    hook: the hook to which the work belongs.
    work: is recorded once, and the device repeats it in each replay. It reads and writes the same tensors each time,
        and never the value of one. Its argument is 1.0 if loss and gradients are finite, else 0.0 (float32, scalar, on
        the device): then it must change nothing that lasts.
    prepare: is called before each replay. It fills the tensors in which `work` finds numbers that change.
    """

    hook: Literal["after_backward", "after_optimizer_step"]
    work: Callable[[Tensor], object]
    prepare: Callable[[], object] = _nothing


@runtime_checkable
class Recordable(Protocol):
    """A plugin whose hooks between the first forward and the update need no host in between.

    The hooks themselves are still called. Those of the passes are called while a step is recorded, and not in a replay.
    `after_backward` and all later ones are called after each replay: the device has updated the weights by then, and
    `loop.gradients.is_applied` is true. A plugin without this method keeps the host in between in each step.

    A plugin may also have a method `needs_host(loop) -> bool`, which is asked in each step after `before_step`: True
    for a step, such as a logged one, in which its hooks must run in their usual places.
    """

    def on_device(self, loop: Loop) -> list[DevicePart] | None:
        """Return what the hooks do on the device, often nothing; None if these options need the host."""
