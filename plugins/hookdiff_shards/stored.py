"""Files with arrays that are made once from a shard, and with the state of the shard at that time."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from hookdiff.disk import new_file, open_tensors, write_tensors
from hookdiff_shards.files import Shard

Arrays = Mapping[str, Any]  # numpy arrays by name


def state_of(shard: Shard, **more: Any) -> dict[str, Any]:
    """Return the metadata that must be equal before a stored file is used: the state of the shard, and `more`."""
    return {"shard": shard.place, "size": shard.size, "mark": shard.mark, **more}


def save_arrays(path: Path, about: Mapping[str, Any], arrays: Arrays) -> None:
    """Write `arrays` and their metadata `about`. Raises OSError."""
    text, stored = json.dumps(about), {name: _tensor(values) for name, values in arrays.items()}
    with new_file(path) as partial:
        write_tensors(partial, stored, {"about": text, "sha256": _digest(text, arrays)})


def _tensor(values: Any) -> Tensor:
    # An empty numpy array may have a stride of 0, and then its bytes cannot be viewed.
    tensor = torch.tensor(values)
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def load_arrays(path: Path, wanted: Mapping[str, Any]) -> tuple[Any, Arrays] | None:
    """Return the metadata and the arrays in a file; None if the metadata differs from `wanted`.

    The digest finds damage, but no forgery: a forger can write the digest too. Raises OSError, ValueError and errors of
    other types for a file that is missing or damaged.
    """
    with open_tensors(path) as file:
        metadata = file.metadata()
        about = json.loads(metadata["about"])
        if any(about[key] != value for key, value in wanted.items()):
            return None
        arrays = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118
    if metadata["sha256"] != _digest(metadata["about"], arrays):
        raise ValueError("it has another digest")
    return about, arrays


def _digest(about: str, arrays: Arrays) -> str:
    digest = hashlib.sha256(about.encode())
    for name in sorted(arrays):
        digest.update(arrays[name].tobytes())
    return digest.hexdigest()


def are_ends(ends: Any, total: int) -> bool:
    """Return whether `ends` are the ends of consecutive parts of a sequence of `total` items."""
    last = int(ends[-1]) if len(ends) else 0
    return last == total and bool((numpy.diff(ends, prepend=0) >= 0).all())
