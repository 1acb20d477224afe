"""Counts the autograd graphs of a model that are alive, because none may outlive its step.

A graph holds memory. Its node at a parameter remembers the CUDA stream of its pass: while the node is alive, no later
step can be recorded as a CUDA graph.
"""

import weakref
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn


class _Held:
    """An object that is alive as long as the node of a graph that holds it."""


class _Noting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, nodes: list[Any]) -> Tensor:
        ctx.held = _Held()
        nodes.append(weakref.ref(ctx.held))
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return *gradients, None


@define(eq=False)
class Graphs:
    """Counts the graphs of the watched models."""

    _nodes: list[Any] = field(factory=list, init=False)

    def watch(self, model: nn.Module) -> nn.Module:
        """Count the graphs of `model` from now on, and return the model."""
        model.register_forward_hook(lambda module, given, output: _Noting.apply(output, self._nodes))
        return model

    @property
    def num_made(self) -> int:
        return len(self._nodes)

    @property
    def num_alive(self) -> int:
        return sum(node() is not None for node in self._nodes)
