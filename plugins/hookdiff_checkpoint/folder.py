"""A checkpoint on disk: a folder of safetensors files and a manifest. There is no pickle anywhere.

The manifest is written last, and has digests of all files and of itself. A folder with an intact manifest is a complete
checkpoint, whatever its name; a folder without one is not a checkpoint.

Each part of the state, such as the model or a plugin, has a file of its own. `model.safetensors` and `ema.safetensors`
have the keys of the model. If ranks share a tensor, each rank writes its piece under the tensor's name to a file such
as `model-00002-of-00008.safetensors`, and the manifest has the place where each piece begins.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from operator import index
from pathlib import Path
from typing import Any
from urllib.parse import quote

import safetensors
from attrs import define
from torch import Tensor

from hookdiff import UserError
from hookdiff.disk import is_intact, open_file, open_tensors, read_file, unflatten
from hookdiff.run_dir import CHECKPOINTS, step_of
from hookdiff_checkpoint.pieces import pieced

FORMAT, SHARDED = 3, 4  # without and with tensors in pieces; an earlier hookdiff cannot read pieces
MANIFEST = "manifest.json"
REMOVED = ".removed"  # suffix of a folder that is being removed
_NAME = re.compile(r"[\w%~-][\w.%~-]*\.safetensors", re.ASCII)  # the names that `file_of` returns
PLUGINS = "plugins/"  # prefix of the part of a plugin
PARTS = ("model", "optimizers", "progress", "log", "data", "random", "config")
_COUNTS = ("position", "epoch", "step", "samples")
# Errors from a manifest that is valid JSON, but was not written by hookdiff.
_FOREIGN = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class NewerFormat(UserError):
    """A later hookdiff wrote the checkpoint; resuming from an older checkpoint would lose the later steps."""


@define(frozen=True)
class CheckpointInfo:
    """A checkpoint with an intact manifest; its files have not been verified."""

    path: Path
    place: tuple[int, int]  # position and epoch; the newest checkpoint of a run has the largest
    number: int  # of the save in its run, from 1
    scheduled: bool  # saved at a time that the config sets, not at the end of a run
    metrics: Mapping[str, float]  # values logged at its step

    @classmethod
    def of(cls, path: Path, manifest: Mapping[str, Any]) -> CheckpointInfo:
        """Return the checkpoint that `manifest` describes; raises one of `_FOREIGN` if it describes none."""
        progress = manifest["parts"]["progress"]["values"]
        position, epoch, *others = (index(progress[name]) for name in _COUNTS)
        number = index(manifest["number"])
        if min(position, epoch, number, *others) < 0:
            raise ValueError("a count is negative")
        metrics = {str(name): float(value) for name, value in manifest["metrics"].items()}
        return cls(path, (position, epoch), number, bool(manifest["scheduled"]), metrics)


def file_of(part: str, of_rank: str = "") -> str:
    """Return the name of the file with the tensors of a part, or with the pieces of one rank ("00002-of-00008")."""
    name = quote(part.removeprefix(PLUGINS), safe="")
    ending = f"-{of_rank}.safetensors" if of_rank else ".safetensors"
    return f"{'%2E' + name[1:] if name.startswith('.') else name}{ending}"


def find_checkpoints(run_dir: Path) -> tuple[list[CheckpointInfo], list[UserError]]:
    """Return the checkpoints in a run directory, newest first, and the errors of those that cannot be read.

    `run_dir` may also be a checkpoint itself.

    Raises:
        NewerFormat: for a checkpoint of a newer version.
        UserError: if the folder cannot be read.
    """
    checkpoints, problems = [], []
    for path in [run_dir] if os.path.lexists(run_dir / MANIFEST) else _folders(run_dir / CHECKPOINTS):
        try:
            checkpoints.append(CheckpointInfo.of(path, read_manifest(path)))
        except NewerFormat:
            raise
        except UserError as error:
            problems.append(error)
    return newest_first(checkpoints), problems


def newest_first(checkpoints: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    """Return `checkpoints`, the newest first. If two have the same place and number, their names decide."""
    return sorted(checkpoints, key=lambda info: (info.place, info.number, info.path.name), reverse=True)


def _folders(parent: Path) -> list[Path]:
    """Return the folders in `parent` that have the name of a checkpoint, or hold a manifest.

    A folder with control characters in its name is left out.
    """
    try:
        paths = sorted(parent.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _unreadable(parent, error) from None
    named = [path for path in paths if not path.name.endswith(REMOVED) and path.name.isprintable()]
    folders = [path for path in named if os.path.isdir(path)]
    return [path for path in folders if step_of(path.name) is not None or os.path.lexists(path / MANIFEST)]


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
    if type(written) is int and written > SHARDED:
        raise NewerFormat(
            f"{path}: hookdiff {version} wrote it in format {written}, this one reads up to {SHARDED}; update hookdiff"
        )
    if written not in (FORMAT, SHARDED):
        raise UserError(f"{path}: its format is {written}, this hookdiff reads {FORMAT} and {SHARDED}")
    if intact is None:
        raise UserError(f"{path}: {MANIFEST} is damaged: it has no SHA-256 of itself")
    try:
        CheckpointInfo.of(path, manifest)
    except _FOREIGN as error:
        raise _foreign(path, error) from None
    return dict(manifest)


def read_checkpoint(path: Path, share: int = 0, num_shares: int = 1) -> dict[str, Any]:
    """Verify the checkpoint at `path`, and return its state, with tensors on the CPU.

    The values of the tensors are read when they are used, from files mapped into memory; see `Pieces` for sharded
    tensors. When several processes read the checkpoint together, each verifies the digests of its share of the files.

    Raises:
        UserError: for a file that is missing, truncated, changed, or not a safetensors file.
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
            list(pool.map(lambda name: verify(path / name, *files[name]), sorted(files)[share::num_shares]))
        tensors: dict[str | None, dict[str, Tensor]] = {None: {}, **{name: mapped(path / name) for name in files}}
        parts = {name: _state(part, tensors) for name, part in manifest["parts"].items()}
    except _FOREIGN as error:
        raise _foreign(path, error) from None
    plugins = {name.removeprefix(PLUGINS): part for name, part in parts.items() if name.startswith(PLUGINS)}
    others = {name: part for name, part in parts.items() if not name.startswith(PLUGINS)}
    if lacking := [name for name in PARTS if name not in others]:
        raise UserError(f"{path}: {MANIFEST} was not written by hookdiff: it lacks the part {lacking[0]!r}")
    return {"versions": manifest["versions"], **others, "plugins": plugins}


