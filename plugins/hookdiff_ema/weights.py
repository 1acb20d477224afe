"""The weights of a model as averages take them up: in float32, on the device of the averages."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Weights:
    """The parameters of `model`, tied ones once, and copies of those that are elsewhere or in half precision.

    `tensors` has their values, by name, in at least float32 on `device`, once `fetch` and then `wait` were called.
    """

    def __init__(self, model: nn.Module, device: torch.device | None = None) -> None:
        self._model = model
        # Listed once: parameters keep their addresses, and walking the modules costs more than the update.
        self._own = {name: parameter.detach() for name, parameter in model.named_parameters()}
        first = {parameter: name for name, parameter in model.named_parameters()}
        self.names = {key: first[parameter] for key, parameter in model.named_parameters(remove_duplicate=False)}
        self.tensors = {name: _taken(value, device or value.device) for name, value in self._own.items()}
        copied = [name for name, value in self._own.items() if self.tensors[name] is not value]
        self._copies = [self.tensors[name] for name in copied]
        self._originals = [self._own[name] for name in copied]
        from_cuda = any(value.is_cuda and not self.tensors[name].is_cuda for name, value in self._own.items())
        self._arrived = torch.cuda.Event() if from_cuda else None  # type: ignore[no-untyped-call]
        self.fetch()
        self.wait()

    @property
    def wait_is_long(self) -> bool:
        """Whether the values travel while the device goes on: what uses them is better done a step later."""
        return self._arrived is not None

    def fetch(self) -> None:
        """Begin to copy the values of now."""
        if self._copies:
            torch._foreach_copy_(self._copies, self._originals, non_blocking=self.wait_is_long)
        if self._arrived:
            self._arrived.record()

    def wait(self) -> None:
        """Return when the values that were fetched last are there."""
        if self._arrived:
            self._arrived.synchronize()

    def replaced(self) -> list[str]:
        """Return the names of the parameters that are others, or lie elsewhere, than when this was made."""
        now = {name: parameter.data_ptr() for name, parameter in self._model.named_parameters()}
        return [name for name, value in self._own.items() if now.get(name) != value.data_ptr()]

    def in_model_keys(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return `values`, by parameter name, under all keys of the model, with its buffers as they are now.

        Tied parameters have each of their names, so that `load_state_dict` takes it as it takes the model's own.
        """
        state = {key: value for key, value in self._model.state_dict().items() if isinstance(value, Tensor)}
        return {**state, **{key: values[name] for key, name in self.names.items() if key in state or key in values}}


def _taken(value: Tensor, device: torch.device) -> Tensor:
    """Return `value` itself if averages can read it where it is, else an empty copy of it."""
    dtype = torch.promote_types(value.dtype, torch.float32)
    if (value.dtype, value.device) == (dtype, device):
        return value
    return torch.empty_like(value, dtype=dtype, device=device, pin_memory=value.is_cuda and device.type == "cpu")
