"""Adaptive gradient clipping: each output unit's gradient against its own weights."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from hookdiff import UserError, nearest

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class _Tensor:
    """A trained parameter, viewed with its output units in front."""

    def __init__(self, parameter: nn.Parameter, groups: int) -> None:
        self._parameter, self._groups = parameter, groups
        self.weights = self._view(parameter.detach())  # parameters keep their addresses
        self.inner = tuple(range(2 if groups else 1, self.weights.ndim))  # dims within a unit; none of a vector

    @property
    def gradient(self) -> Tensor | None:
        return None if self._parameter.grad is None else self._view(self._parameter.grad)

    def spread(self, values: Tensor) -> Tensor:
        """Return `values`, one a unit, in a shape that a gradient can be multiplied by."""
        units = self.weights.shape[: self.inner[0]] if self.inner else ()
        return values.view((*units, *[1] * len(self.inner)))

    def _view(self, tensor: Tensor) -> Tensor:
        # Of a transposed convolution (in, out / groups, ...) becomes (groups, out / groups, in / groups, ...).
        if not self._groups:
            return tensor
        return tensor.view(self._groups, len(tensor) // self._groups, *tensor.shape[1:]).transpose(1, 2)


class Units:
    """The output units of a model: rows of a matrix, filters of a convolution, and each bias or gain as a whole.

    trained: names of the parameters that are looked at; the gradients of others are cleared by nobody.
    exclude: patterns of parameter names that are left out, as "out.*". Raises UserError for one that fits none.
    dtype: of norms.
    """

    def __init__(
        self, model: nn.Module, trained: Collection[str], exclude: Collection[str], dtype: torch.dtype
    ) -> None:
        groups = {m.weight: m.groups for m in model.modules() if isinstance(m, TRANSPOSED)}
        held = set(trained)
        named = {name: p for name, p in model.named_parameters() if name in held}
        for pattern in exclude:
            if not any(fnmatchcase(name, pattern) for name in named):
                raise UserError(
                    f"plugins.clip.rule.exclude: {pattern!r} fits no trained parameter{nearest(pattern, named)}"
                    f" (the last is {list(named)[-1]!r})"
                )
        self._dtype = dtype
        self._tensors = [
            _Tensor(p, groups.get(p, 0))
            for name, p in named.items()
            if not any(fnmatchcase(name, pattern) for pattern in exclude)
        ]
        self._tensors.sort(key=lambda tensor: len(tensor.inner) > 0)  # vectors first

    @torch.no_grad()
    def clip_(self, factor: float, floor: float) -> Tensor:
        """Scale the gradient of each unit down to `factor` times the norm of its weights, at least `floor`.

        Returns the share of units that were scaled: scalar, on the device. Two norms and a product for each matrix;
        all else is done for many tensors at once.
        """
        found = [(tensor, gradient) for tensor in self._tensors if (gradient := tensor.gradient) is not None]
        if not found:
            return torch.zeros(())
        inner, gradients = [tensor.inner for tensor, _ in found], [gradient for _, gradient in found]
        allowed = self._norms([tensor.weights for tensor, _ in found], inner)
        norms = self._norms(gradients, inner)
        # A gradient of zero gives infinity, which is cut to 1.
        scale = torch.cat(allowed).clamp_(min=floor).mul_(factor).div_(torch.cat(norms)).clamp_(max=1)
        parts = torch.split(scale, [len(part) for part in norms])
        torch._foreach_mul_(gradients, [t.spread(part) for (t, _), part in zip(found, parts, strict=True)])
        return (scale < 1).float().mean()

    def _norms(self, tensors: list[Tensor], inner: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Return the L2 norms of the units of each tensor: (units,)."""
        vectors = [tensor for tensor, dims in zip(tensors, inner, strict=True) if not dims]
        norms = [norm.view(1) for norm in torch._foreach_norm(vectors, 2, self._dtype)] if vectors else []
        for tensor, dims in zip(tensors[len(vectors) :], inner[len(vectors) :], strict=True):
            norms.append(torch.linalg.vector_norm(tensor, dim=dims, dtype=self._dtype).flatten())
        return norms
