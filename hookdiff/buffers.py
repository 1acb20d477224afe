"""What a forward changes in a model beside its outputs, kept for when a step has to be as if it had not been."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Buffers:
    """The buffers of a model, such as batch norm's statistics, and their values when `keep` was last called."""

    def __init__(self, model: nn.Module) -> None:
        # Not named_buffers at each step: walking over all modules costs a millisecond.
        self._places = {
            f"{prefix}.{name}".lstrip("."): (module, name)
            for prefix, module in model.named_modules()
            for name in module._buffers
        }
        self.kept: dict[str, Tensor] = {}  # by their name in the model

    @torch.no_grad()
    def keep(self) -> None:
        """Keep the values as they are now, in place of those kept before."""
        found = {name: module._buffers.get(key) for name, (module, key) in self._places.items()}
        values = {name: value for name, value in found.items() if value is not None}
        if {name: value.shape for name, value in values.items()} != {n: kept.shape for n, kept in self.kept.items()}:
            self.kept = {name: value.clone() for name, value in values.items()}
        elif values:
            torch._foreach_copy_(list(self.kept.values()), list(values.values()))

    @torch.no_grad()
    def put_back(self) -> None:
        """Give the buffers the values that were kept."""
        for name, kept in self.kept.items():
            module, key = self._places[name]
            value = module._buffers.get(key)
            if value is not None and value.shape == kept.shape:
                value.copy_(kept)
            else:  # a forward has put another in its place
                module._buffers[key] = kept.clone()
