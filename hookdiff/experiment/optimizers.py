"""Makes the optimizers of [optimizer]: groups with and without weight decay, and fused kernels."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

import torch
from attrs import define, evolve, field
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer

from hookdiff.errors import ConfigError, nearest
from hookdiff.machine.dtensor import is_sharded, is_unsupported
from hookdiff.models.base import left_out
from hookdiff.models.names import plain_name
from hookdiff.options.fields import about
from hookdiff.options.structure import numbers, parameters as arguments_of

if TYPE_CHECKING:
    from hookdiff.experiment.part import Part

AUTO_PATTERN = "auto"  # among the patterns of no_decay
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
# LBFGS evaluates the loss several times in a step, SparseAdam takes only sparse gradients, and the Muon of torch only
# matrices; the name "muon" is that of our plugin.
_UNFIT = (Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.Muon)
_KINDS = [name for name, kind in vars(torch.optim).items() if inspect.isclass(kind) and kind not in _UNFIT]
OPTIMIZERS = {name.lower(): f"torch.optim:{name}" for name in sorted(_KINDS, key=str.lower)}
OPTIMIZERS["adamw"] = "hookdiff.models.adamw:AdamW"  # torch's, with a shorter step


@define(frozen=True, kw_only=True)
class Groups:
    """Keys of the table [optimizer] that all optimizers share."""

    no_decay: tuple[str, ...] = field(
        default=(AUTO_PATTERN,),
        metadata=about(
            'patterns of names of weights without weight decay, such as `"*.pos_embed"`; "auto": biases, norms, '
            "embeddings, and all other weights of one dimension; `[]`: none"
        ),
    )
    rates: Mapping[str, float] = field(
        factory=dict,
        validator=numbers(least=0),
        metadata=about(
            "factors of the learning rate by patterns of names of weights, such as "
            '`{ "*attn2*" = 0.1 }`; of several that match a name, the first counts'
        ),
    )


@define(frozen=True, eq=False)
class Weight:
    """A parameter and its role."""

    name: str  # without parametrisation: "a.weight" rather than "a.parametrizations.weight.original"
    parameter: Tensor
    # vector: a bias or another weight of 1 dimension; kernel: of a convolution; other: of 3 dimensions or more
    role: Literal["embedding", "norm", "vector", "matrix", "kernel", "other"]
    decays: bool = True


def weights_of(model: nn.Module) -> list[Weight]:
    """Return each parameter of `model` once, in the model's order, also if frozen, since a plugin may thaw it later."""
    owners: dict[Tensor, list[nn.Module]] = {}
    for module in model.modules():
        lists = getattr(module, "parametrizations", {}).values()
        for parameter in (p for part in (module, *lists) for p in part.parameters(recurse=False)):
            owners.setdefault(parameter, []).append(module)

    def role(parameter: Tensor) -> Any:
        if any(isinstance(owner, _EMBEDDINGS) for owner in owners[parameter]):
            return "embedding"  # also where an output layer shares it
        if any(isinstance(owner, _NORMS) for owner in owners[parameter]):
            return "norm"
        if any(isinstance(owner, _ConvNd) for owner in owners[parameter]) and parameter.ndim > 1:
            return "kernel"
        return {0: "vector", 1: "vector", 2: "matrix"}.get(parameter.ndim, "other")

    out = set(left_out(model))
    named = [(name, parameter) for name, parameter in model.named_parameters() if name not in out]
    return [Weight(plain_name(name), parameter, role(parameter)) for name, parameter in named]


def without_decay(weights: Sequence[Weight], patterns: Sequence[str]) -> list[Weight]:
    """Return `weights`, without weight decay for those that match `patterns`.

    "auto" matches biases, the scales of norms, embeddings, and all weights of one dimension. Raises ConfigError for a
    pattern that matches no weight.
    """
    spared = matching(weights, [pattern for pattern in patterns if pattern != AUTO_PATTERN], "no_decay")
    if AUTO_PATTERN in patterns:
        spared |= {weight.name for weight in weights if weight.role in ("embedding", "norm", "vector")}
    return [evolve(weight, decays=weight.name not in spared) for weight in weights]


def matching(weights: Sequence[Weight], patterns: Iterable[str], key: str) -> set[str]:
    """Return the names that match one of `patterns`, the value of `key` in [optimizer].

    Raises:
        ConfigError: for a pattern that no name matches.
    """
    names, matched = [weight.name for weight in weights], set()
    for pattern in patterns:
        named = {name for name in names if fnmatchcase(name, pattern)}
        if not named:
            close = nearest(pattern.strip("*."), names)
            raise ConfigError(f"optimizer.{key}: no weight's name matches {pattern!r}{close}")
        matched |= named
    return matched


