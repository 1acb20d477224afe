"""Finds the hooks in which a plugin draws from a global generator."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from attrs import define, field

# In these the loop seeds torch's generator, and dropout draws from it.
_PASSES = ("accumulate", "micro_step", "compute_loss")


@define(eq=False)
class Draws:
    """Watches the calls of `plugin`, as an argument of `Plugins.instrument`."""

    plugin: str
    found: list[str] = field(factory=list, init=False)  # sentences, each once
    _num_passes: int = field(default=0, init=False)

    @contextmanager
    def __call__(self, plugin: str, hook: str) -> Iterator[None]:
        self._num_passes += hook in _PASSES
        before, num_passes = _states(), self._num_passes
        yield
        if plugin != self.plugin:
            return
        has_passes = hook in _PASSES or self._num_passes > num_passes
        for name, state in _states().items():
            fact = f"it changes the global generator of {name} in {hook}"
            if state != before[name] and fact not in self.found and not (name == "torch" and has_passes):
                self.found.append(fact)


def _states() -> dict[str, Any]:
    _, *numbers = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [bytes(np.asarray(number)) for number in numbers],
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
