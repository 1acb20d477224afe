"""What [optimizer] builds: which weights decay, which kernel steps, and Muon beside AdamW."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

import torch
from attrs import define, evolve
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from hookdiff.errors import ConfigError, nearest
from hookdiff.experiment.structure import parameters as arguments_of
from hookdiff.models.names import plain_name
from hookdiff.state import as_tuple

if TYPE_CHECKING:
    from hookdiff.experiment.part import Part

log = logging.getLogger("hookdiff")
AUTO = "auto"  # among the patterns of no_decay
_PLURALS = {
    "embedding": "embeddings",
    "norm": "norms",
    "vector": "biases",
    "matrix": "matrices that optimizer.adamw names",
    "kernel": "convolutions",
}
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_CLOSURE = "its step evaluates the loss several times (a closure), and a step here has one batch and one gradient"
_UNFIT = {
    torch.optim.LBFGS: _CLOSURE,
    torch.optim.SparseAdam: "it takes sparse gradients alone, and those of a network are dense",
}
_OF_TORCH = [
    kind
    for kind in vars(torch.optim).values()
    if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
]
_PATHS = {kind.__name__.lower(): f"torch.optim:{kind.__name__}" for kind in _OF_TORCH}
_PATHS["muon"] = "hookdiff.experiment.optimizers:muon"
UNFIT = {kind.__name__.lower(): f"torch.optim:{kind.__name__}" for kind in _UNFIT}  # refused, with the reason
OPTIMIZERS = {name: path for name, path in sorted(_PATHS.items()) if name not in UNFIT}


def unfit(target: Callable[..., Any]) -> str | None:
    """Return why the loop cannot train with the optimizer `target`, or None."""
    if not (inspect.isclass(target) and issubclass(target, Optimizer)):
        return None
    closure = inspect.signature(target.step).parameters.get("closure")
    needs_closure = closure is not None and closure.default is inspect.Parameter.empty
    return next((why for kind, why in _UNFIT.items() if issubclass(target, kind)), _CLOSURE if needs_closure else None)


@define(frozen=True, kw_only=True)
class Groups:
    """Keys of the table [optimizer] that all classes share."""

    # Patterns of weights without weight decay; "auto": biases, norms, embeddings, whatever has one dimension.
    no_decay: tuple[str, ...] = (AUTO,)


@define(frozen=True, eq=False)
class Weight:
    """A parameter that is trained, and what it is for."""

    name: str  # as users know it: of a parametrised weight too, it ends in "weight"
    parameter: Tensor
    role: Literal["embedding", "norm", "vector", "matrix", "kernel"]  # vector: a bias, or any other of 1 dimension
    decays: bool = True


def weights_of(model: nn.Module) -> list[Weight]:
    """Return each parameter of `model` that requires a gradient, once, in the model's order."""
    owners: dict[Tensor, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)

    def role(parameter: Tensor) -> Any:
        if any(isinstance(owner, _EMBEDDINGS) for owner in owners[parameter]):
            return "embedding"  # also where an output layer shares it
        if any(isinstance(owner, _NORMS) for owner in owners[parameter]):
            return "norm"
        return {0: "vector", 1: "vector", 2: "matrix"}.get(parameter.ndim, "kernel")

    return [Weight(plain_name(n), p, role(p)) for n, p in model.named_parameters() if p.requires_grad]


def spare(weights: Sequence[Weight], patterns: Iterable[str]) -> list[Weight]:
    """Return `weights` with those that `patterns` name taken from weight decay.

    "auto" is biases, the scales of norms, embeddings, and whatever has one dimension. Raises ConfigError for a
    pattern that names none.
    """
    names = [weight.name for weight in weights]
    spared: set[str] = set()
    for pattern in patterns:
        if pattern == AUTO:
            spared |= {weight.name for weight in weights if weight.role in ("embedding", "norm", "vector")}
        else:
            spared |= _matching(pattern, names, "no_decay")
    return [evolve(weight, decays=weight.name not in spared) for weight in weights]


