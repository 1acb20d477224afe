"""Spaces of features, in which sets of images are compared: a network, and the recipe that prepares its images."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import torch
from attrs import define, field
from torch import Tensor

from hookdiff.data.memory import to_unit_range
from hookdiff.errors import UserError, shown
from hookdiff.machine.fitting import Fitting
from hookdiff.options.choices import Choice
from hookdiff.options.default_names import DEFAULT_FEATURES, FEATURES_OF_OTHERS
from hookdiff.options.structure import Problems, structured

_AT_ONCE = 64  # images in the network at a time: larger batches take more memory, and are hardly faster

Embedding = tuple[Tensor, Tensor | None]  # features n d; the logits of a classifier n k, None for other networks


@define(frozen=True, eq=False)
class Space:
    """An opened space: `space(images)` returns features."""

    name: str  # with its recipe, for the names of metrics: "digits", "inception/clean-fid"
    key: str | None  # changes with the network, its weights and the recipe; None: features are not kept on disk
    embed: Callable[[Tensor], Embedding]  # takes images n c h w, uint8, on `device`
    channels: Sequence[int] = (1, 3)  # that `embed` takes
    size: tuple[int, int] | None = None  # height and width that `embed` takes; None: any, also different ones
    device: torch.device = field(factory=lambda: torch.device("cpu"))
    metric: str = "fd"  # the name of the Fréchet distance in this space

    @property
    def distance(self) -> str:
        """The name under which the Fréchet distance in this space is logged."""
        return f"{self.metric}/{self.name}"

    def check(self, shape: Sequence[int]) -> None:
        """Raise UserError unless the space takes images of `shape` (c h w)."""
        _check(self.name, shape, self.channels, self.size)

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Embedding:
        """Return features and logits of `images` (n c h w, uint8): float32, on the CPU.

        Both are computed in float32 without TF32 and outside of autocast, so that different machines agree.

        Raises:
            UserError: for images that the space does not take.
            ValueError: for features that are not finite.
        """
        self.check(images.shape[1:])
        with in_float32(self.device):
            fitting = Fitting(_AT_ONCE, self.device)
            parts = list(fitting.parts(range(len(images)), lambda part: self._embedded(images[part.start : part.stop])))
            parts = parts or [self._embedded(images)]  # of no images
        features = torch.cat([part for part, _ in parts])
        if features.dim() != 2 or len(features) != len(images):
            got = tuple(features.shape)
            raise UserError(f"the features {self.name!r} of {len(images)} images have the shape {got}, expected n d")
        if bad := int((~features.isfinite().all(dim=1)).sum()):
            raise ValueError(f"the features {self.name!r} of {bad} of {len(images)} images are not finite")
        logits = [part for _, part in parts if part is not None]
        return features, torch.cat(logits) if logits else None

    def _embedded(self, images: Tensor) -> Embedding:
        features, logits = self.embed(images.to(self.device))
        return features.float().cpu(), None if logits is None else logits.float().cpu()


def _check(name: str, shape: Sequence[int], channels: Sequence[int] | None, size: tuple[int, int] | None) -> None:
    if len(shape) == 3 and (channels is None or shape[0] in channels) and size in (None, tuple(shape[1:])):
        return
    depth = " or ".join(map(str, channels)) if channels else "channels"
    sides = " x ".join(map(str, size)) if size else "height x width"
    got = " x ".join(map(str, shape))
    raise UserError(f"the features {name!r} take images {depth} x {sides}, got {got}")


@define(frozen=True)
class Features(Choice, ABC):
    """The base class of features, which are chosen by name; `open` loads the network."""

    kind = "features"
    channels: ClassVar[Sequence[int] | None] = None  # of images for the space, if known before it is opened

    def check(self, shape: Sequence[int]) -> None:
        """Raise UserError, before `open` fetches any weights, if the space takes no images of `shape` (c h w)."""
        _check(self.use, shape, self.channels, None)

    @abstractmethod
    def open(self, device: torch.device) -> Space:
        """Return the space with its network on `device`.

        Raises:
            UserError: if the weights are missing.
        """

    @classmethod
    def adapted(cls, target: object, use: str) -> type[Features] | None:
        """Return features that the function or module `target` computes.

        `target` takes images n c h w, float32 in [-1, 1], and returns float features, n d.
        """
        if isinstance(target, type) or not callable(target):
            return None
        return cast(type[Features], type("Own", (_Own,), {"function": staticmethod(target), "path": use}))


def usual_features(*shapes: Sequence[int]) -> Features:
    """Return the features for images of these `shapes` (c h w): see `DEFAULT_FEATURES`."""
    names = {DEFAULT_FEATURES.get(tuple(shape), FEATURES_OF_OTHERS) for shape in shapes}
    return Features.of(names.pop() if len(names) == 1 else FEATURES_OF_OTHERS)


def named_features(use: str, **options: Any) -> Features:
    """Return the features that the option `--features` of a command names, also of a module in the working directory.

    Raises:
        UserError: for an unknown name, and for options that the features do not have.
    """
    if ":" in use and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return structured(Features, {"use": use, **options})  # type: ignore[type-abstract]
    except Problems as problems:
        raise UserError(f"--features {use}: {problems}") from None


@define(frozen=True)
class _Own(Features):
    """Features of a function that a config names as `module:name`."""

    function: ClassVar[Callable[[Tensor], Any]]
    path: ClassVar[str]

    @property
    def use(self) -> str:
        return self.path

    def open(self, device: torch.device) -> Space:
        network = type(self).function
        if isinstance(network, torch.nn.Module):
            network = network.to(device).eval()

        def embed(images: Tensor) -> Embedding:
            features = network(to_unit_range(images))
            if not isinstance(features, Tensor):
                raise UserError(f"{self.path} returned a {type(features).__name__}, expected features n d, a tensor")
            return features, None

        # No key: the code of a function may change without a trace.
        return Space(shown(self.path.replace(":", ".")), None, embed, channels=range(1, 5), device=device)


@contextmanager
def in_float32(device: torch.device) -> Iterator[None]:
    """Compute in float32 with all its digits during the `with`, without TF32, bfloat16 and autocast."""
    backends: Any = torch.backends
    # Not `allow_tf32`: torch refuses to read it once a script has set `fp32_precision`.
    places = (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv)
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for place, precision in zip(places, before, strict=True):
            place.fp32_precision = precision
