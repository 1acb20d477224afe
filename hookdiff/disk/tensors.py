"""Safetensors files: equal tensors give equal files, and paths that are not UTF-8 can be read."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from hookdiff.disk.files import Written, write_parts
from hookdiff.disk.reading import open_file
from hookdiff.errors import shown

# Names of dtypes in safetensors files: https://github.com/huggingface/safetensors#format
_DTYPES = {torch.bool: "BOOL", torch.bfloat16: "BF16", torch.complex64: "C64"}
_DTYPES |= {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
_DTYPES |= {getattr(torch, f"float{bits}"): f"F{bits}" for bits in (16, 32, 64)}
_DTYPES |= {getattr(torch, f"int{bits}"): f"I{bits}" for bits in (8, 16, 32, 64)}
_DTYPES |= {getattr(torch, f"uint{bits}"): f"U{bits}" for bits in (8, 16, 32, 64)}


def check_tensors(tensors: Mapping[str, Tensor]) -> None:
    """Raise TypeError with the name of a tensor that a safetensors file cannot hold."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES or tensor.layout != torch.strided:
            kind = str(tensor.dtype if tensor.layout == torch.strided else tensor.layout).removeprefix("torch.")
            raise TypeError(f"{name} is a tensor of {kind}, which no safetensors file can hold; convert it")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Written:
    """Write `tensors`, which may share memory, to a new safetensors file and sync it; equal tensors give equal files.

    The safetensors library would need a second copy of all tensors in memory, ignores the umask, and does not sync.

    Raises:
        TypeError: for a tensor that the format cannot hold.
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

    return write_parts(path, parts())


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file as `safetensors.safe_open` does.

    Raises:
        OSError: if it cannot be opened.
        SafetensorError: if it is damaged.
    """
    with open_file(path) as file:
        name = str(path)
        if shown(name) != name and os.name != "nt":  # the library takes no path that is not UTF-8
            name = f"/dev/fd/{file.fileno()}"
        with safetensors.safe_open(name, framework="pt") as tensors:
            yield tensors
