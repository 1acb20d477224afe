"""Snapshots of power-function averages on disk, and averages of other lengths that are made of them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from attrs import define
from torch import Tensor

from hookdiff import UserError
from hookdiff.disk import new_file, write_tensors
from hookdiff_ema.profiles import MAX_STD, Fit, fit

FOLDER = "ema"  # in the run directory
_ABOUT = "ema"  # the key of a snapshot's metadata
_TOLERANCE = 0.1  # of a profile, in L2, that a fit may lack
_ROUNDING = 0.01  # of the weights, that rounding the snapshots may cost
_UNIT = {"float16": 2.0**-11, "float32": 2.0**-24}  # relative rounding of a snapshot's numbers
_NAME = re.compile(r"step-(\d{8,})-std=(.+)\.safetensors")


@define(frozen=True)
class Snapshot:
    """A file with an average of width `std` as it was at `step`, in `dtype`."""

    path: Path
    std: float
    step: int  # updates of the run
    start: int  # updates before the average began
    dtype: str  # "float32" or "float16"

    @property
    def updates(self) -> int:
        """The training time of its profile."""
        return self.step - self.start


def snapshot_path(folder: Path, step: int, std: float) -> Path:
    """Return where the snapshot of an average belongs."""
    return folder / f"step-{step:08d}-std={std}.safetensors"


def write_snapshot(snapshot: Snapshot, values: Mapping[str, Tensor], averaged: Collection[str]) -> None:
    """Write `values`, by the model's keys; those that are `averaged` in its dtype, unless they are too large for it."""
    tensors, dtype = {}, getattr(torch, snapshot.dtype)
    for key, value in values.items():
        stored = value.detach().cpu()
        if key in averaged:
            lower = stored.to(dtype)
            stored = lower if torch.equal(lower.isfinite(), stored.isfinite()) else stored.float()
        tensors[key] = stored
    about = {name: getattr(snapshot, name) for name in ("std", "step", "start", "dtype")}
    with new_file(snapshot.path) as path:
        write_tensors(path, tensors, {_ABOUT: json.dumps({**about, "averaged": sorted(averaged)})})


def remove_later(folder: Path, step: int) -> None:
    """Remove the snapshots of `step` and after: those of a run that is at `step` were of steps since undone."""
    for path in folder.glob("step-*"):
        if (named := _NAME.fullmatch(path.name)) and int(named[1]) >= step:
            path.unlink()


def find_snapshots(run: Path) -> list[Snapshot]:
    """Return the snapshots of a run directory by step and std, of the newest average: those of one begin together.

    Raises UserError when there is none, or no such directory.
    """
    found = []
    for path in (run / FOLDER).glob("step-*"):
        if _NAME.fullmatch(path.name):
            try:
                with _opened(path) as file:
                    about = _about(file)
                found.append(Snapshot(path, about["std"], about["step"], about["start"], about["dtype"]))
            except (KeyError, ValueError) as error:
                raise UserError(f"{path}: no snapshot of an average: its header lacks {error}") from None
    if not found and not run.is_dir():
        raise UserError(f"{run}: " + ("expected a run directory, got a file" if run.exists() else "no such directory"))
    if not found:
        raise UserError(
            f"{run} has no snapshots to make an average of; a run writes them with\n"
            "  [plugins.ema]\n  std = [0.05, 0.1]\n  snapshot_every = 1000"
        )
    found.sort(key=lambda snapshot: (snapshot.step, snapshot.std))
    return [snapshot for snapshot in found if snapshot.start == found[-1].start]


@define(frozen=True)
class Recipe:
    """What a reconstruction is made of."""

    std: float
    step: int
    parts: Sequence[tuple[Snapshot, float]]  # with their weights
    error: float  # L2 norm of what its profile lacks, over that of the profile


def recipe(snapshots: Sequence[Snapshot], std: float, step: int | None = None) -> Recipe:
    """Return how to make the average of width `std` at `step`, the newest snapshot's unless given.

    Raises UserError, with the range that can be had, for what the snapshots do not carry.
    """
    newest, start = snapshots[-1].step, snapshots[-1].start
    step = newest if step is None else step
    if not start < step <= newest:
        raise UserError(f"step {step} is outside of what the snapshots carry: {snapshots[0].step} to {newest}")
    times, stds = [s.updates for s in snapshots], [s.std for s in snapshots]
    unit = max(_UNIT[snapshot.dtype] for snapshot in snapshots)

    def carried(targets: Sequence[float]) -> tuple[Fit, list[bool]]:
        fitted = fit(times, stds, step - start, targets)
        rounding = unit * np.abs(fitted.weights).sum(0)  # large weights that cancel enlarge it
        return fitted, ((fitted.errors <= _TOLERANCE) & (rounding <= _ROUNDING)).tolist()

    fitted, (fine,) = carried([std])
    if not fine:
        grid = np.unique([*np.linspace(0.001, MAX_STD, 500), *stds]).tolist()
        if ranges := _ranges(grid, carried(grid)[1]):
            raise UserError(f"std {std:g} is outside of what the snapshots carry at step {step}: {ranges}")
        near = min((snapshot.step for snapshot in snapshots), key=lambda other: abs(other - step))
        raise UserError(f"the snapshots carry no average at step {step}; the nearest of them is at step {near}")
    weights = fitted.weights[:, 0].tolist()
    # What counts for nothing is not read: an average that is there comes from its own snapshot alone.
    parts = [(snapshot, weight) for snapshot, weight in zip(snapshots, weights, strict=True) if abs(weight) > 1e-12]
    return Recipe(std, step, parts, float(fitted.errors[0]))


def reconstruct(made: Recipe) -> dict[str, Tensor]:
    """Return the average in float32, by the model's own keys, with the buffers of the newest snapshot it is made of.

    The snapshots are read one by one and summed in float64. Raises UserError when they are not of one model.
    """
    total: dict[str, Tensor] = {}
    for number, (snapshot, weight) in enumerate(reversed(made.parts)):
        with _opened(snapshot.path) as file:
            averaged = _about(file)["averaged"]
            if number == 0:
                total = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 no mapping
                summed = {key: torch.zeros_like(total[key], dtype=torch.float64) for key in averaged}
            if summed.keys() != set(averaged) or total.keys() != set(file.keys()):
                raise UserError(f"{snapshot.path} is of another model than the newest snapshot")
            for key, value in summed.items():
                part = file.get_tensor(key)
                if part.shape != value.shape:
                    raise UserError(f"{snapshot.path} is of another model than the newest snapshot: {key} differs")
                value.add_(part.double(), alpha=weight)
    return {**total, **{key: value.float() for key, value in summed.items()}}


def _about(file: Any) -> dict[str, Any]:
    about: dict[str, Any] = json.loads((file.metadata() or {}).get(_ABOUT, "{}"))
    return about


def _ranges(grid: Sequence[float], fine: Sequence[bool]) -> str:
    """Return the stretches of the rising `grid` that are fine, as "0.04 to 0.13"."""
    stretches = [
        [std for _, std in group] for good, group in groupby(zip(fine, grid, strict=True), itemgetter(0)) if good
    ]
    return ", ".join(f"{stretch[0]:.3g} to {stretch[-1]:.3g}" for stretch in stretches)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            yield file
    except safetensors.SafetensorError as error:
        raise UserError(f"{path}: cut short, or no safetensors file: {error}; remove it to go on without") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
