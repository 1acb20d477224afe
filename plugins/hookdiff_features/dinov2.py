"""The space of FD-DINOv2: the class token of a vision transformer that learned without labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from attrs import define, field
from attrs.validators import in_
from torch import Tensor
from torch.nn import functional

from hookdiff import UserError
from hookdiff.features import Embedding, Features, Space
from hookdiff.options import about
from hookdiff_features.recipes import as_rgb
from hookdiff_features.weights import Published, read_weights

DINOV2_WEIGHTS = Published(
    "https://dl.fbaipublicfiles.com/dinov2/dinov2_vitl14/dinov2_vitl14_pretrain.pth",
    "d5383ea8f4877b2472eb973e0fd72d557c7da5d3611bd527ceeb1d7162cbf428",
)

_WHO = "features 'dinov2'"
_SIDE, _PATCH = 224, 14  # of the images and of a patch, pixels
_GRID, _TRAINED_GRID = _SIDE // _PATCH, 37  # patches in a row, here and at the end of the training
_HEAD_DIM = 64  # channels of an attention head, in DINOv2 of every size
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the colours in ImageNet

State = Mapping[str, Tensor]  # the weights by name
Network = Callable[[Tensor], Tensor]  # takes normalised images n 3 224 224, returns their class tokens n d


def dgm_eval(images: Tensor) -> Tensor:
    """Bicubic with antialiasing as in Pillow, in whole grey levels: what dgm-eval, the code of the paper, does."""
    device = "cpu" if images.device.type == "mps" else images.device  # mps has no float64
    down, right = (_by_pillow(side).to(device) for side in images.shape[2:])
    # Pillow 9.2, which dgm-eval requires, resizes in width first, and rounds twice; Pillow 13 changed the order.
    rows = (images.to(device).double() @ right.T + 0.5).floor().clamp(0, 255)
    pixels = (down @ rows + 0.5).floor().clamp(0, 255)
    return _normalised(pixels.float().to(images.device))


def edm2(images: Tensor) -> Tensor:
    """Bicubic with antialiasing, neither rounded nor clipped: what the evaluation of Karras et al. 2024 does."""
    size = (_SIDE, _SIDE)
    pixels = functional.interpolate(images.float(), size=size, mode="bicubic", align_corners=False, antialias=True)
    return _normalised(pixels)


RECIPES: dict[str, Callable[[Tensor], Tensor]] = {"dgm-eval": dgm_eval, "edm2": edm2}


@define(frozen=True)
class DINOv2(Features):
    """The space of FD-DINOv2 (Stein et al. 2023, arXiv 2306.04675), 1,024 features.

    They are the normalised class token of DINOv2 ViT-L/14 (Oquab et al. 2023, arXiv 2304.07193) for images of
    224 x 224. The recipes resize as the official code of that paper does, or as that of EDM2 (Karras et al. 2024,
    arXiv 2312.02696) does. Needs timm or transformers.
    """

    channels = (1, 3)
    recipe: str = field(
        default="dgm-eval",
        validator=in_(tuple(RECIPES)),
        metadata=about("resizing of the package: " + ", ".join(f'"{name}"' for name in RECIPES)),
    )
    weights: str | None = field(
        default=None,
        metadata=about(
            "file of the weights (.pth or .safetensors); without it the published ones, from torch's download cache"
        ),
    )
    sha256: str | None = field(default=None, metadata=about("SHA-256 of `weights`, if they are not the published ones"))

    def open(self, device: torch.device) -> Space:
        build = _builder()  # before the weights, which are more than a gigabyte
        found = read_weights(DINOV2_WEIGHTS, self.weights, self.sha256, _WHO)
        network = build(_fitted(found.state), device)
        prepare = RECIPES[self.recipe]

        def embed(images: Tensor) -> Embedding:
            return network(prepare(as_rgb(images))), None

        name = "dinov2" if found.is_published else f"dinov2-{found.sha256[:8]}"
        name += "" if self.recipe == "dgm-eval" else f"/{self.recipe}"
        return Space(name, f"{name} {self.recipe} {found.sha256}", embed, self.channels, device=device)


def resampled(positions: Tensor) -> Tensor:
    """Return the position embeddings, 1 1+37*37 d, for 16 * 16 patches; the first, of the class token, is kept.

    The official code resamples without antialiasing, and by the factor 16.1 / 37, at places that are not quite those of
    a resizing to 16. Libraries do otherwise, and the features then differ about as much as those of two images.
    """
    first, grid = positions[:, :1], positions[:, 1:]
    image = grid.transpose(1, 2).reshape(1, -1, _TRAINED_GRID, _TRAINED_GRID)
    factor = (_GRID + 0.1) / _TRAINED_GRID
    image = functional.interpolate(image, scale_factor=(factor, factor), mode="bicubic", align_corners=False)
    return torch.cat((first, image.flatten(2).transpose(1, 2)), dim=1)


def _by_pillow(side: int) -> Tensor:
    """Return the matrix, 224 x side, float64, by which Pillow resizes: its weights have 22 binary digits.

    Of whole numbers it makes exact sums. In float32 one pixel in a thousand would be rounded to the next grey level.
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


