"""Adaptive gradient clipping: the gradient of each output unit is compared with the weights of the unit."""

from collections.abc import Collection
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from hookdiff import UserError, nearest

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class _Parameter:
    """A trained parameter, viewed with its output units as the first dimensions."""

    def __init__(self, parameter: nn.Parameter, groups: int) -> None:
        self._parameter, self._groups = parameter, groups
        self.weights = self._view(parameter.detach())  # parameters keep their addresses
        self.inner = tuple(range(2 if groups else 1, self.weights.ndim))  # dimensions within a unit; () for a vector

    @property
    def gradient(self) -> Tensor | None:
        return None if self._parameter.grad is None else self._view(self._parameter.grad)

    def spread(self, values: Tensor) -> Tensor:
        """Return `values`, one of each unit, in a shape that can be multiplied with the gradient."""
        units = self.weights.shape[: self.inner[0]] if self.inner else ()
        return values.view((*units, *[1] * len(self.inner)))

    def _view(self, tensor: Tensor) -> Tensor:
        # A transposed convolution (in, out / groups, ...) becomes (groups, out / groups, in / groups, ...).
        if not self._groups:
            return tensor
        return tensor.view(self._groups, len(tensor) // self._groups, *tensor.shape[1:]).transpose(1, 2)


class Units:
    """The output units of a model: rows of a matrix, filters of a convolution, and each bias or gain as a whole.

    Args:
        model: the model.
        trained: names of the parameters that an optimizer changes.
        exclude: patterns of parameter names that are not clipped, such as "out.*".
        dtype: precision of the norms.

    Raises UserError for a pattern that matches no trained parameter.
    """

    def __init__(
        self, model: nn.Module, trained: Collection[str], exclude: Collection[str], dtype: torch.dtype
    ) -> None:
        groups = {m.weight: m.groups for m in model.modules() if isinstance(m, TRANSPOSED)}
        kept = set(trained)
        named = {name: p for name, p in model.named_parameters() if name in kept}
        for pattern in exclude:
            matched = [name for name in named if fnmatchcase(name, pattern)]
            if not matched:
                raise UserError(
                    f"plugins.clip.rule.exclude: {pattern!r} matches no trained parameter{nearest(pattern, named)}"
                    f" (the last is {list(named)[-1]!r})"
                )
            kept.difference_update(matched)
        self._dtype = dtype
        self._parameters = [_Parameter(p, groups.get(p, 0)) for name, p in named.items() if name in kept]
        self._parameters.sort(key=lambda parameter: len(parameter.inner) > 0)  # vectors first

    @torch.no_grad()
    def clip_(self, factor: float, floor: float) -> Tensor:
        """Scale the gradient of each unit down to `factor` times the norm of its weights, which is at least `floor`.

        Returns the share of units that were scaled: scalar, on the device. It costs two norms and a product for each
        matrix; everything else is computed for many tensors at once.
        """
        found = [(each, gradient) for each in self._parameters if (gradient := each.gradient) is not None]
        if not found:
            return torch.zeros(())
        gradients = [gradient for _, gradient in found]
        inner = [each.inner for each, _ in found]
        allowed = self._norms([each.weights for each, _ in found], inner)
        norms = self._norms(gradients, inner)
        # A gradient of zero gives infinity, which is clamped to 1.
        scale = torch.cat(allowed).clamp_(min=floor).mul_(factor).div_(torch.cat(norms)).clamp_(max=1)
        parts = torch.split(scale, [len(part) for part in norms])
        torch._foreach_mul_(gradients, [each.spread(part) for (each, _), part in zip(found, parts, strict=True)])
        return (scale < 1).float().mean()

    def _norms(self, tensors: list[Tensor], inner: list[tuple[int, ...]]) -> list[Tensor]:
        """Return the L2 norms of the units of each tensor: (units,)."""
        num = inner.count(())
        norms = [norm.view(1) for norm in torch._foreach_norm(tensors[:num], 2, self._dtype)] if num else []
        for tensor, dims in zip(tensors[num:], inner[num:], strict=True):
            norms.append(torch.linalg.vector_norm(tensor, dim=dims, dtype=self._dtype).flatten())
        return norms
