"""The space of FD-DINOv2: the class token of a vision transformer that learned without labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from textwrap import shorten
from typing import Any

import torch
from attrs import define, field
from torch import Tensor
from torch.nn import functional

from hookdiff import UserError
from hookdiff.features import Features, Space
from hookdiff.options import about, one_of
from hookdiff_features.recipes import antialiased, as_rgb
from hookdiff_features.weights import ABOUT_FILE, ABOUT_SHA256, Published, read_weights

DINOV2_WEIGHTS = Published(
    "https://dl.fbaipublicfiles.com/dinov2/dinov2_vitl14/dinov2_vitl14_pretrain.pth",
    "d5383ea8f4877b2472eb973e0fd72d557c7da5d3611bd527ceeb1d7162cbf428",
)

_WHO = "features 'dinov2'"
_SIDE, _PATCH = 224, 14  # of the images and of a patch, pixels
_GRID, _TRAINED_GRID = _SIDE // _PATCH, 37  # patches in a row: here, and at the end of DINOv2's training
_HEAD_DIM = 64  # channels of an attention head, in DINOv2 of every size
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the colours in ImageNet

State = Mapping[str, Tensor]  # the weights by name
Network = Callable[[Tensor], Tensor]  # takes normalised images n 3 224 224, returns their class tokens n d


def dgm_eval(images: Tensor) -> Tensor:
    """Resize as dgm-eval, the code of the paper: bicubic with Pillow's antialiasing, rounded to grey levels."""
    device = "cpu" if images.device.type == "mps" else images.device  # mps has no float64
    down, right = (_by_pillow(side).to(device) for side in images.shape[2:])
    # Pillow 9.2, which dgm-eval requires, resizes the width first, and rounds twice. Pillow 13 changed the order.
    rows = (images.to(device).double() @ right.T + 0.5).floor().clamp(0, 255)
    pixels = (down @ rows + 0.5).floor().clamp(0, 255)
    return _normalised(pixels.float().to(images.device))


def edm2(images: Tensor) -> Tensor:
    """Resize as the evaluation of Karras et al. 2024: bicubic, antialiased, neither rounded nor clipped."""
    return _normalised(antialiased(images, _SIDE, "bicubic"))


RECIPES: dict[str, Callable[[Tensor], Tensor]] = {"dgm-eval": dgm_eval, "edm2": edm2}


@define(frozen=True)
class DINOv2(Features):
    """The space of FD-DINOv2 (Stein et al. 2023, arXiv 2306.04675), 1,024 features.

    The features are the normalised class token of DINOv2 ViT-L/14 (Oquab et al. 2023, arXiv 2304.07193) for images of
    224 x 224. The recipes resize as the official code of FD-DINOv2, or as the code of EDM2 (Karras et al. 2024, arXiv
    2312.02696). Needs timm.
    """

    channels = (1, 3)
    recipe: str = field(
        default="dgm-eval",
        validator=one_of(tuple(RECIPES)),
        metadata=about("resizing of the package: " + ", ".join(f'"{name}"' for name in RECIPES)),
    )
    weights: str | None = field(default=None, metadata=ABOUT_FILE)
    sha256: str | None = field(default=None, metadata=ABOUT_SHA256)

    def open(self, device: torch.device) -> Space:
        build = _builder()  # before the weights, a download of more than a gigabyte
        weights = read_weights(DINOV2_WEIGHTS, self.weights, self.sha256, _WHO)
        network = build(weights.state, device)
        prepare = RECIPES[self.recipe]
        name = weights.named("dinov2") + ("" if self.recipe == "dgm-eval" else f"/{self.recipe}")
        key = f"{name} {self.recipe} {weights.sha256}"
        return Space(name, key, lambda images: (network(prepare(as_rgb(images))), None), self.channels, device=device)


def resampled(positions: Tensor) -> Tensor:
    """Return the position embeddings, 1 1+37*37 d, for 16 * 16 patches; the first, for the class token, is kept.

    The official code resamples without antialiasing, by the factor 16.1 / 37 in place of 16 / 37. Other libraries
    resize to exactly 16; their features then differ from the official features about as much as those of two images.
    """
    first, grid = positions[:, :1], positions[:, 1:]
    image = grid.transpose(1, 2).reshape(1, -1, _TRAINED_GRID, _TRAINED_GRID)
    factor = (_GRID + 0.1) / _TRAINED_GRID
    image = functional.interpolate(image, scale_factor=(factor, factor), mode="bicubic", align_corners=False)
    return torch.cat((first, image.flatten(2).transpose(1, 2)), dim=1)


def _by_pillow(side: int) -> Tensor:
    """Return the matrix (224 x side, float64) by which Pillow resizes; Pillow's weights have 22 binary digits.

    So sums of grey levels are exact. In float32, one pixel in a thousand would be rounded to another grey level.
    """
    scale = side / _SIDE
    centres = (torch.arange(_SIDE, dtype=torch.float64) + 0.5) * scale
    x = (torch.arange(side) + 0.5 - centres[:, None]).abs() / max(scale, 1)
    inner, outer = (1.5 * x - 2.5) * x * x + 1, ((2.5 - 0.5 * x) * x - 4) * x + 2
    weights = torch.where(x < 1, inner, torch.where(x < 2, outer, 0))
    return (weights / weights.sum(dim=1, keepdim=True) * 2**22).round() / 2**22


def _normalised(pixels: Tensor) -> Tensor:
    """Scale pixels in [0, 255] as the network was trained."""
    mean, std = (torch.tensor(values, device=pixels.device)[:, None, None] for values in (_MEAN, _STD))
    return (pixels / 255 - mean) / std


def _builder() -> Callable[[State, torch.device], Network]:
    """Return a function that builds the network; raises UserError without timm."""
    try:
        from timm import create_model
    except ImportError as error:
        raise UserError(f"{_WHO}: needs the package timm: pip install 'hookdiff[dinov2]' ({error})") from None
    return partial(_network, create_model)


def _network(build: Any, state: State, device: torch.device) -> Network:
    """Return the network with official weights of any width and depth; raises UserError for other weights."""
    width = state["norm.weight"].numel() if "norm.weight" in state else 0
    if not width or width % _HEAD_DIM:
        raise _unfit(f"norm.weight has {width} features, expected a multiple of {_HEAD_DIM}")
    positions, expected = state.get("pos_embed", torch.empty(0)), (1, 1 + _TRAINED_GRID**2, width)
    if positions.shape != expected:
        raise _unfit(f"pos_embed has the shape {tuple(positions.shape)}, expected {expected}")
    depth = max(1, len({name.split(".")[1] for name in state if name.startswith("blocks.")}))
    sizes = {"img_size": _SIDE, "embed_dim": width, "depth": depth, "num_heads": width // _HEAD_DIM, "num_classes": 0}
    # The build draws random initial values. The meta device would avoid this, but older timm cannot build there.
    with torch.random.fork_rng(devices=[]):
        network = build("vit_large_patch14_dinov2", weight_init="skip", **sizes)
    fitted = {name: value.float() for name, value in state.items() if name != "mask_token"}  # for training only
    fitted["pos_embed"] = resampled(fitted["pos_embed"])
    try:
        network.load_state_dict(fitted, assign=True)
    except RuntimeError as error:
        raise _unfit(str(error).partition("\n\t")[2]) from None
    built: Network = network.to(device).eval().requires_grad_(False)
    return built


def _unfit(why: str) -> UserError:
    return UserError(f"{_WHO}: these are not weights of DINOv2, name another file: {shorten(why, 200)}")
