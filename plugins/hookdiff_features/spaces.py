"""The spaces of Inception: the space of FID, with the recipes of four packages, and torchvision's space."""

from __future__ import annotations

import torch
from attrs import define, field

from hookdiff import UserError
from hookdiff.features import Features, Space
from hookdiff.options import about, one_of
from hookdiff_features.inception import InceptionV3
from hookdiff_features.recipes import RECIPES, SIDE, antialiased, as_rgb
from hookdiff_features.weights import ABOUT_FILE, ABOUT_SHA256, Published, Weights, read_weights

# Both packages publish the same file: the weights of the TensorFlow graph of 2015-12-05.
FID_WEIGHTS = Published(
    "https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/pt_inception-2015-12-05-6726825d.pth",
    "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2",
    ("weights-inception-2015-12-05-6726825d.pth",),
)
TORCHVISION_WEIGHTS = Published("https://download.pytorch.org/models/inception_v3_google-0cc3c7bd.pth", "0cc3c7bd")


@define(frozen=True)
class Inception(Features):
    """The layer pool3 of the network of FID, 2,048 features: with the published weights the distance is FID.

    Each recipe resizes and scales as the package of its name, and gives the same features. The default is the recipe
    of torch-fidelity and of the original TensorFlow graph. The evaluations of ADM, EDM and DiT and their published
    reference statistics use this recipe, too. For images of 299 x 299 the recipes hardly differ.
    """

    channels = (1, 3)
    recipe: str = field(
        default="torch-fidelity",
        validator=one_of(tuple(RECIPES)),
        metadata=about("resizing and scaling of the package: " + ", ".join(f'"{name}"' for name in RECIPES)),
    )
    weights: str | None = field(default=None, metadata=ABOUT_FILE)
    sha256: str | None = field(default=None, metadata=ABOUT_SHA256)
    precision: str = field(
        default="float32",
        validator=one_of(("float32", "bf16")),
        metadata=about(
            '"float32", or "bf16": about twice as fast on processors with bf16, but distances change, small ones by '
            'some percent; the name of the space then ends with "/bf16"'
        ),
    )

    def open(self, device: torch.device) -> Space:
        weights = read_weights(FID_WEIGHTS, self.weights, self.sha256, "features 'inception'")
        dtype = torch.float32 if self.precision == "float32" else torch.bfloat16
        network = _network(weights, self.use, as_in_fid=True).to(device, dtype)
        prepare = RECIPES[self.recipe]
        name = "/".join((weights.named("inception"), self.recipe, *(["bf16"] if dtype == torch.bfloat16 else [])))
        return Space(
            name,
            f"{name} {weights.sha256}",
            lambda images: network(prepare(as_rgb(images)).to(dtype)),
            self.channels,
            device=device,
            metric="fid" if weights.is_published else "fd",
        )


@define(frozen=True)
class TorchvisionInception(Features):
    """The last pooling of torchvision's Inception v3, 2,048 features. This is not the network of FID.

    Images are resized to 299 (bilinear, antialiased) and scaled to [-1, 1], as in the network's training.
    """

    channels = (1, 3)
    weights: str | None = field(default=None, metadata=ABOUT_FILE)
    sha256: str | None = field(default=None, metadata=ABOUT_SHA256)

    def open(self, device: torch.device) -> Space:
        weights = read_weights(TORCHVISION_WEIGHTS, self.weights, self.sha256, "features 'inception-torchvision'")
        network = _network(weights, self.use, as_in_fid=False).to(device)
        name = weights.named("inception-torchvision")
        return Space(
            name,
            f"{name} {weights.sha256}",
            lambda images: network(antialiased(as_rgb(images), SIDE, "bilinear") / 127.5 - 1),
            self.channels,
            device=device,
        )


def _network(weights: Weights, use: str, as_in_fid: bool) -> InceptionV3:
    """Return the network of the features `use`. Raises UserError for the weights of another network."""
    try:
        network = InceptionV3(weights.state, as_in_fid).eval()
        network(torch.zeros(1, 3, 75, 75))  # the least size; fails if a weight is missing or has another shape
    except (AttributeError, KeyError, RuntimeError) as error:
        raise UserError(f"features {use!r}: these are not weights of Inception, name another file: {error}") from None
    return network