def _state(part: Mapping[str, Any], files: Mapping[str | None, Mapping[str, Tensor]]) -> dict[str, Any]:
    """Return the state of a part of the manifest, with its tensors in `files`."""
    whole, sharded = files[part["file"]], part.get("sharded", {})
    if twice := whole.keys() & sharded.keys():
        raise ValueError(f"{min(twice)} is sharded, and also in {part['file']}")
    return unflatten({**whole, **{name: pieced(name, saved, files) for name, saved in sharded.items()}}, part["values"])


def _foreign(path: Path, error: Exception) -> UserError:
    return UserError(f"{path}: {MANIFEST} was not written by hookdiff: {type(error).__name__}: {error}")


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path.parent}: {path.name} cannot be read: {error.strerror or error}")


def verify(path: Path, bytes: int, sha256: str) -> None:
    """Raise UserError unless the file of a checkpoint has this size and digest."""
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


def mapped(path: Path) -> dict[str, Tensor]:
    """Return the tensors in a safetensors file, mapped into memory. Raises UserError for a file of another kind."""
    try:
        with open_tensors(path) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 no mapping
    except (safetensors.SafetensorError, OSError, RuntimeError, LookupError, ValueError) as error:
        raise UserError(f"{path.parent}: {path.name} is not a safetensors file: {error}") from None