def _matching(pattern: str, names: Sequence[str], key: str) -> set[str]:
    if not (matching := {name for name in names if fnmatchcase(name, pattern)}):
        raise ConfigError(f"optimizer.{key}: no weight's name matches {pattern!r}{nearest(pattern.strip('*.'), names)}")
    return matching


def build_optimizers(part: Part, model: nn.Module, groups: Groups | None = None) -> Any:
    """Make the optimizer of `part`, or several, for every parameter of `model` that requires a gradient.

    Those that `groups` spares are a group of their own without weight decay, where there is any. The kernel is the
    fused one where class, device and dtype have it, unless the config says otherwise. Raises ConfigError for what
    cannot be made, and for what can but could not make a step.
    """
    weights = spare(weights_of(model), (groups or Groups()).no_decay)
    if not weights:
        raise ConfigError("optimizer: no weight of the model requires a gradient, so there is nothing to train")
    if part.target is muon:
        return part.build(weights)
    decay = part.arguments.get("weight_decay", _default(part.target, "weight_decay"))
    params: list[Any] = _groups(weights) if decay else [weight.parameter for weight in weights]
    if not inspect.isclass(part.target):
        return part.build(params)
    try:
        fused = _kernel(part.target, part.arguments, weights)
    except Exception as error:  # whatever an optimizer says of its arguments, or of its first step
        raise ConfigError(f"{part.where}: {error}") from error
    return part.given(**fused).build(params)


def build_small(part: Part, device: torch.device) -> tuple[Optimizer, ...]:
    """Make the optimizers of `part` for one small layer on `device`: their groups and rates, whatever the model.

    Raises ConfigError where they could be made for no model, or not make a step.
    """
    known = {key: value for key, value in part.arguments.items() if part.target is not muon or key != "adamw"}
    return as_tuple(build_optimizers(evolve(part, arguments=known), nn.Linear(2, 2, device=device)))


def check_patterns(part: Part, model: nn.Module, groups: Groups) -> None:
    """Raise ConfigError where a pattern of [optimizer] names no weight of `model`, which may be on the meta device."""
    weights = spare(weights_of(model), groups.no_decay)
    if part.target is muon:
        _left_to_adamw(weights, part.arguments.get("adamw", ()))


def _default(target: Callable[..., Any], name: str) -> Any:
    known = arguments_of(target)
    return known[name].default if name in known else None


def _groups(weights: Sequence[Weight], whose: str = "") -> list[dict[str, Any]]:
    """Return the groups with and without weight decay, those that are not empty."""
    decayed = {"name": whose or "decay", "params": [w.parameter for w in weights if w.decays]}
    others = [w.parameter for w in weights if not w.decays]
    without = {"name": whose or "no_decay", "params": others, "weight_decay": 0.0}
    return [group for group in (decayed, without) if group["params"]]


def _kernel(kind: Any, arguments: Mapping[str, Any], weights: Sequence[Weight]) -> dict[str, bool]:
    """Return the argument that picks the fastest kernel, after a step on a small weight of each device and dtype.

    Fused, or nothing: torch then takes foreach on a GPU and a loop on the CPU, where foreach is no faster; the step
    count of those stays on the host, so that reading it waits for no device. Which class has a fused kernel where
    (Adagrad: on the CPU alone) is tried, because torch does not tell before a step.
    """
    samples = {(w.parameter.device, w.parameter.dtype): w.parameter for w in weights}.values()

    def make_a_step(**extra: bool) -> None:
        for sample in samples:
            weight = nn.Parameter(torch.ones(2, 2, dtype=sample.dtype, device=sample.device))
            weight.grad = torch.ones_like(weight)
            kind([weight], **arguments, **extra).step()

    choosable = "fused" in arguments_of(kind) and not {"fused", "foreach"} & arguments.keys()
    if choosable:
        try:
            make_a_step(fused=True)
        except Exception:  # not here, or not with these arguments; what else is wrong shows below
            pass
        else:
            return {"fused": True}
    make_a_step()
    return {}


