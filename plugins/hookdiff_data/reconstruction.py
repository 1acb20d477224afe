"""The quality that the autoencoder of a config alone loses: pictures are compared with their reconstructions."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from hookdiff import Config, Feed, UserError
from hookdiff.data import picture_shapes
from hookdiff.encoding import TextEncoder
from hookdiff.experiment import build_feed, pick_device
from hookdiff.features import Moments, Space, few_images, frechet_distance, named_features, usual_features
from hookdiff.log import to_uint8
from hookdiff.terminal import paced

_BATCH = 32  # pictures
_INPUTS = "image"  # name of the encoder of the inputs


def reconstruction(config: Config, num: int, features: str | None) -> tuple[dict[str, Any], list[str]]:
    """Compare `num` pictures, evenly spread over the usable samples, with their reconstructions by the autoencoder.

    The pictures are in [-1, 1], encoded to the mean of the posterior, decoded, and clamped. Returns statistics, ready
    for JSON, and texts about them. "psnr" is the mean of 10 log10(4 / mean squared error) over the pictures, in dB. The
    Fréchet distance has the name of the space `features`; None: the usual space, or no distance if that cannot be
    opened.

    Raises UserError if `config` has no encoder of pictures, for `features` that cannot be opened, for pictures that
    cannot be encoded, and for reconstructions that are not finite.
    """
    feed = build_feed(_of_few(config), encode="pictures")
    feed.blank(1)  # encodes a picture: an autoencoder that does not return pictures of this shape is refused
    space, texts = _open(features, picture_shapes(feed), pick_device(config.run.device))
    num = min(num, len(feed.usable))
    try:
        psnr, distance = _compare(feed, feed.usable[torch.arange(num) * len(feed.usable) // num], space)
    except ValueError as error:  # features that are not finite, or a single picture
        raise UserError(f"data.encode.{_INPUTS}: {error}") from None
    facts = {"num": num, "samples": len(feed.usable), "psnr": psnr, "space": space and space.name}
    if space:
        facts[space.distance] = distance
        texts += filter(None, [few_images(num)])
    return facts, texts


def _of_few(config: Config) -> Config:
    """Return `config` with only the encoder of the inputs, and without a latent table, which would encode all samples.

    Encoders of texts stay, since the source gives their captions, but they encode nothing here.
    """
    for kind, keys in config.data.shared.items():
        if encoder := (keys.get("encode") or {}).get(_INPUTS):
            texts = {name: part for name, part in keys["encode"].items() if isinstance(part, TextEncoder)}
            options = {**keys, "encode": {**texts, _INPUTS: evolve(encoder, store="none")}}
            return evolve(config, data=evolve(config.data, shared={**config.data.shared, kind: options}))
    where = f"[data.encode.{_INPUTS}]"
    raise UserError(f"{config.path}: --reconstruction needs an autoencoder: add the table {where}")


def _open(
    features: str | None, shapes: Sequence[tuple[int, ...]], device: torch.device
) -> tuple[Space | None, list[str]]:
    """Return the space to compare pictures of these `shapes` in, or None and the reason."""
    try:
        choice = named_features(features) if features else usual_features(*shapes)
        for shape in shapes:
            choice.check(shape)
        space = choice.open(device)
        for shape in shapes:
            space.check(shape)
    except UserError as error:
        if features:
            raise
        return None, [f"without the Fréchet distance: {error}"]
    return space, []


def _compare(feed: Feed, indices: Tensor, space: Space | None) -> tuple[float, float | None]:
    """Return the mean PSNR of the pictures `indices`, and their distance in `space`."""
    errors, reconstructed, original = list[Tensor](), Moments(), Moments()
    parts = paced(_pairs(feed, indices), len(indices), "data: reconstruction", size=lambda pair: len(pair[0]))
    with closing(parts) as pairs:
        for pictures, decoded in pairs:
            errors.append((pictures - decoded).double().square().flatten(1).mean(1))
            if space:
                reconstructed.add(space(to_uint8(decoded))[0])
                original.add(space(to_uint8(pictures))[0])
    psnr = (10 * (4 / torch.cat(errors)).log10()).mean()
    return float(psnr), frechet_distance(reconstructed, original) if space else None


def _pairs(feed: Feed, indices: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the pictures `indices`, n c h w in [-1, 1], and their reconstructions, in batches."""
    assert feed.codec is not None
    for batch in feed.pictures.unaugmented(indices, _BATCH):
        decoded = feed.codec.decode(feed.codec.encode(batch.inputs))
        assert batch.indices is not None
        for index in batch.indices[~decoded.flatten(1).isfinite().all(1).cpu()].tolist():
            way_out = "try precision and decode_precision = 'float32', or another autoencoder"
            name = feed.describe(index)
            raise UserError(f"data.encode.{_INPUTS}: the reconstruction of {name} is not finite; {way_out}")
        yield batch.inputs, decoded.clamp(-1, 1)
