"""Makes Muon, with AdamW beside it."""

from collections.abc import Sequence
from typing import Annotated, Any

from torch.optim import Optimizer

from hookdiff.experiment import Weight, fastest_kernel, groups, matching
from hookdiff.models import AdamW
from hookdiff.options import Fixed
from hookdiff_muon.optimizer import Adjust, Muon


def muon(
    params: Sequence[Weight],
    *,
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    adjust_lr_fn: Adjust = "match_rms_adamw",
    adamw: Annotated[tuple[str, ...], Fixed("weights would move to another optimizer without their state")] = (),
    adamw_lr: float | None = None,
    adamw_betas: tuple[float, float] = (0.9, 0.999),
    adamw_eps: float = 1e-8,
) -> tuple[Optimizer, ...]:
    """Make Muon for the matrices and the kernels of convolutions, and AdamW for the rest: embeddings, norms, biases.

    With "match_rms_adamw" the updates of Muon are as large as those of AdamW (Liu et al. 2025, arXiv 2502.16982, eq.
    4), so that one learning rate serves both.

    Args:
        params: the weights to train.
        lr: learning rate of Muon, and of AdamW unless `adamw_lr` is given.
        weight_decay: weight decay of both.
        momentum: momentum of Muon.
        nesterov: use Nesterov's momentum in Muon.
        ns_steps: steps of the Newton-Schulz iteration that makes an update orthogonal, 1 to 99.
        adjust_lr_fn: scaling of the learning rate by the shape of a matrix: "match_rms_adamw" (updates as large as
            AdamW's, Liu et al. 2025), "original" or "spectral_unclamped", as in torch.
        adamw: patterns of matrices and kernels for AdamW, such as the first and the last layer of "dit":
            `["patch_in.*", "patch_out.*"]`.
        adamw_lr: learning rate of AdamW.
        adamw_betas: betas of AdamW.
        adamw_eps: epsilon of AdamW.

    Raises:
        ValueError: a value out of range, or a pattern that matches no weight.
    """
    for_adamw = matching(params, adamw, "adamw")
    matrices = [weight for weight in params if weight.role in ("matrix", "kernel") and weight.name not in for_adamw]
    rest = [weight for weight in params if weight not in matrices]
    optimizers: list[Optimizer] = []
    if matrices:
        of_muon: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        optimizers.append(Muon(groups(matrices, "muon"), **of_muon, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn))
    if rest:
        rate = lr if adamw_lr is None else adamw_lr
        of_adamw: dict[str, Any] = {"lr": rate, "betas": adamw_betas, "eps": adamw_eps, "weight_decay": weight_decay}
        of_adamw |= fastest_kernel(AdamW, of_adamw, rest)
        optimizers.append(AdamW(groups(rest, "adamw"), **of_adamw))
    return tuple(optimizers)