def check_trainable(model: nn.Module) -> None:
    """Raise ConfigError if all weights of `model` are frozen."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("optimizer: no weight of the model requires a gradient; unfreeze some with requires_grad_()")


def build_optimizers(part: Part, model: nn.Module) -> Any:
    """Make the optimizer of `part`, or several, for every parameter of `model`.

    A class is called with the parameters, those without weight decay in a group of their own. The fused kernel is used
    if class, device and dtype have one, unless the config sets `fused` or `foreach`. A function is called with a list
    of `Weight`, so that it can choose by name and role, as `muon` does.

    Raises ConfigError for an optimizer that cannot be made, or fails in a step.
    """
    shared = part.of(Groups)
    weights = without_decay(weights_of(model), shared.no_decay)
    check_trainable(model)
    made = _built(part, weights)
    _set_rates([made] if isinstance(made, Optimizer) else made, weights, shared.rates)
    return made


def _set_rates(optimizers: Iterable[Optimizer], weights: Sequence[Weight], rates: Mapping[str, float]) -> None:
    """Give the weights that match a pattern of `rates` a group of their own, in which `lr` is multiplied."""
    left = list(weights)
    for pattern, factor in rates.items():
        names = matching(weights, [pattern], "rates")
        chosen = {weight.parameter for weight in left if weight.name in names}
        left = [weight for weight in left if weight.name not in names]
        for optimizer in optimizers:
            for group in list(optimizer.param_groups):
                moved = [parameter for parameter in group["params"] if parameter in chosen]
                if moved and len(moved) == len(group["params"]):
                    group["lr"] *= factor
                elif moved:
                    group["params"] = [parameter for parameter in group["params"] if parameter not in chosen]
                    name = f"{group.get('name', 'all')}_x{factor:g}"  # in the names of logged rates
                    optimizer.add_param_group({**group, "params": moved, "lr": group["lr"] * factor, "name": name})


def _built(part: Part, weights: Sequence[Weight]) -> Any:
    if not inspect.isclass(part.target):
        return part.build(weights)
    known = arguments_of(part.target)
    default = known["weight_decay"].default if "weight_decay" in known else None
    decay = part.arguments.get("weight_decay", default)
    params: list[Any] = groups(weights) if decay else [weight.parameter for weight in weights]
    try:
        fused = fastest_kernel(part.target, part.arguments, weights)
    except Exception as error:  # an optimizer may raise anything for its arguments, or in its first step
        shared = is_unsupported(error) and any(is_sharded(weight.parameter) for weight in weights)
        why = f"{part.use} cannot train weights that are sharded over devices; try adamw" if shared else error
        raise ConfigError(f"{part.where}: {why}") from error
    return part.given(**fused).build(params)


def check_patterns(part: Part, model: nn.Module) -> None:
    """Raise ConfigError if a pattern of [optimizer] matches no weight of `model`, which may be on the meta device."""
    weights = without_decay(weights_of(model), part.of(Groups).no_decay)
    for key, patterns in {**patterns_of(part), "rates": part.of(Groups).rates}.items():
        matching(weights, patterns, key)


def patterns_of(part: Part) -> dict[str, tuple[str, ...]]:
    """Return the arguments of the optimizer that are lists of strings, which hold patterns of weights' names."""
    return {k: v for k, v in part.arguments.items() if isinstance(v, tuple) and all(isinstance(p, str) for p in v)}


def groups(weights: Sequence[Weight], name: str = "") -> list[dict[str, Any]]:
    """Return the parameter groups with and without weight decay, as torch takes them; empty groups are left out."""
    decayed = {"name": name or "decay", "params": [w.parameter for w in weights if w.decays]}
    others = [w.parameter for w in weights if not w.decays]
    without = {"name": name or "no_decay", "params": others, "weight_decay": 0.0}
    return [group for group in (decayed, without) if group["params"]]


def fastest_kernel(kind: Any, arguments: Mapping[str, Any], weights: Sequence[Weight]) -> dict[str, bool]:
    """Return the argument for the fastest kernel: `fused`, if a step on a small weight of each device and dtype works.

    Otherwise return no argument: torch then uses foreach on a GPU and a loop on the CPU, where foreach is no faster.
    Both keep the step count on the host, where reading it does not wait for the device. Only a step shows whether a
    class has a fused kernel on a device (Adagrad: only on the CPU).
    """
    # The smallest weight of each kind; torch may have no fused kernel for sharded weights.
    largest_first = sorted((w.parameter for w in weights), key=lambda parameter: -parameter.numel())
    samples = {(p.device, p.dtype, is_sharded(p)): p for p in largest_first}.values()

    def make_a_step(**extra: bool) -> dict[str, bool]:
        for sample in samples:
            new = torch.ones(2, 2, dtype=sample.dtype, device=sample.device)
            weight = nn.Parameter(torch.ones_like(sample) if is_sharded(sample) else new)
            weight.grad = torch.ones_like(weight)
            kind([weight], **arguments, **extra).step()
        return extra

    if "fused" in arguments_of(kind) and not {"fused", "foreach"} & arguments.keys():
        try:
            return make_a_step(fused=True)
        except Exception:  # no fused kernel here, or for these arguments; the step below raises any other error
            pass
    return make_a_step()
