"""Counts transfers from the device to the host."""

from typing import Any

from torch.overrides import TorchFunctionMode

_READS = ("item", "tolist", "numpy", "cpu", "is_nonzero", "__bool__", "__int__", "__float__", "__index__", "__array__")


class CountTransfers(TorchFunctionMode):
    """Counts the transfers from the device to the host during a `with`, in `.count`.

    item(), tolist(), numpy(), cpu(), to("cpu"), bool(), int() and float() count, also on a CPU, where they are free.
    `to` with a torch.device does not count, since the device may be the loop's own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        self.count += name in _READS or (name == "to" and "cpu" in (*args[1:], *(kwargs or {}).values()))
        return func(*args, **(kwargs or {}))
