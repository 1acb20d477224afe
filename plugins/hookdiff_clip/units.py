"""Adaptive gradient clipping: the gradient of each output unit is compared with the weights of the unit."""

from collections.abc import Collection
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from hookdiff import UserError, nearest
from hookdiff.machine import counts, is_sharded, local, norms, rank, summed

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class _Parameter:
    """A trained parameter, viewed with its output units as the first dimensions."""

    def __init__(self, parameter: nn.Parameter, groups: int) -> None:
        self.parameter, self._groups = parameter, groups
        self.weights = self._view(local(parameter.detach()))  # parameters keep their addresses
        self.inner = tuple(range(2 if groups else 1, self.weights.ndim))  # dimensions within a unit; () for a vector
        # Ranks shard the first dimension. In a vector and a transposed convolution, it is not the units' dimension.
        self.is_split = is_sharded(parameter) and (bool(groups) or not self.inner)

    @property
    def gradient(self) -> Tensor | None:
        """The gradient; for a sharded parameter, the part of this rank."""
        return None if self.parameter.grad is None else self._view(local(self.parameter.grad))

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

    Raises UserError for a pattern that matches no trained parameter, and for a grouped transposed convolution that is
    sharded.
    """

    def __init__(
        self, model: nn.Module, trained: Collection[str], exclude: Collection[str], dtype: torch.dtype
    ) -> None:
        groups = {m.weight: m.groups for m in model.modules() if isinstance(m, TRANSPOSED)}
        clipped = set(trained)
        named = {name: p for name, p in model.named_parameters() if name in clipped}
        for pattern in exclude:
            matched = [name for name in named if fnmatchcase(name, pattern)]
            if not matched:
                raise UserError(
                    f"plugins.clip.rule.exclude: {pattern!r} matches no trained parameter{nearest(pattern, named)}"
                    f" (the last is {list(named)[-1]!r})"
                )
            clipped.difference_update(matched)
        grouped = [name for name, p in named.items() if name in clipped and groups.get(p, 0) > 1 and is_sharded(p)]
        if grouped:
            raise UserError(
                f"plugins.clip.rule: agc cannot clip {grouped[0]}, a grouped transposed convolution that is sharded; "
                f"set exclude = [{grouped[0]!r}] to leave it out"
            )
        self._dtype = dtype
        self._parameters = [_Parameter(p, groups.get(p, 0)) for name, p in named.items() if name in clipped]
        self._parameters.sort(key=lambda parameter: len(parameter.inner) > 0)  # vectors first

    @torch.no_grad()
    def clip_(self, factor: float, floor: float) -> Tensor:
        """Scale the gradient of each unit down to `factor` times the norm of its weights, which is at least `floor`.

        Returns the share of units that were scaled: scalar, on the device. It costs two norms and a product for each
        matrix; all other operations run on many tensors at once.
        """
        pairs = [(each, gradient) for each in self._parameters if (gradient := each.gradient) is not None]
        if not pairs:
            return torch.zeros(())
        gradients = [gradient for _, gradient in pairs]
        parameters = [each for each, _ in pairs]
        allowed = self._norms(parameters, [each.weights for each in parameters])
        gradient_norms = self._norms(parameters, gradients)
        # A gradient of zero gives infinity, which is clamped to 1.
        scale = torch.cat(allowed).clamp_(min=floor).mul_(factor).div_(torch.cat(gradient_norms)).clamp_(max=1)
        parts = torch.split(scale, [len(part) for part in gradient_norms])
        torch._foreach_mul_(gradients, [each.spread(part) for (each, _), part in zip(pairs, parts, strict=True)])
        if not any(is_sharded(each.parameter) for each in parameters):
            return (scale < 1).float().mean()
        # A unit that several ranks hold counts only on the first of them.
        is_counted = [rank() == 0 if each.is_split else counts(each.parameter) for each in parameters]
        counted = [part for part, is_mine in zip(parts, is_counted, strict=True) if is_mine]
        clipped = torch.cat([scale.new_zeros(0), *counted]) < 1
        sums = summed(torch.stack((clipped.sum().float(), torch.full_like(scale[:1], clipped.numel())[0])))
        return sums[0] / sums[1]

    def _norms(self, parameters: list[_Parameter], tensors: list[Tensor]) -> list[Tensor]:
        """Return the L2 norms of the units of each of `tensors`, this rank's parts: (units,)."""
        num = sum(not each.inner for each in parameters)
        vectors = [each.parameter for each in parameters[:num]]
        all_norms = [norm.view(1) for norm in norms(vectors, self._dtype, tensors[:num])]
        for each, tensor in zip(parameters[num:], tensors[num:], strict=True):
            values = torch.linalg.vector_norm(tensor, dim=each.inner, dtype=self._dtype).flatten()
            all_norms.append(summed(values.square() * counts(each.parameter)).sqrt() if each.is_split else values)
        return all_norms
