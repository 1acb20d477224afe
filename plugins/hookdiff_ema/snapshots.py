"""Snapshots of power-function averages on disk, and averages of other widths that are made from snapshots."""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors
import torch
from attrs import define, field
from attrs.validators import ge, gt, le, lt
from torch import Tensor

from hookdiff import UserError
from hookdiff.disk import check_place, new_file, open_tensors, write_tensors, writing
from hookdiff.options import Problems, structured
from hookdiff_ema.profiles import MAX_STD, Fit, fit

FOLDER = "ema"  # in the run directory
_ABOUT = "ema"  # key in the metadata of a snapshot
_TOLERANCE = 0.1  # largest relative L2 error of a profile
_ROUNDING = 0.01  # largest relative error of the weights by the rounding of snapshots
_UNIT = {"float16": 2.0**-11, "float32": 2.0**-24}  # relative rounding error of a number
_NAME = re.compile(r"step-(\d{8,})-std=(.+)\.safetensors")


@define(frozen=True)
class Snapshot:
    """A file with an average of width `std` at `step`."""

    path: Path
    std: float
    step: int  # updates of the run
    start: int  # updates before the average began
    dtype: str  # "float32" or "float16"

    @property
    def updates(self) -> int:
        return self.step - self.start


@define(frozen=True)
class _About:
    """The header of a snapshot, with its values checked."""

    std: float = field(validator=[gt(0.0), le(MAX_STD)])
    step: int = field(validator=lt(1 << 53))
    start: int = field(validator=ge(0))
    dtype: Literal["float32", "float16"]
    averaged: list[str]


def write_snapshot(snapshot: Snapshot, values: Mapping[str, Tensor], averaged: Collection[str]) -> None:
    """Write `values`, by key of the model; the `averaged` keys in the snapshot's dtype, unless they overflow."""
    tensors, dtype = {}, getattr(torch, snapshot.dtype)
    for key, value in values.items():
        stored = value.detach().cpu()
        if key in averaged:
            lower = stored.to(dtype)
            stored = lower if torch.equal(lower.isfinite(), stored.isfinite()) else stored.float()
        tensors[key] = stored
    about = {"std": snapshot.std, "step": snapshot.step, "start": snapshot.start, "dtype": snapshot.dtype}
    with new_file(snapshot.path) as path:
        write_tensors(path, tensors, {_ABOUT: json.dumps({**about, "averaged": sorted(averaged)})})


def remove_later(folder: Path, step: int) -> None:
    """Remove the snapshots after `step`, since a run that goes on from `step` makes these steps again."""
    with writing(folder):
        check_place(folder)
        for path in folder.glob("step-*"):
            if (named := _NAME.fullmatch(path.name)) and int(named[1]) > step:
                path.unlink()


def find_snapshots(run: Path) -> list[Snapshot]:
    """Return the snapshots in a run directory, sorted by step and std, that have the same start as the newest.

    Raises UserError if `run` is not a directory, or has no snapshot.
    """
    snapshots = []
    for path in (run / FOLDER).glob("step-*"):
        if _NAME.fullmatch(path.name):
            try:
                with _opened(path) as file:
                    about = _about(file)
                snapshots.append(Snapshot(path, about.std, about.step, about.start, about.dtype))
            except (Problems, ValueError, RecursionError) as error:
                raise UserError(f"{path}: not a snapshot of an average: its header: {error}") from None
    if not run.is_dir():
        raise UserError(f"{run}: expected a run directory")
    if not snapshots:
        raise UserError(
            f"{run} has no snapshots; a run writes them with\n"
            "  [plugins.ema]\n  std = [0.05, 0.1]\n  snapshot_every = 1000"
        )
    snapshots.sort(key=lambda snapshot: (snapshot.step, snapshot.std))
    return [snapshot for snapshot in snapshots if snapshot.start == snapshots[-1].start]


