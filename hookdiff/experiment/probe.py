"""Finds problems of a config by building its parts, without its data and without a loop."""

from collections.abc import Callable
from inspect import isclass
from typing import Any, TypeVar

import torch
from attrs import evolve
from torch import nn
from torch.optim import Optimizer

from hookdiff.builtin.start_from import Start
from hookdiff.data.feed import Feed
from hookdiff.disk.hub import local_path
from hookdiff.encoding.captions import CaptionKeys, captions_for
from hookdiff.encoding.encoder import CAPTIONS, INPUTS, EncoderKeys
from hookdiff.errors import ConfigError, UserError
from hookdiff.experiment.build import (
    build_feed,
    build_model,
    build_sampling,
    check_conditions_used,
    pick_device,
    time_dtype,
    try_run,
)
from hookdiff.experiment.config import Config
from hookdiff.experiment.optimizers import build_optimizers, check_patterns, check_trainable, patterns_of
from hookdiff.experiment.part import Part
from hookdiff.images.folder import Folder
from hookdiff.images.transforms import Transforms, size_text
from hookdiff.loop.registry import Plugins
from hookdiff.loop.state import as_tuple
from hookdiff.models.adapters import NoGradient, call_text, check_forward, num_classes_of
from hookdiff.models.load import KEY, check_file
from hookdiff.options.structure import Problems, missing

Made = TypeVar("Made")


def try_config(config: Config, *, resume: bool = False) -> str | None:
    """Find the problems that only building shows, without the data and without a loop.

    Returns how the model will be called, if the config decides it, such as "forward(x = images 32 x 32, timesteps =
    times int64, context = text)"; None if the model cannot be made yet.

    The model is made on the meta device, which takes no memory, or on the CPU if this fails; the optimizer is made for
    a few small layers. With `resume`, the file that the model started from may be missing.

    Raises:
        ConfigError: with a list of all problems.
    """
    problems = Problems()

    def attempt(step: Callable[[], Made]) -> Made | None:
        try:
            return step()
        except UserError as error:
            problems.found.append(str(error))
        return None

    attempt(lambda: pick_device(config.run.device))
    attempt(lambda: _probe_captions(config))
    attempt(lambda: check_conditions_used(config))
    model = attempt(lambda: _probe_model(config))
    if (file := config.model.of(Start).start_from) and not resume:
        attempt(lambda: check_file(local_path(file, KEY)))
    attempt(lambda: try_optimizers(config))
    call = attempt(lambda: _probe_objective(config, model))
    for part in config.plugins.values():
        attempt(part.build)
    problems.refuse(config.path)
    Plugins({name: part.build() for name, part in config.plugins.items()})  # raises if they break the contract
    return call


def try_data(config: Config) -> Feed | None:
    """Find the problems that only the data shows: its captions, and the shapes of an encoded sample.

    Returns the Feed of the trial. Without encoders, or if the data is not on this machine, nothing is checked, and the
    result is None.

    Raises:
        ConfigError: for the first problem.
    """
    if not config.data.of(EncoderKeys).encode:
        return None
    try:
        config.data.build()
    except ConfigError:  # the data may be on another machine
        return None
    feed = build_feed(config, encode="trial")
    try_run(config, feed)
    return feed


def _probe_captions(config: Config) -> None:
    """Raise UserError if encoders and captions do not fit. Only a folder has its captions in the config."""
    if config.data.target is Folder:
        texts = {CAPTIONS: ()} if config.data.arguments.get("captions") else None
        try:
            captions_for(texts, config.data.of(EncoderKeys).of_texts, config.data.of(CaptionKeys), 0)
        except UserError as error:
            raise ConfigError(f"data: {error}") from None


def _probe_model(config: Config) -> Any:
    """Return the model, of any size if the data decides it; else its class, or None for a function."""
    part, side = config.model, config.data.of(Transforms).square
    if INPUTS in config.data.of(EncoderKeys).of_pictures:
        side = None  # the encoder decides it
    model: Any = part.target if isclass(part.target) and issubclass(part.target, nn.Module) else None
    if missing(part.target, part.arguments):
        return model
    names = [name for name in ("image_size", "sample_size") if part.accepts(name)]
    sides = (side,) if side or not names else (8, 28, 32, 64, 96, 256)
    errors = []
    for guess in sides:
        sized = part.given(**dict.fromkeys(names, guess))
        try:
            network = build_on_meta(sized)
            check_patterns(config.optimizer, network)
            check_trainable(network)
            _probe_gradient(part, network, guess)
            model = network
        except ConfigError as error:
            errors.append(str(error))
    # If the data decides the size, a problem must be the same for all sizes.
    if len(errors) == len(sides) and len(set(errors)) == 1:
        raise ConfigError(errors[0])
    return model


def build_on_meta(part: Part) -> nn.Module:
    """Make the model `part` on the meta device, which takes no memory, or on the CPU if this fails."""
    try:
        with torch.device("meta"):
            return build_model(part)
    except ConfigError:
        return build_model(part)  # reading a value while the model is made fails on the meta device


def _probe_objective(config: Config, model: Any) -> str | None:
    """Return how `model`, of `_probe_model`, will be called, if known. Refuse a model with other arguments."""
    part, transforms, objective = config.model, config.data.of(Transforms), config.diffusion.build()
    build_sampling(config, objective)
    if model is None:
        return None
    labels = objective.conditional
    if labels is None:
        wanted = part.arguments.get("num_classes", "num_classes" in missing(part.target, part.arguments))
        labels = bool(wanted if isclass(model) else num_classes_of(model))
    images = "images"
    if INPUTS in config.data.of(EncoderKeys).of_pictures:
        images = "latents"
    elif side := transforms.square:
        images = f"images {size_text([*filter(None, [transforms.channels]), side, side])}"
    inputs = [images, f"times {str(time_dtype(objective)).removeprefix('torch.')}", *["labels"] * labels]
    try:
        return call_text(model, inputs, objective.keywords)
    except ValueError as error:
        if isclass(model):  # only the network itself knows whether it takes labels
            return None
        raise ConfigError(f"{part.where}: {part.use} {error}") from None


def _probe_gradient(part: Part, model: nn.Module, side: int | None) -> None:
    """Raise ConfigError if no gradient reaches the output of a user's model, for the first shape that it accepts."""
    labels = num_classes_of(model) > 0
    for channels in (1, 3, 4) if ":" in part.use else ():
        try:
            check_forward(model, (channels, side or 32, side or 32), labels=labels, trains=True)
        except NoGradient as error:
            raise ConfigError(f"{part.where}: {part.use} {error}") from None
        except ValueError:  # the data has another shape, or the model needs values: `run` finds out
            continue
        return


def try_optimizers(config: Config) -> tuple[Optimizer, ...]:
    """Make the optimizers for a few small layers: their groups and rates, without model and data.

    Raises:
        ConfigError: for arguments that do not fit each other or the device.
    """
    try:
        device = pick_device(config.run.device)
    except ConfigError:  # reported by `try_config`
        device = torch.device("cpu")
    part = config.optimizer  # without the patterns, which name weights of the model
    known = {key: value for key, value in part.arguments.items() if key not in patterns_of(part)}
    layers = nn.Linear(8, 8), nn.Conv2d(1, 1, 1), nn.LayerNorm(1), nn.Embedding(1, 1)  # a weight of each role
    return as_tuple(build_optimizers(evolve(part, arguments=known, shared={}), nn.Sequential(*layers).to(device)))
