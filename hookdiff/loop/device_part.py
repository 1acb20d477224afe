"""The work of plugins on the device in a step that is recorded once and replayed, such as a CUDA graph."""

from collections.abc import Callable
from typing import Literal

from attrs import define
from torch import Tensor


@define(frozen=True)
class DevicePart:
    """The work of hooks on the device, without a decision by the host.

    Args:
        phase: "update" for the work of `after_backward`, before the optimizers make their step; "after" for the
            work of `after_optimizer_step`.
        work: is recorded once, and the device repeats it in each replay. It reads and writes the same tensors each
            time, and never moves a value to the host. Its argument (float32, scalar, on the device) is 1.0 if loss and
            gradients are finite. If it is 0.0, the work must change nothing that lasts.
        prepare: is called before each replay. It fills the tensors from which `work` reads changing numbers.
    """

    phase: Literal["update", "after"]
    work: Callable[[Tensor], object]
    prepare: Callable[[], object] = lambda: None
