"""A checkpoint on disk: a folder of safetensors files and a manifest. There is no pickle anywhere.

The manifest is written last, and has digests of all files and of itself. A folder with an intact manifest is a complete
checkpoint, whatever its name; a folder without one is not a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from operator import index
from pathlib import Path
from typing import Any
from urllib.parse import quote

import safetensors
from attrs import define
from torch import Tensor

from hookdiff import UserError
from hookdiff.disk import (
    is_intact,
    new_file,
    new_folder,
    open_file,
    open_tensors,
    read_file,
    stamped,
    unflatten,
    write_file,
    write_tensors,
)

FORMAT = 3
FOLDER, MANIFEST = "checkpoints", "manifest.json"
REMOVED = ".removed"  # suffix of a folder that is being removed
STEP = re.compile(r"step-\d{8,}")  # names that a run gives; a run never removes a checkpoint of another name
_NAME = re.compile(r"[\w%~-][\w.%~-]*\.safetensors", re.ASCII)  # as `file_of` makes them, inside the folder
PARTS = ("model", "optimizers", "progress", "log", "data", "random", "config")
_COUNTS = ("position", "epoch", "step", "samples")
# Errors from a manifest that is valid JSON, but was not written by hookdiff.
_FOREIGN = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)

Parts = Mapping[str, tuple[Mapping[str, Tensor], Mapping[str, Any]]]  # tensors and other values of a state, by part


def step_of(path: Path) -> int:
    """Return the step of a checkpoint, from the name that a run gives its folder."""
    return int(path.name.removeprefix("step-"))


class NewerFormat(UserError):
    """A checkpoint of a later hookdiff. Resuming from an older checkpoint would undo the work of that version."""


@define(frozen=True)
class CheckpointInfo:
    """A checkpoint with an intact manifest; its files have not been verified."""

    path: Path
    place: tuple[int, int]  # position and epoch; the newest checkpoint of a run has the largest
    number: int  # of the save, from 1
    scheduled: bool  # made at a time that the config sets, and not by the end of a run
    metrics: Mapping[str, float]  # values logged at its step

    @classmethod
    def of(cls, path: Path, manifest: Mapping[str, Any]) -> CheckpointInfo:
        """Return the checkpoint that `manifest` describes; raises one of `_FOREIGN` if it cannot."""
        progress = manifest["parts"]["progress"]["values"]
        position, epoch, *others = (index(progress[name]) for name in _COUNTS)
        number = index(manifest["number"])
        if min(position, epoch, number, *others) < 0:
            raise ValueError("a count is negative")
        metrics = {str(name): float(value) for name, value in manifest["metrics"].items()}
        return cls(path, (position, epoch), number, bool(manifest["scheduled"]), metrics)


def file_of(part: str) -> str:
    """Return the name of the file that holds the tensors of a part."""
    name = quote(part.removeprefix("plugins/"), safe="")
    return f"{'%2E' + name[1:] if name.startswith('.') else name}.safetensors"


def write_checkpoint(path: Path, parts: Parts, facts: Mapping[str, Any]) -> CheckpointInfo:
    """Write the folder `path`, which appears completely or not at all.

    Each part with tensors has a file of its own, and each plugin is a part: `model.safetensors` and `ema.safetensors`
    have the keys of the model. The manifest has the numbers, the strings and the `facts`.
    """
    manifest: dict[str, Any] = {"format": FORMAT, **facts, "files": {}, "parts": {}}
    with new_folder(path) as folder:
        for part, (tensors, values) in parts.items():
            name = file_of(part) if tensors else None
            if name:
                written = write_tensors(folder / name, tensors)
                manifest["files"][name] = {"bytes": written.bytes, "sha256": written.sha256}
            manifest["parts"][part] = {"file": name, "values": values}
        with new_file(folder / MANIFEST) as unnamed:  # a manifest that exists is complete
            write_file(unnamed, stamped(manifest))
    return CheckpointInfo.of(path, manifest)


def find_checkpoints(run_dir: Path) -> tuple[list[CheckpointInfo], list[UserError]]:
    """Return the checkpoints in a run directory, newest first, and the errors of those that cannot be read.

    `run_dir` may also be a checkpoint itself. Raises NewerFormat, and UserError if the folder cannot be read.
    """
    found, problems = [], []
    for path in [run_dir] if os.path.lexists(run_dir / MANIFEST) else _folders(run_dir / FOLDER):
        try:
            found.append(CheckpointInfo.of(path, read_manifest(path)))
        except NewerFormat:
            raise
        except UserError as error:
            problems.append(error)
    # The names decide between two checkpoints of the same place and number.
    return sorted(found, key=lambda one: (one.place, one.number, one.path.name), reverse=True), problems


def _folders(parent: Path) -> list[Path]:
    """Return the folders in `parent` that are checkpoints, or have the name of one; control characters are in none."""
    try:
        paths = sorted(parent.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _unreadable(parent, error) from None
    named = [path for path in paths if not path.name.endswith(REMOVED) and path.name.isprintable()]
    folders = [path for path in named if os.path.isdir(path)]
    return [path for path in folders if STEP.fullmatch(path.name) or os.path.lexists(path / MANIFEST)]


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of the checkpoint at `path`.

    Raises UserError if it is missing or damaged, and NewerFormat if a later hookdiff wrote it.
    """
    try:
        data = read_file(path / MANIFEST)
    except OSError as error:
        raise _unreadable(path / MANIFEST, error) from None
    intact = is_intact(data)
    if intact is False:
        raise UserError(f"{path}: {MANIFEST} is damaged: its SHA-256 differs")
    try:
        manifest = json.loads(data)
        written, version = manifest["format"], manifest["versions"]["hookdiff"]
    except _FOREIGN:
        raise UserError(f"{path}: {MANIFEST} is damaged: it is not the JSON of a checkpoint") from None
    if type(written) is int and written > FORMAT:
        raise NewerFormat(
            f"{path}: hookdiff {version} wrote it in format {written}, this one reads up to {FORMAT}; update hookdiff"
        )
    if written != FORMAT:
        raise UserError(f"{path}: its format is {written}, this hookdiff reads {FORMAT}")
    if intact is None:
        raise UserError(f"{path}: {MANIFEST} is damaged: it has no SHA-256 of itself")
    try:
        CheckpointInfo.of(path, manifest)
    except _FOREIGN as error:
        raise _foreign(path, error) from None
    return dict(manifest)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Verify the checkpoint at `path`, and return its state, with tensors on the CPU.

    Raises UserError for a file that is missing, cut short, changed, or of another kind.
    """
    manifest = read_manifest(path)
    try:
        files = {str(name): (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
        for name in files:
            if not _NAME.fullmatch(name) or (path / name).is_symlink():
                raise UserError(f"{path}: {MANIFEST} names a file outside of the checkpoint: {name!r}")
            if (path / name).exists() and not (path / name).is_file():
                raise UserError(f"{path}: {name} is not a file")
        with ThreadPoolExecutor() as pool:  # hashing takes longer than reading, and releases the GIL
            list(pool.map(lambda name: _verify(path / name, *files[name]), files))
        tensors: dict[str | None, dict[str, Tensor]] = {None: {}, **{name: _tensors(path / name) for name in files}}
        parts = {name: unflatten(tensors[part["file"]], part["values"]) for name, part in manifest["parts"].items()}
    except _FOREIGN as error:
        raise _foreign(path, error) from None
    plugins = {name.removeprefix("plugins/"): part for name, part in parts.items() if name.startswith("plugins/")}
    others = {name: part for name, part in parts.items() if not name.startswith("plugins/")}
    if lacking := [name for name in PARTS if name not in others]:
        raise UserError(f"{path}: {MANIFEST} was not written by hookdiff: it lacks the part {lacking[0]!r}")
    return {"versions": manifest["versions"], **others, "plugins": plugins}


def _foreign(path: Path, error: Exception) -> UserError:
    return UserError(f"{path}: {MANIFEST} was not written by hookdiff: {type(error).__name__}: {error}")


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path.parent}: {path.name} cannot be read: {error.strerror or error}")


def _verify(path: Path, bytes: int, sha256: str) -> None:
    try:
        with open_file(path) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = file.tell()
    except OSError as error:
        raise _unreadable(path, error) from None
    if size != bytes:
        raise UserError(f"{path.parent}: {path.name} has {size:,} bytes, {bytes:,} were written")
    if digest != sha256:
        raise UserError(f"{path.parent}: {path.name} is damaged: its SHA-256 differs")


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        with open_tensors(path) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 no mapping
    except (safetensors.SafetensorError, OSError, RuntimeError, LookupError, ValueError) as error:
        raise UserError(f"{path.parent}: {path.name} is not a safetensors file: {error}") from None
