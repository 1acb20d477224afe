"""A checkpoint on disk: a folder of safetensors files and the manifest that vouches for them.

There is no pickle anywhere. A folder has its final name only when everything in it is on the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from hookdiff import UserError, flatten, unflatten

FORMAT = 1
MANIFEST = "manifest.json"


def write_checkpoint(state: Mapping[str, Any], path: Path) -> None:
    """Write `state`, as the loop gives it, to the folder `path`, which appears whole or not at all.

    Each part with tensors is a file of its own, each plugin is a part: `model.safetensors` and `ema.safetensors`
    have the model's own keys. Numbers and strings are in the manifest.
    """
    parts = {
        **{k: v for k, v in state.items() if k != "plugins"},
        **{f"plugins/{k}": v for k, v in state["plugins"].items()},
    }
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "versions": {name: version(name) for name in ("hookdiff", "torch", "safetensors")},
        "parts": {},
        "files": {},
    }
    for part, content in parts.items():
        tensors, rest = flatten(content, part)
        manifest["parts"][part] = {"values": rest, "file": None}
        if tensors:
            name = f"{quote(part.removeprefix('plugins/'), safe='')}.safetensors"
            data = safetensors.torch.save(_storable(tensors), {"format": "pt"})
            _write(partial / name, data)
            manifest["parts"][part]["file"] = name
            manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    _write(partial / MANIFEST, json.dumps(manifest, indent=1).encode())
    _sync_folder(partial)
    replaced = path.with_name(f".{path.name}.replaced")
    if path.exists():
        os.replace(path, replaced)
    os.replace(partial, path)
    _sync_folder(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the state in the folder `path`, tensors on the CPU.

    Raises UserError when a file is missing, cut short, changed, or written by a later hookdiff.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        if manifest["format"] != FORMAT:
            raise UserError(f"{path}: its format is {manifest['format']}; this hookdiff reads {FORMAT}")
        state: dict[str, Any] = {"plugins": {}}
        for part, entry in manifest["parts"].items():
            tensors = _read_tensors(path, entry["file"], manifest["files"]) if entry["file"] else {}
            content = unflatten(tensors, entry["values"])
            if part.startswith("plugins/"):
                state["plugins"][part.removeprefix("plugins/")] = content
            else:
                state[part] = content
    except OSError as error:
        raise UserError(f"{path}: {error.filename or 'a file'} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: {MANIFEST} is damaged: {error!r}") from None
    return state


def _read_tensors(path: Path, name: str, files: Mapping[str, Any]) -> dict[str, Tensor]:
    if Path(name).name != name:
        raise UserError(f"{path}: {MANIFEST} names a file outside of the checkpoint: {name!r}")
    data = (path / name).read_bytes()
    if len(data) != files[name]["bytes"]:
        raise UserError(f"{path}: {name} has {len(data):,} bytes, {files[name]['bytes']:,} were written")
    if hashlib.sha256(data).hexdigest() != files[name]["sha256"]:
        raise UserError(f"{path}: {name} is not what was written: its SHA-256 differs")
    try:
        return safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise UserError(f"{path}: {name} is no safetensors file: {error}") from None


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Bring tensors to the CPU, contiguous, none sharing memory with another: safetensors takes no others."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        stored = tensor.detach().cpu().contiguous()
        address = stored.untyped_storage().data_ptr()
        if address in seen:
            stored = stored.clone(memory_format=torch.contiguous_format)
        seen.add(address)
        result[name] = stored
    return result


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Make the names in a folder durable; Windows has no such call and needs none."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
