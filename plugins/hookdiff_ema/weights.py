"""Gives the averages the weights of the model, in float32 and on the device of the averages."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hookdiff.machine import local, local_parts


class Weights:
    """The parameters of `model`: `tensors` has each of them once, by name, in at least float32, on `device`.

    Weights that the state of `model` leaves out, such as those of a frozen base, are left out here, too.

    Parameters that have this device and dtype are used directly. The others are copied: after `fetch` and `wait`, the
    copies have the values at the call of `fetch`. Copies from a GPU to the host have the dtype of the weights.
    """

    def __init__(self, model: nn.Module, device: torch.device | None = None) -> None:
        self._model = model
        # Listed only once: parameters keep their addresses, and a walk over the modules costs more than an update.
        state = model.state_dict()
        self._parameters = {name: value.detach() for name, value in model.named_parameters() if name in state}
        first = {parameter: name for name, parameter in model.named_parameters() if name in state}
        every = model.named_parameters(remove_duplicate=False)
        self.names = {key: first[parameter] for key, parameter in every if parameter in first}
        landed = {name: _landed(value, device or value.device) for name, value in self._parameters.items()}
        self.tensors = {name: _widened(value) for name, value in landed.items()}
        self._travels = _pairs(self._parameters, landed)
        self._widens = _pairs(landed, self.tensors)
        self._arrived: torch.cuda.Event | None = None
        if any(value.is_cuda for value in self._travels[0]):
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.fetch()
        self.wait()

    @property
    def wait_is_long(self) -> bool:
        """Whether the copies are made in the background, so that it is faster to use them one step later."""
        return self._arrived is not None

    @property
    def are_direct(self) -> bool:
        """Whether all tensors are the parameters themselves, and none is a copy."""
        return not self._travels[0] and not self._widens[0]

    def fetch(self) -> None:
        """Begin to copy the current values."""
        sources, targets = self._travels
        if sources:
            torch._foreach_copy_(targets, sources, non_blocking=self.wait_is_long)
        if self._arrived:
            self._arrived.record()

    def wait(self) -> None:
        """Wait until the copies of the last `fetch` are complete."""
        if self._arrived:
            self._arrived.synchronize()
        sources, targets = self._widens
        if sources:
            torch._foreach_copy_(targets, sources)

    def replaced(self) -> list[str]:
        """Return the names of the parameters with another address than at the start."""
        now = {name: local(parameter).data_ptr() for name, parameter in self._model.named_parameters()}
        return [name for name, value in self._parameters.items() if now.get(name) != local(value).data_ptr()]

    def in_model_keys(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return `values`, given by parameter name, under all keys of the model, together with the current buffers.

        A tied parameter has each of its names, as in `model.state_dict()`.
        """
        state = {key: value for key, value in self._model.state_dict().items() if isinstance(value, Tensor)}
        return {**state, **{key: values[name] for key, name in self.names.items() if key in state or key in values}}


def _landed(value: Tensor, device: torch.device) -> Tensor:
    """Return `value` if it is on `device`, otherwise an empty tensor like it on `device`."""
    if value.device == device:
        return value
    # A copy from a GPU is asynchronous only into pinned memory.
    return torch.empty_like(value, device=device, pin_memory=value.is_cuda and device.type == "cpu")


def _widened(value: Tensor) -> Tensor:
    """Return `value` if it has at least float32, otherwise an empty float32 tensor like it."""
    dtype = torch.promote_types(value.dtype, torch.float32)
    return value if value.dtype == dtype else torch.empty_like(value, dtype=dtype)


def _pairs(sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return this rank's parts of the sources that are not their targets, and of these targets."""
    names = [name for name, value in sources.items() if targets[name] is not value]
    return local_parts(sources[name] for name in names), local_parts(targets[name] for name in names)
