"""The plugin `ema`."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import torch
from attrs import define, field
from attrs.validators import ge, lt
from torch import Tensor

from hookdiff import Loop, SampleRequest, Samples, UserError, borrowed_weights, hookimpl

NAME = "ema"  # of the weights, in a SampleRequest
NUM_UPDATES = "ema.num_updates"  # in the state, beside the model's own keys


def warmup_decay(num_updates: int) -> float:
    """Return (1 + n) / (10 + n) after n >= 0 updates: an average that is young forgets fast."""
    return (1 + num_updates) / (10 + num_updates)


@define(eq=False)
class EMA:
    """Keeps a moving average of the weights and samples with it.

    After every update that changed the weights, shadow <- decay * shadow + (1 - decay) * weights. The shadow is
    float32 whatever the weights are: in bf16 with decay 0.9999 it would never move. Steps that are void or skipped
    do not move it.
    """

    decay: float = field(default=0.999, validator=[ge(0), lt(1)])  # per update
    warmup: bool = True  # use the smaller of decay and (1 + n) / (10 + n) at update n
    shadow: dict[str, Tensor] = field(init=False)  # float32, by parameter name
    num_updates: int = field(default=0, init=False)
    _parameters: list[Tensor] = field(init=False)  # of the model, in the order of the shadow
    _shadow: list[Tensor] = field(init=False)  # the values of the shadow
    _is_float32: bool = field(init=False)  # all of the parameters

    @hookimpl(tryfirst=True)
    def on_start(self, loop: Loop) -> None:
        named = dict(loop.model.named_parameters())
        self.shadow = {name: parameter.detach().float().clone() for name, parameter in named.items()}
        # Listed once: parameters keep their addresses, and walking the modules costs more than the update.
        self._parameters = [parameter.detach() for parameter in named.values()]
        self._shadow = list(self.shadow.values())
        self._is_float32 = all(parameter.dtype == torch.float32 for parameter in self._parameters)

    @hookimpl(tryfirst=True)
    def after_optimizer_step(self, loop: Loop) -> None:
        decay = min(self.decay, warmup_decay(self.num_updates)) if self.warmup else self.decay
        torch._foreach_lerp_(self._shadow, self._weights(), 1 - decay)
        self.num_updates += 1
        if loop.log.due:
            loop.log({"ema/decay": decay, "ema/distance": self.distance()})

    @hookimpl(wrapper=True)
    def sample(self, loop: Loop, request: SampleRequest) -> Generator[None, Samples, Samples]:
        if request.weights not in (None, NAME) or loop.weights != "model":
            return (yield)
        with borrowed_weights(loop, NAME, self.shadow):
            return (yield)

    def distance(self) -> Tensor:
        """Return |weights - shadow| / |weights|, L2 over all parameters: scalar, on the device.

        0 for long means that the average never moved; near 1, that it has lost the weights.
        """
        weights = self._weights()
        apart = torch._foreach_norm(torch._foreach_sub(weights, self._shadow))
        size = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(weights)))
        total = torch.linalg.vector_norm(torch.stack(apart))
        distance: Tensor = total / size
        return distance

    def _weights(self) -> list[Tensor]:
        return self._parameters if self._is_float32 else [parameter.float() for parameter in self._parameters]

    def state_dict(self) -> dict[str, Any]:
        """Return the shadow under the model's own keys, and the count of updates."""
        return {**self.shadow, NUM_UPDATES: self.num_updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a saved average; raises UserError when it is of another model."""
        saved = {name: value for name, value in state.items() if name != NUM_UPDATES}
        if differing := saved.keys() ^ self.shadow.keys():
            raise UserError(f"the saved average is of another model; only one of them has {min(differing)!r}")
        for name, value in saved.items():
            self.shadow[name].copy_(value)
        self.num_updates = state[NUM_UPDATES]
