"""The weights of a model as averages take them up: in float32, on the device of the averages."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class Weights:
    """The parameters of `model`, tied ones once: `tensors` has them in at least float32 on `device`, by name.

    Those that are so already are taken as they are. Of the others there are copies, which have the values of the last
    `fetch` after `wait`. The copies on their way from a GPU to the host are in the weights' own precision.
    """

    def __init__(self, model: nn.Module, device: torch.device | None = None) -> None:
        self._model = model
        # Listed once: parameters keep their addresses, and walking the modules costs more than the update.
        self._own = {name: parameter.detach() for name, parameter in model.named_parameters()}
        first = {parameter: name for name, parameter in model.named_parameters()}
        self.names = {key: first[parameter] for key, parameter in model.named_parameters(remove_duplicate=False)}
        landed = {name: _landed(value, device or value.device) for name, value in self._own.items()}
        self.tensors = {name: _widened(value) for name, value in landed.items()}
        self._travels = _pairs(self._own, landed)
        self._widens = _pairs(landed, self.tensors)
        self._arrived: torch.cuda.Event | None = None
        if any(value.is_cuda for value in self._travels[0]):
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.fetch()
        self.wait()

    @property
    def wait_is_long(self) -> bool:
        """Whether the values travel while the device goes on: what uses them is better done a step later."""
        return self._arrived is not None

    def fetch(self) -> None:
        """Begin to take the values of now."""
        sources, targets = self._travels
        if sources:
            torch._foreach_copy_(targets, sources, non_blocking=self.wait_is_long)
        if self._arrived:
            self._arrived.record()

    def wait(self) -> None:
        """Return when the values that were fetched last are there."""
        if self._arrived:
            self._arrived.synchronize()
        sources, targets = self._widens
        if sources:
            torch._foreach_copy_(targets, sources)

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


def _landed(value: Tensor, device: torch.device) -> Tensor:
    """Return `value` itself if it is on `device`, else an empty copy there; only to pinned memory a copy is async."""
    if value.device == device:
        return value
    return torch.empty_like(value, device=device, pin_memory=value.is_cuda and device.type == "cpu")


def _widened(value: Tensor) -> Tensor:
    """Return `value` itself, or an empty copy in float32 if it has less."""
    dtype = torch.promote_types(value.dtype, torch.float32)
    return value if value.dtype == dtype else torch.empty_like(value, dtype=dtype)


def _pairs(sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the sources that have a target of their own, and these."""
    names = [name for name, value in sources.items() if targets[name] is not value]
    return [sources[name] for name in names], [targets[name] for name in names]
