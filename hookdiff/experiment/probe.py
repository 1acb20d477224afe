"""What only building shows of a config, found without its data and without a loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hookdiff.errors import ConfigError, UserError
from hookdiff.experiment.build import build_model, pick_device
from hookdiff.experiment.config import Config, refusal
from hookdiff.experiment.optimizers import build_small, check_patterns
from hookdiff.experiment.part import Part
from hookdiff.experiment.structure import missing
from hookdiff.models.load import check_file
from hookdiff.plugins import Plugins


def try_config(config: Config, *, resume: bool = False) -> None:
    """Find what only building shows, without the data and without a loop.

    The model is made on the meta device, which takes no memory, or for real if it cannot be made there; the optimizer
    on one weight. A run that may `resume` may do so without the file that its model started from.

    Raises ConfigError that lists every problem.
    """
    problems = []
    steps: list[Any] = [
        lambda: pick_device(config.run.device),
        lambda: _probe_model(config, config.feed["transforms"].image_size),
        lambda: _probe_start(config.start.get("start_from") if not resume else None),
        lambda: try_optimizers(config),
        lambda: _probe_sampling(config),
    ]
    for step in [*steps, *(part.build for part in config.plugins.values())]:
        try:
            step()
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise refusal(config.path, problems)
    Plugins({name: part.build() for name, part in config.plugins.items()})  # do they keep the contract?


def _probe_model(config: Config, side: int | None) -> None:
    part = config.model
    if missing(part.target, part.arguments):
        return
    names = [name for name in ("image_size", "sample_size") if part.accepts(name)]
    sides = (side,) if side or not names else (8, 28, 32, 64, 96, 256)
    errors = []
    for guess in sides:
        try:
            model = _probe_one_model(part.given(**dict.fromkeys(names, guess)))
            check_patterns(config.optimizer, model, config.groups)
        except ConfigError as error:
            errors.append(str(error))
    # Where the data has the say, only what is wrong in the same way for any size is wrong.
    if len(errors) == len(sides) and len(set(errors)) == 1:
        raise ConfigError(errors[0])


def _probe_one_model(part: Part) -> nn.Module:
    try:
        with torch.device("meta"):
            return build_model(part)
    except ConfigError:
        return build_model(part)  # many models look at a value while they are made, which fails on meta alone


def try_optimizers(config: Config) -> tuple[Optimizer, ...]:
    """Make the optimizers for one small layer: their groups and rates, without model and data.

    Raises ConfigError for arguments that do not go together, or not with the device.
    """
    try:
        device = pick_device(config.run.device)
    except ConfigError:  # which `probe` tells
        device = torch.device("cpu")
    return build_small(config.optimizer, device)


def _probe_start(path: str | None) -> None:
    if path:
        check_file(Path(path))


def _probe_sampling(config: Config) -> None:
    diffusion, sampling = config.diffusion.build(), config.sampling.build()
    try:
        sampling.points(diffusion)
    except ValueError as error:
        raise ConfigError(f"sampling: {error}") from None
