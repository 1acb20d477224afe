"""Finds problems of a config that only building shows, without its data and without a loop."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from attrs import evolve
from torch import nn
from torch.optim import Optimizer

from hookdiff.authors.encoding.captions import captions_for
from hookdiff.authors.encoding.encoder import CAPTIONS, Encoding
from hookdiff.builtin.start import Start
from hookdiff.errors import ConfigError, UserError
from hookdiff.experiment.build import build_model, build_sampling, pick_device
from hookdiff.experiment.config import Config
from hookdiff.experiment.optimizers import build_optimizers, check_patterns, check_trainable, patterns_of
from hookdiff.experiment.part import Part
from hookdiff.images.folder import Folder
from hookdiff.images.transforms import Transforms
from hookdiff.loop.registry import Plugins
from hookdiff.loop.state import as_tuple
from hookdiff.models.adapters import NoGradient, check_forward
from hookdiff.models.load import check_file
from hookdiff.options.structure import Problems, missing


def try_config(config: Config, *, resume: bool = False) -> None:
    """Find the problems that only building shows, without the data and without a loop.

    The model is made on the meta device, which takes no memory, or for real if it cannot be made there; the optimizer
    on a few small layers. With `resume`, the file that the model started from may be missing.

    Raises:
        ConfigError: that lists every problem.
    """
    problems = Problems()
    steps: list[Callable[[], Any]] = [
        lambda: pick_device(config.run.device),
        lambda: _probe_captions(config),
        lambda: _probe_model(config),
        lambda: try_optimizers(config),
        lambda: build_sampling(config, config.diffusion.build()),
        *(part.build for part in config.plugins.values()),
    ]
    if (file := config.model.of(Start).start_from) and not resume:
        steps.insert(2, lambda: check_file(Path(file)))
    for step in steps:
        try:
            step()
        except UserError as error:
            problems.found.append(str(error))
    problems.refuse(config.path)
    Plugins({name: part.build() for name, part in config.plugins.items()})  # raises if they break the contract


def _probe_captions(config: Config) -> None:
    """Raise UserError if encoders and captions do not fit; only of a folder, the config says which captions it has."""
    if config.data.target is Folder:
        texts = {CAPTIONS: ()} if config.data.arguments.get("captions") else None
        try:
            captions_for(SimpleNamespace(texts=texts), config.data.of(Encoding).of_texts)
        except UserError as error:
            raise ConfigError(f"data: {error}") from None


def _probe_model(config: Config) -> None:
    part, side = config.model, config.data.of(Transforms).image_size
    if missing(part.target, part.arguments):
        return
    names = [name for name in ("image_size", "sample_size") if part.accepts(name)]
    sides = (side,) if side or not names else (8, 28, 32, 64, 96, 256)
    errors = []
    for guess in sides:
        sized = part.given(**dict.fromkeys(names, guess))
        try:
            try:
                with torch.device("meta"):
                    model = build_model(sized)
            except ConfigError:
                model = build_model(sized)  # reading a value while the model is made fails only on the meta device
            check_patterns(config.optimizer, model)
            check_trainable(model)
            _probe_gradient(part, model, guess)
        except ConfigError as error:
            errors.append(str(error))
    # If the data decides the size, a problem must be the same for all sizes.
    if len(errors) == len(sides) and len(set(errors)) == 1:
        raise ConfigError(errors[0])


def _probe_gradient(part: Part, model: nn.Module, side: int | None) -> None:
    """Raise ConfigError if no gradient reaches the output of a model of the user, on the first shape that it takes."""
    labels = bool(getattr(model, "num_classes", 0))
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
        ConfigError: for arguments that cannot be combined, or not with the device.
    """
    try:
        device = pick_device(config.run.device)
    except ConfigError:  # which `try_config` reports
        device = torch.device("cpu")
    part = config.optimizer  # without the patterns, which name weights of the model
    known = {key: value for key, value in part.arguments.items() if key not in patterns_of(part)}
    layers = nn.Linear(8, 8), nn.Conv2d(1, 1, 1), nn.LayerNorm(1), nn.Embedding(1, 1)  # a weight of each role
    return as_tuple(build_optimizers(evolve(part, arguments=known, shared={}), nn.Sequential(*layers).to(device)))