def muon(
    params: Sequence[Weight],
    *,
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    adjust_lr_fn: Literal["match_rms_adamw", "original", "spectral_unclamped"] = "match_rms_adamw",
    adamw: tuple[str, ...] = (),
    adamw_lr: float | None = None,
    adamw_betas: tuple[float, float] = (0.9, 0.999),
    adamw_eps: float = 1e-8,
) -> tuple[Optimizer, ...]:
    """Make Muon for the matrices, and AdamW for the rest: convolutions, embeddings, norms, biases.

    Muon (Jordan et al. 2024) steps along the nearest orthogonal matrix of the momentum, by `ns_steps` of a
    Newton-Schulz iteration. With "match_rms_adamw" its updates are as large as those of AdamW (Liu et al. 2025, arXiv
    2502.16982, eq. 4), so that one learning rate serves both.

    Args:
        params: what is trained.
        lr: of the matrices, and of AdamW unless `adamw_lr` is given.
        weight_decay: of both.
        momentum: of Muon.
        nesterov: of Muon.
        ns_steps: of the Newton-Schulz iteration.
        adjust_lr_fn: how the rate follows the shape of a matrix, as torch has it.
        adamw: patterns of matrices that AdamW takes too: the first and the last layer, say.
        adamw_lr: of AdamW.
        adamw_betas: of AdamW.
        adamw_eps: of AdamW.

    Raises:
        ValueError: there is no matrix, or a pattern matches no weight.
    """
    kept = _left_to_adamw(params, adamw)
    matrices = [weight for weight in params if weight.role == "matrix" and weight.name not in kept]
    if not matrices:
        raise ValueError("muon takes matrices, and the model has none that are left to it; nearest: 'adamw'")
    taken = {weight.name for weight in matrices}
    rest = [weight for weight in params if weight.name not in taken]
    first = torch.optim.Muon(
        _groups(matrices, "muon"),
        lr=lr,
        weight_decay=weight_decay,
        momentum=momentum,
        nesterov=nesterov,
        ns_steps=ns_steps,
        adjust_lr_fn=adjust_lr_fn,
    )
    if not rest:
        return (first,)
    _tell_share(matrices, rest)
    rate = lr if adamw_lr is None else adamw_lr
    of_adamw: dict[str, Any] = {"lr": rate, "betas": adamw_betas, "eps": adamw_eps, "weight_decay": weight_decay}
    of_adamw |= _kernel(torch.optim.AdamW, of_adamw, rest)
    return first, torch.optim.AdamW(_groups(rest, "adamw"), **of_adamw)


def _tell_share(matrices: Sequence[Weight], rest: Sequence[Weight]) -> None:
    """Warn where Muon has less than half of the parameters: what is trained is then mostly AdamW's work."""
    sizes: Counter[str] = Counter()
    for weight in rest:
        sizes[weight.role] += weight.parameter.numel()
    own = sum(weight.parameter.numel() for weight in matrices)
    total = own + sizes.total()
    if own < total / 2:
        role, most = sizes.most_common(1)[0]
        log.warning(
            f"muon: has {own / total:.1%} of the parameters, and AdamW the other {sizes.total() / total:.1%}, most of "
            f"them {_PLURALS[role]} ({most / total:.1%})\n"
            "  Muon pays where most of a model is matrices, as in a transformer (model.use = 'dit'); here "
            "optimizer.use = 'adamw' may do as well"
        )


def _left_to_adamw(weights: Sequence[Weight], patterns: Iterable[str]) -> set[str]:
    names = [weight.name for weight in weights]
    return {name for pattern in patterns for name in _matching(pattern, names, "adamw")}
