"""Files that are on the disk whole or not at all, and tensors in them.

A file is written beside its place, synced and renamed, so a process that is killed, or a machine that loses its
power, leaves the old one or the new one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import define
from torch import Tensor

from hookdiff.errors import StorageError, UserError

_CHUNK = 1 << 22  # bytes that are hashed and written in one go, while other threads run

# The names that safetensors has for dtypes: https://github.com/huggingface/safetensors#format
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@define(frozen=True)
class Written:
    """The size and the digest of a written file."""

    bytes: int
    sha256: str


def check_tensors(tensors: Mapping[str, Tensor]) -> None:
    """Raise TypeError, naming the tensor, for one that a safetensors file cannot hold."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES or tensor.layout != torch.strided:
            kind = str(tensor.dtype if tensor.layout == torch.strided else tensor.layout).removeprefix("torch.")
            raise TypeError(f"{name} is a tensor of {kind}, which safetensors files do not hold")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Written:
    """Write `tensors`, which may be anywhere and share memory, to a new safetensors file, and sync it.

    The library would need a second copy of them all in memory, gives the file another mode than the umask says, and
    does not sync. Equal tensors make equal files. Raises TypeError for a tensor that the format does not hold, OSError
    when the disk does not take it.
    """
    check_tensors(tensors)
    # The larger items first, so that each begins at a multiple of its size; then by name.
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
            plain = tensors[name].detach().cpu().contiguous().reshape(-1)
            yield plain.view(torch.uint8).numpy().data

    return _write(path, parts())


def write_file(path: Path, data: bytes) -> Written:
    """Write a new file, and sync it."""
    return _write(path, iter([memoryview(data)]))


def _write(path: Path, parts: Iterator[memoryview]) -> Written:
    digest, size = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        for part in parts:
            for begin in range(0, len(part), _CHUNK):
                chunk = part[begin : begin + _CHUNK]
                digest.update(chunk)
                size += len(chunk)
                while chunk:  # the disk may take a part only, before it says that it is full
                    chunk = chunk[file.write(chunk) :]
        os.fsync(file.fileno())
    return Written(size, digest.hexdigest())


def cannot_write(path: Path, error: OSError) -> UserError:
    """Return what to raise for the `error` met at `path`: StorageError when the disk is full or fails."""
    kind = StorageError if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) else UserError
    return kind(f"{path}: cannot be written: {error.strerror or error}")


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Give a path to write to; the file there has the name `path` once the `with` has ended well."""
    make_folder(path.parent)
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Give an empty folder; it has the name `path`, in place of an earlier one, once the `with` has ended well.

    For an instant neither has the name: the earlier one is `.NAME.replaced` then, the new one `.NAME.partial`.
    """
    partial, replaced = (path.with_name(f".{path.name}.{kind}") for kind in ("partial", "replaced"))
    shutil.rmtree(partial, ignore_errors=True)
    make_folder(path.parent)
    partial.mkdir()
    try:
        yield partial
        sync_folder(partial)
        if path.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            os.replace(path, replaced)
        os.replace(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_folder(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, which may be there; a name that is new is synced like a file's."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable; Windows has no such call and needs none."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