_LINEAR = {"attn.qkv": (3, 1), "attn.proj": (1, 1), "mlp.fc1": (4, 1), "mlp.fc2": (1, 4)}  # outputs, inputs / width
_VECTORS = ("norm1.weight", "norm1.bias", "ls1.gamma", "norm2.weight", "norm2.bias", "ls2.gamma")


def _shapes(width: int, depth: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the official weights by name."""
    shapes: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, width),
        "pos_embed": (1, 1 + _TRAINED_GRID**2, width),
        "patch_embed.proj.weight": (width, 3, _PATCH, _PATCH),
        **dict.fromkeys(("patch_embed.proj.bias", "norm.weight", "norm.bias"), (width,)),
    }
    for block in (f"blocks.{k}" for k in range(depth)):
        shapes |= {f"{block}.{name}": (width,) for name in _VECTORS}
        shapes |= {f"{block}.{name}.weight": (out * width, into * width) for name, (out, into) in _LINEAR.items()}
        shapes |= {f"{block}.{name}.bias": (out * width,) for name, (out, _) in _LINEAR.items()}
    return shapes


def _fitted(state: State) -> State:
    """Return the weights, float32, with the positions for images of 224 x 224.

    Raises UserError unless they have the names and shapes of the official ones, of any width and depth.
    """
    width, depth = _sizes(state)
    shapes = _shapes(width, depth)
    problems = [f"they have no {name!r}" for name in shapes if name not in state]
    # The mask token is for training only.
    problems += [f"they have {name!r}" for name in state if name not in shapes and name != "mask_token"]
    if not width or width % _HEAD_DIM:
        problems.append(f"they have {width} features, expected a multiple of {_HEAD_DIM}")
    for name, shape in shapes.items():
        if name in state and state[name].shape != shape:
            problems.append(f"{name!r} has the shape {tuple(state[name].shape)}, expected {shape}")
    if problems:
        raise UserError(f"{_WHO}: the weights are of another network: {problems[0]}")
    fitted = {name: state[name].float() for name in shapes}
    return {**fitted, "pos_embed": resampled(fitted["pos_embed"])}


def _sizes(state: State) -> tuple[int, int]:
    """Return the number of features and the number of blocks, at least 1."""
    blocks = {name.split(".")[1] for name in state if name.startswith("blocks.")}
    return state["norm.weight"].numel() if "norm.weight" in state else 0, max(1, len(blocks))


def _builder() -> Callable[[State, torch.device], Network]:
    """Return a function that builds the network with the library that is installed."""
    try:
        from timm import create_model
    except ImportError as error:
        problem = error
    else:
        return partial(_by_timm, create_model)
    try:
        from transformers import Dinov2Config, Dinov2Model
    except ImportError:
        way_out = "needs the package timm, or transformers: pip install 'hookdiff[dinov2]'"
        raise UserError(f"{_WHO}: {way_out} ({problem})") from None
    return partial(_by_transformers, Dinov2Config, Dinov2Model)


def _by_timm(create_model: Any, state: State, device: torch.device) -> Network:
    width, depth = _sizes(state)
    sizes = {"img_size": _SIDE, "embed_dim": width, "depth": depth, "num_heads": width // _HEAD_DIM, "num_classes": 0}
    # It draws initial values; on the meta device it would draw none, but older releases cannot build there.
    with torch.random.fork_rng(devices=[]):
        network = create_model("vit_large_patch14_dinov2", weight_init="skip", **sizes)
    built: Network = _loaded(network, state, device)
    return built


# Names of query, key, value and projection in transformers: in 5.23, and in 5.0 and before.
_ATTENTION = (
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("attention.query", "attention.key", "attention.value", "output.dense"),
)
_RENAMED = {
    "cls_token": "embeddings.cls_token",
    "pos_embed": "embeddings.position_embeddings",
    "patch_embed.proj": "embeddings.patch_embeddings.projection",
    "blocks.": "encoder.layer.",
    "ls1.gamma": "layer_scale1.lambda1",
    "ls2.gamma": "layer_scale2.lambda1",
    "norm.": "layernorm.",
}


def _by_transformers(config: Any, model: Any, state: State, device: torch.device) -> Network:
    width, depth = _sizes(state)
    sizes = {"hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": width // _HEAD_DIM}
    with torch.device("meta"):  # draws no initial values from the default generator
        network = model(config(image_size=_SIDE, patch_size=_PATCH, **sizes))
    known = network.state_dict()
    names = next(names for names in _ATTENTION if f"encoder.layer.0.attention.{names[0]}.weight" in known)
    renamed = {"embeddings.mask_token": torch.zeros(1, width)}  # unused, but it must not stay on the meta device
    for name, value in state.items():
        for official, own in _RENAMED.items():
            name = name.replace(official, own)
        official, parts = ("attn.qkv", names[:3]) if "attn.qkv" in name else ("attn.proj", names[3:])
        for own, part in zip(parts, value.chunk(len(parts)), strict=True):
            renamed[name.replace(official, f"attention.{own}")] = part
    network = _loaded(network, renamed, device)

    def class_token(images: Tensor) -> Tensor:
        features: Tensor = network(images).last_hidden_state[:, 0]
        return features

    return class_token


def _loaded(network: Any, state: State, device: torch.device) -> Any:
    network.load_state_dict(state, assign=True)
    return network.to(device).eval().requires_grad_(False)