@define(frozen=True)
class Reconstruction:
    """An average as a weighted sum of snapshots."""

    step: int
    parts: Sequence[tuple[Snapshot, float]]  # snapshots and their weights
    error: float  # L2 norm of the difference in the profile, over the norm of the profile


def plan(snapshots: Sequence[Snapshot], std: float, step: int | None = None) -> Reconstruction:
    """Return how to make the average of width `std` at `step` (default: the step of the newest snapshot).

    Raises UserError, with the possible range, if the snapshots do not determine this average.
    """
    newest, start = snapshots[-1].step, snapshots[-1].start
    step = newest if step is None else step
    if not start < step <= newest:
        raise UserError(f"step {step:,} is outside of the range of the snapshots: {snapshots[0].step:,} to {newest:,}")
    times, stds = [s.updates for s in snapshots], [s.std for s in snapshots]
    unit = max(_UNIT[snapshot.dtype] for snapshot in snapshots)

    def fitted(targets: Sequence[float]) -> tuple[Fit, list[bool]]:
        fitting = fit(times, stds, step - start, targets)
        rounding = unit * np.abs(fitting.weights).sum(0)  # grows if large weights of both signs cancel
        return fitting, ((fitting.errors <= _TOLERANCE) & (rounding <= _ROUNDING)).tolist()

    best, (is_fine,) = fitted([std])
    if not is_fine:
        grid = np.unique([*np.linspace(0.001, MAX_STD, 500), *stds]).tolist()
        runs = [
            [width for width, _ in run]
            for fine, run in groupby(zip(grid, fitted(grid)[1], strict=True), itemgetter(1))
            if fine
        ]
        if ranges := ", ".join(f"{run[0]:.3g} to {run[-1]:.3g}" for run in runs):
            raise UserError(f"std {std:g} is outside of the range of the snapshots at step {step:,}: {ranges}")
        near = min((snapshot.step for snapshot in snapshots), key=lambda other: abs(other - step))
        raise UserError(f"the snapshots give no average at step {step:,}; choose step {near:,}, which has a snapshot")
    weights = best.weights[:, 0].tolist()
    # A snapshot of weight 0 is not read: for an average that was saved, only its own snapshot is read.
    parts = [(snapshot, weight) for snapshot, weight in zip(snapshots, weights, strict=True) if abs(weight) > 1e-12]
    return Reconstruction(step, parts, float(best.errors[0]))


def reconstruct(planned: Reconstruction) -> dict[str, Tensor]:
    """Return the average in float32, by the keys of the model, with the buffers of its newest snapshot.

    The snapshots are read one by one and summed in float64. Raises UserError if they belong to different models.
    """
    total: dict[str, Tensor] = {}
    for number, (snapshot, weight) in enumerate(reversed(planned.parts)):
        with _opened(snapshot.path) as file:
            averaged = _about(file).averaged
            if not set(averaged) <= set(file.keys()):
                raise UserError(f"{snapshot.path} is of another model than the newest snapshot")
            if number == 0:
                total = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 not a mapping
                summed = {key: torch.zeros_like(total[key], dtype=torch.float64) for key in averaged}
            if summed.keys() != set(averaged) or total.keys() != set(file.keys()):
                raise UserError(f"{snapshot.path} is of another model than the newest snapshot")
            for key, value in summed.items():
                part = file.get_tensor(key)
                if part.shape != value.shape:
                    raise UserError(f"{snapshot.path} is of another model than the newest snapshot: {key} differs")
                value.add_(part.double(), alpha=weight)
    return {**total, **{key: value.float() for key, value in summed.items()}}


def _about(file: Any) -> _About:
    about = structured(_About, json.loads((file.metadata() or {}).get(_ABOUT, "{}")))
    if not about.start < about.step:
        raise ValueError(f"step {about.step:,} is not after start {about.start:,}")
    return about


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with open_tensors(path) as file:
            yield file
    except safetensors.SafetensorError as error:
        raise UserError(f"{path}: truncated, or not a safetensors file: {error}; remove the file to skip it") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
