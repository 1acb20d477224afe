"""Muon with AdamW beside it."""

import logging
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from hookdiff.experiment.optimizers import Weight, fastest_kernel, groups, matching

log = logging.getLogger("hookdiff")


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
        params: the weights to train.
        lr: learning rate of the matrices, and of AdamW unless `adamw_lr` is given.
        weight_decay: weight decay of both.
        momentum: momentum of Muon.
        nesterov: use Nesterov's momentum in Muon.
        ns_steps: steps of the Newton-Schulz iteration that makes an update orthogonal.
        adjust_lr_fn: scaling of the learning rate by the shape of a matrix: "match_rms_adamw" (updates as large as
            AdamW's, Liu et al. 2025), "original" or "spectral_unclamped", as in torch.
        adamw: patterns of matrices for AdamW, such as the first and last of "dit": `["patch_in.*", "patch_out.*"]`.
        adamw_lr: learning rate of AdamW.
        adamw_betas: betas of AdamW.
        adamw_eps: epsilon of AdamW.

    Raises:
        ValueError: there is no matrix, or a pattern matches no weight.
    """
    if not 1 <= ns_steps < 100:  # torch's own limit, which it checks in the first step
        raise ValueError(f"ns_steps={ns_steps}: expected 1 to 99")
    kept = matching(params, adamw, "adamw")
    matrices = [weight for weight in params if weight.role == "matrix" and weight.name not in kept]
    if not matrices:
        raise ValueError("muon trains matrices, and the model has none left for it; nearest: 'adamw'")
    own: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
    own |= {"adjust_lr_fn": adjust_lr_fn, "lr": lr, "weight_decay": weight_decay}
    first = torch.optim.Muon(groups(matrices, "muon"), **own)
    rest = [weight for weight in params if weight not in matrices]
    if not rest:
        return (first,)
    own_size, rest_size = (sum(weight.parameter.numel() for weight in weights) for weights in (matrices, rest))
    if own_size < rest_size:
        log.warning(
            f"muon: trains {own_size / (own_size + rest_size):.1%} of the parameters, and AdamW the others\n"
            "  Muon pays off if most of a model is matrices, as in a transformer (model.use = 'dit'); here "
            "optimizer.use = 'adamw' may do as well"
        )
    rate = lr if adamw_lr is None else adamw_lr
    of_adamw: dict[str, Any] = {"lr": rate, "betas": adamw_betas, "eps": adamw_eps, "weight_decay": weight_decay}
    of_adamw |= fastest_kernel(torch.optim.AdamW, of_adamw, rest)
    return first, torch.optim.AdamW(groups(rest, "adamw"), **of_adamw)
