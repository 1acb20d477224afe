"""Records which plugins draw from a global random generator, and which names they log."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from attrs import define, field

from hookdiff.loop.hookspecs import hooks_of
from hookdiff.loop.loop import Loop

# In these hooks the loop seeds torch's generator, and dropout draws from it.
_PASSES = hooks_of("passes")


@define
class _Call:
    """A running call of a plugin's hook."""

    plugin: str
    states: dict[str, Any]  # of the global generators, at the last check
    drew: set[str] = field(factory=set)  # names of generators
    has_passes: bool = False


@define(eq=False)
class Calls:
    """Watches the plugins of `loop`, as an argument of `Plugins.instrument`. Of nested calls, the innermost counts."""

    loop: Loop
    drew: dict[str, dict[str, set[str]]] = field(factory=dict, init=False)  # generators by plugin and hook
    owners: dict[str, str] = field(factory=dict, init=False)  # plugins by name of a logged number; "" for the core
    _running: list[_Call] = field(factory=list, init=False)  # the innermost last

    @contextmanager
    def __call__(self, plugin: str, hook: str) -> Iterator[None]:
        begun = self._look()
        call = _Call(plugin, begun, has_passes=hook in _PASSES)
        self._running.append(call)
        try:
            yield
        finally:
            states = self._look()
            self._running.pop()
            # A hook may draw if it restores the generator; a hook with passes may draw from torch's generator.
            drew = [name for name in call.drew if states[name] != begun[name]]
            if drew := [name for name in drew if not (call.has_passes and name.startswith("torch"))]:
                self.drew.setdefault(plugin, {}).setdefault(hook, set()).update(drew)
            if self._running:
                self._running[-1].states = states
                self._running[-1].has_passes |= call.has_passes

    def _look(self) -> dict[str, Any]:
        """Note what the innermost call has logged and drawn since the last check; return the generators' states."""
        call, states = self._running[-1] if self._running else None, _states(self.loop.device)
        for name in self.loop.log.names:
            self.owners.setdefault(name, call.plugin if call else "")
        if call:
            call.drew |= {name for name, state in states.items() if state != call.states[name]}
        return states


def _states(device: torch.device) -> dict[str, Any]:
    _, keys, *rest = np.random.get_state(legacy=True)
    states = {
        "python": random.getstate(),
        "numpy": (np.asarray(keys).tobytes(), rest),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if device.type != "cpu":
        states[f"torch on {device.type}"] = torch.get_device_module(device.type).get_rng_state().numpy().tobytes()
    return states
