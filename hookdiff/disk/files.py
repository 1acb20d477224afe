"""Files and folders that are written whole or not at all, even if the process is killed or the power fails.

A file is written under another name, synced and renamed.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from attrs import define
from torch import Tensor

from hookdiff.disk.lock import check_place
from hookdiff.errors import StorageError, UserError

_CHUNK = 1 << 22  # bytes that are hashed and written at a time; other threads run meanwhile

# Names of dtypes in safetensors files: https://github.com/huggingface/safetensors#format
_DTYPES = {torch.bool: "BOOL", torch.bfloat16: "BF16", torch.complex64: "C64"}
_DTYPES |= {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
_DTYPES |= {getattr(torch, f"float{bits}"): f"F{bits}" for bits in (16, 32, 64)}
_DTYPES |= {getattr(torch, f"int{bits}"): f"I{bits}" for bits in (8, 16, 32, 64)}
_DTYPES |= {getattr(torch, f"uint{bits}"): f"U{bits}" for bits in (8, 16, 32, 64)}


@define(frozen=True)
class Written:
    """Size and hash of a written file."""

    bytes: int
    sha256: str


def check_tensors(tensors: Mapping[str, Tensor]) -> None:
    """Raise TypeError with the name of a tensor that a safetensors file cannot hold."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES or tensor.layout != torch.strided:
            kind = str(tensor.dtype if tensor.layout == torch.strided else tensor.layout).removeprefix("torch.")
            raise TypeError(f"{name} is a tensor of {kind}, which safetensors files do not hold")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Written:
    """Write `tensors`, which may share memory, to a new safetensors file and sync it; equal tensors give equal files.

    Raises TypeError for a tensor that the format cannot hold. The safetensors library would need a second copy of all
    tensors in memory, ignores the umask, and does not sync.
    """
    check_tensors(tensors)
    # Larger items come first, so that each tensor begins at a multiple of its item size.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.dtype.itemsize
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def parts() -> Iterator[memoryview]:
        yield memoryview(len(text).to_bytes(8, "little") + text)
        for name in names:
            values = tensors[name].detach().cpu().contiguous().reshape(-1)
            yield values.view(torch.uint8).numpy().data

    return _write(path, parts())


def write_file(path: Path, data: bytes) -> Written:
    """Write `data` to a new file and sync it."""
    return _write(path, iter([memoryview(data)]))


def _write(path: Path, parts: Iterator[memoryview]) -> Written:
    check_place(path.parent)
    digest, size = hashlib.sha256(), 0
    with path.open("xb", buffering=0) as file:  # never through a link or into a pipe that has the name
        for part in parts:
            for begin in range(0, len(part), _CHUNK):
                chunk = part[begin : begin + _CHUNK]
                digest.update(chunk)
                size += len(chunk)
                while chunk:  # a disk that is almost full may take only a part of the chunk
                    chunk = chunk[file.write(chunk) :]
        os.fsync(file.fileno())
    return Written(size, digest.hexdigest())


def cannot_write(path: Path, error: OSError) -> UserError:
    """Return the error to raise for an OSError at `path`.

    It is a StorageError when the disk is full or fails, or when the run directory went away after it was checked.
    """
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        try:
            check_place(path)
        except StorageError as gone:
            return gone
        except OSError:  # a link leads out of the directory, which is still there
            pass
    kind = StorageError if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) else UserError
    return kind(f"{path}: cannot be written: {error.strerror or error}")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError in the `with` into the error that `cannot_write` returns."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error) from None


def partial_of(path: Path) -> Path:
    """Return the path at which `new_file` and `new_folder` make what becomes `path`."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a free, temporary path; the file there is renamed to `path` when the `with` ends without an error."""
    make_folder(path.parent)
    partial = partial_of(path)
    discard(partial)
    try:
        yield partial
        check_place(path.parent)
        os.replace(partial, path)
    finally:
        discard(partial)
    sync_folder(path.parent)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a new, empty folder; it is renamed to `path` when the `with` ends without an error.

    It replaces an earlier folder. For an instant no folder has the name: the earlier one is called `.NAME.replaced`,
    the new one `.NAME.partial`.
    """
    partial, replaced = partial_of(path), path.with_name(f".{path.name}.replaced")
    make_folder(path.parent)
    discard(partial)
    partial.mkdir()
    try:
        yield partial
        sync_folder(partial)
        check_place(path.parent)
        if os.path.lexists(path):
            discard(replaced)
            os.replace(path, replaced)
        os.replace(partial, path)
    finally:
        discard(partial)
    sync_folder(path.parent)
    discard(replaced)


def discard(path: Path) -> None:
    """Remove a file, a link, or a folder with its content, as far as possible; raises no error."""
    with suppress(OSError, StorageError):
        check_place(path.parent)
        if path.is_dir() and not path.is_symlink():  # rmtree would open a pipe, and wait for ever
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def make_folder(path: Path) -> None:
    """Make a folder and its parents, unless they exist, and sync the new names."""
    check_place(path)
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Sync the names in a folder to the disk."""
    if os.name != "nt":  # Windows has no such call and needs none
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
