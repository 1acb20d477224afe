"""Spectral normalisation: layers whose weight is divided by its largest singular value."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils import parametrize

from hookdiff.errors import nearest

LAYERS = (nn.Linear, _ConvNd)
_ORIGINAL = ".parametrizations.weight.original"  # what torch calls the weight behind a parametrisation
SETTLING = 15  # iterations from a random start: torch takes as many
log = logging.getLogger("hookdiff")


def plain_name(name: str) -> str:
    """Return the name that a parameter has without spectral norm."""
    return name.removesuffix(_ORIGINAL) + ".weight" if name.endswith(_ORIGINAL) else name


def is_estimate(name: str) -> bool:
    """Whether `name` is of a singular vector in a state: it can be found anew from the weight."""
    return name.endswith((".parametrizations.weight.0.u", ".parametrizations.weight.0.v"))


class DividedBySigma(nn.Module):
    """W / sigma(W), where the power method finds sigma = u' W v (Miyato et al. 2018, arXiv 1802.05957, algorithm 1).

    A forward does not move u and v: whoever trains calls `iterate` once an update. So all micro-batches of an update,
    and what gradient checkpointing computes again, see one weight; and reading the weight costs one product.
    """

    u: Tensor
    v: Tensor

    def __init__(self, weight: Tensor, transposed: bool) -> None:
        super().__init__()
        self.transposed = transposed  # a transposed convolution has its outputs second
        for name, size in zip(("u", "v"), self._matrix(weight).shape, strict=True):
            self.register_buffer(name, F.normalize(torch.randn(size), dim=0).to(weight))  # drawn alike on all devices
        self.iterate(weight, SETTLING)

    def _matrix(self, weight: Tensor) -> Tensor:
        return (weight.transpose(0, 1) if self.transposed else weight).flatten(1)

    def forward(self, weight: Tensor) -> Tensor:
        """Return `weight` with a largest singular value of 1."""
        with _without_autocast(weight.device):  # bf16 would leave sigma three digits
            return weight / torch.dot(self.u, self._matrix(weight) @ self.v)

    @torch.no_grad()
    def iterate(self, weight: Tensor, times: int = 1) -> None:
        """Bring u and v nearer to the first singular vectors of `weight`."""
        matrix = self._matrix(weight.detach())
        for _ in range(times):
            self.u.copy_(F.normalize(matrix @ self.v, dim=0))
            self.v.copy_(F.normalize(self.u @ matrix, dim=0))


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def normalised(model: nn.Module) -> list[tuple[DividedBySigma, Tensor]]:
    """Return what divides each normalised weight of `model`, and that weight."""
    lists = [module for module in model.modules() if isinstance(module, parametrize.ParametrizationList)]
    return [(each[0], each.original) for each in lists if isinstance(each[0], DividedBySigma)]


def is_zero(weight: Tensor) -> bool | None:
    """Whether all of `weight` is zero; None if it has no values, on the meta device or as a fake."""
    try:
        return not weight.any()
    except RuntimeError:
        return None


def choose_layers(model: nn.Module, patterns: Iterable[str]) -> dict[str, nn.Module]:
    """Return the linear layers and convolutions that `patterns` choose, by name, in the model's order.

    A pattern that matches a module takes in all that is inside. Raises ValueError for one that takes in none.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    chosen = set()
    for pattern in patterns:
        roots = [name for name in modules if fnmatchcase(name, pattern)]
        if not roots:
            known = dict.fromkeys([*modules, *(part for name in modules for part in name.split("."))])
            raise ValueError(f"spectral_norm: no module matches {pattern!r}{nearest(pattern.strip('*.'), known)}")
        inside = {
            name
            for name, module in modules.items()
            if isinstance(module, LAYERS) and any(f"{name}.".startswith(f"{root}.") for root in roots)
        }
        if not inside:
            raise ValueError(f"spectral_norm: {roots[0]} ({pattern!r}) has no linear layer or convolution in it")
        chosen |= inside
    return {name: module for name, module in modules.items() if name in chosen}


def add_spectral_norm(model: nn.Module, patterns: Iterable[str], output: str | None) -> list[str]:
    """Normalise the layers of `model` that `patterns` choose, and return their names.

    A layer that starts at zero has no singular value to divide by; it stays as it is, and is told. Raises ValueError
    for a choice that takes in the layer called `output`, or nothing else than such layers.
    """
    layers = choose_layers(model, patterns)
    if output in layers:
        raise ValueError(
            f"spectral_norm: {', '.join(map(repr, patterns))} takes in {output}, the output layer, which must be free "
            "to answer as large as the loss asks; choose narrower patterns"
        )
    _refuse_shared(model, layers)
    at_zero = [name for name, layer in layers.items() if is_zero(layer.get_parameter("weight"))]
    for name in at_zero:
        del layers[name]
    if not layers:
        raise ValueError(f"spectral_norm: {', '.join(at_zero)} start at zero, which has no singular value to divide by")
    if at_zero:
        log.warning("spectral_norm leaves out %d that start at zero: %s", len(at_zero), ", ".join(at_zero))
    for layer in layers.values():
        weight = layer.get_parameter("weight")
        by = DividedBySigma(weight, isinstance(layer, _ConvTransposeNd))
        parametrize.register_parametrization(layer, "weight", by)
    return list(layers)


def _refuse_shared(model: nn.Module, layers: dict[str, nn.Module]) -> None:
    for name, layer in layers.items():
        if parametrize.is_parametrized(layer, "weight"):
            raise ValueError(f"spectral_norm: the weight of {name} is parametrised already")
        names = [n for n, p in model.named_parameters(remove_duplicate=False) if p is layer.weight]
        if len(names) > 1:
            raise ValueError(f"spectral_norm: {' and '.join(names)} are one weight, and cannot be told apart")
