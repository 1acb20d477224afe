"""Loads weights into a model, from safetensors files of any library or from a saved state."""

import logging
from collections.abc import Mapping
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hookdiff.disk.sharded import read_weights, shards_of
from hookdiff.errors import ConfigError, nearest
from hookdiff.machine.dtensor import fill_, is_sharded
from hookdiff.machine.overlap import is_overlapping
from hookdiff.models.names import is_inside, plain_name

KEY = "model.start_from"
_MOST_SHOWN = 5  # differences in a message

Shapes = Mapping[str, tuple[int, ...]]
logger = logging.getLogger("hookdiff")


def load_into(model: nn.Module, path: Path, partial: bool = False, asked_by: str = KEY) -> None:
    """Copy the tensors of the weights at `path` (see `read_weights`) into the tensors of `model` with these names.

    A parametrised weight also takes the tensor that has its plain name. `asked_by` is the key or the option that names
    the file.

    Raises:
        ConfigError: if the file cannot be used, has other names or shapes (unless `partial`), has nothing that fits, or
            would make a parameter not finite. The model then stays unchanged.
    """
    weights = read_weights(path, asked_by)
    saved = weights.shapes
    ours = {
        name if name in saved else plain_name(name): value
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor) and (name in saved or not is_inside(name))
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in ours.items()}
    fitting = [name for name in ours if saved.get(name) == shapes[name]]
    count = f"{len(fitting)} of the model's {len(ours)} tensors"
    differing = differences(shapes, saved)
    if differing and not (partial and fitting):
        num, index = shards_of(path)
        if num > 1:
            none_here = (
                "their index, such as model.safetensors.index.json, is not here; hookdiff export RUN FILE --weights "
                "model writes the weights of a run to one file"
            )
            way_out = f"name their index, {index}" if index else none_here
            raise ConfigError(f"{asked_by}: {path} is one of {num} files that hold the weights together; {way_out}")
        way_out = f"\n  start_partial = true loads what fits: {count}" if fitting and asked_by == KEY else ""
        raise ConfigError(f"{asked_by}: {path} is of another model: {differing}{way_out}")
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}  # a buffer may mask with -inf
    for name, tensor in weights.tensors(fitting):
        cast = tensor.to(ours[name].dtype)
        if bool(cast.isnan().any()) or (name in parameters and not bool(cast.isfinite().all())):
            raise ConfigError(f"{asked_by}: {path}: {name!r} has values that are not finite; expected finite numbers")
    with torch.no_grad():
        for name, tensor in weights.tensors(fitting):
            fill_(ours[name], tensor)
    logger.info("started from %s: %s", path, count)
    if differing:
        logger.warning("tensors of %s that do not fit: %s", path, differing)


def load_state(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Load the state `saved`, with the keys of `model.state_dict()`. This rank takes its part of a sharded tensor."""
    tensors = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}
    # Torch copies no whole tensor into a sharded one, and nothing into an overlapping one.
    ours = {name: tensor for name, tensor in tensors.items() if is_sharded(tensor) or is_overlapping(tensor)}
    model.load_state_dict({name: value for name, value in saved.items() if name not in ours}, strict=not ours)
    for name, tensor in ours.items():  # last, because overlapping tensors may show the others
        fill_(tensor, saved[name])


def check_file(path: Path) -> Shapes:
    """Return the shapes of the tensors in the weights at `path` (see `read_weights`). Only headers are read.

    Raises:
        ConfigError: for a file that is missing, truncated, or of another format.
    """
    return read_weights(path, KEY).shapes


def differences(ours: Mapping[str, object], saved: Mapping[str, object], kind: str = "shape") -> str:
    """Return the number of names and values (of this `kind`) that differ, and some of them; "" if none differ."""
    missing = [name for name in ours if name not in saved]
    unexpected = [name for name in saved if name not in ours]
    misshapen = [name for name in ours if name in saved and saved[name] != ours[name]]
    total = len(missing) + len(unexpected) + len(misshapen)
    if not total:
        return ""
    # Generators, because the search for the nearest name takes long, and only lines that are shown need it.
    rows = zip_longest(
        (f"missing {name}{nearest(name, unexpected)}" for name in missing),
        (f"unexpected {name}{nearest(name, missing)}" for name in unexpected),
        (f"{name} has {kind} {saved[name]}, the model has {ours[name]}" for name in misshapen),
    )
    lines = list(islice(filter(None, chain.from_iterable(rows)), _MOST_SHOWN))
    more = [f"and {total - len(lines)} more"] if total > len(lines) else []
    return "\n  ".join([f"{total} difference{'s' * (total != 1)}", *lines, *more])
