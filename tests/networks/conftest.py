"""Small networks for the tests of this folder."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookdiff_networks import DiT, UNet

_SMALL: dict[Any, dict[str, Any]] = {
    UNet: {"channels": 8, "num_res_blocks": 1, "head_dim": 8},
    DiT: {"hidden_size": 16, "depth": 2, "num_heads": 2},
}

both = pytest.mark.parametrize("kind", [UNet, DiT])


def small(kind: Any, **changes: Any) -> Any:
    """Return a small UNet or DiT with its initial weights."""
    torch.manual_seed(0)
    return kind(**{**_SMALL[kind], **changes})


def trained(kind: Any, **changes: Any) -> Any:
    """Return a small UNet or DiT in which no parameter is all zero, as after some training."""
    model = small(kind, **changes)
    torch.manual_seed(1)
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.15)
    return model


def images(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def text_for(model: Any, num: int) -> dict[str, Tensor]:
    """Return what `model` reads beside images, times and labels: of the first text all five tokens count, then fewer.

    Of the last one none counts. Without a `text_dim` the result is empty.
    """
    if not model.text_dim:
        return {}
    counts = torch.arange(5) < torch.linspace(5, 0, num).long()[:, None]
    return {"text": images(num, 5, model.text_dim), "text_mask": counts}


def grad_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
