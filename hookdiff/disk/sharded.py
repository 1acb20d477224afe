"""Weights in one safetensors file, or in several with an index, as other libraries save large weights."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import safetensors
from attrs import frozen
from torch import Tensor

from hookdiff.disk.paths import why_missing
from hookdiff.disk.reading import open_file, read_file
from hookdiff.disk.tensors import open_tensors
from hookdiff.errors import ConfigError, listed

INDEX = ".safetensors.index.json"  # the end of the name of an index
_MOST_SHOWN = 3
_ONE_OF = re.compile(r".+-\d{5}-of-(?!00001)(\d{5})(\.\w+)?\.safetensors")


@frozen
class Weights:
    """The tensors of one safetensors file, or of the files that an index names."""

    path: Path  # of the file, or of the index
    shapes: Mapping[str, tuple[int, ...]]  # by the names of the tensors
    places: Mapping[str, Path]  # the file of each tensor

    @property
    def files(self) -> list[Path]:
        """The files that hold tensors; the index is not among them."""
        return sorted(set(self.places.values())) or [self.path]

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and values of tensors, file by file."""
        wanted = list(names)
        for path in dict.fromkeys(self.places[name] for name in wanted):
            with open_tensors(path) as file:
                for name in wanted:
                    if self.places[name] == path:
                        yield name, file.get_tensor(name)


def read_weights(path: Path, asked_by: str) -> Weights:
    """Read the names and shapes of weights, from nothing but the headers of their files.

    `path` is a safetensors file, an index, or a folder with one index and no `.safetensors` but its own. `asked_by` is
    the key or the option that names `path`.

    Raises:
        ConfigError: for a file that is missing, truncated, or of another format; for an index that names a file outside
            of its folder, or that does not match its files.
    """
    if os.path.isdir(path):  # False for a name that is too long, too
        indices, inside = sorted(path.glob(f"*{INDEX}")), sorted(path.glob("*.safetensors"))
        shards = set(_index(indices[0], asked_by).values()) if len(indices) == 1 else set()
        if len(indices) != 1 or not shards.issuperset(file.name for file in inside):  # an unlisted file may be newer
            names = ", ".join(sorted(file.name for file in (*inside, *indices)))
            raise ConfigError(f"{asked_by}: {path} is a folder; name one file: it has {names or 'no safetensors file'}")
        path = indices[0]
    if path.suffix != ".json":
        shapes = _header(path, asked_by)
        return Weights(path, shapes, dict.fromkeys(shapes, path))
    named = _index(path, asked_by)
    folder, where = path.parent, f"{asked_by}: {path}"
    files = sorted(set(named.values()))
    if missing := [name for name in files if not os.path.lexists(folder / name)]:
        raise ConfigError(
            f"{where} names {len(files)} files; add the {len(missing)} that are missing: {listed(missing, _MOST_SHOWN)}"
        )
    shapes, places = {}, dict[str, Path]()
    for name in files:
        for tensor, shape in _header(folder / name, asked_by).items():
            if tensor in places:
                raise ConfigError(f"{where}: {tensor!r} is in two files, {places[tensor].name} and {name}; keep one")
            if tensor not in named:
                raise ConfigError(f"{where} does not name {tensor!r}, which is in {name}; download both again")
            shapes[tensor], places[tensor] = shape, folder / name
    for tensor, name in named.items():
        if places.get(tensor) != folder / name:
            raise ConfigError(f"{where}: {tensor!r} is not in {name}, which the index names; download both again")
    return Weights(path, shapes, places)


def shards_of(path: Path) -> tuple[int, Path | None]:
    """Return the number of the files among which the weights of `path` are divided, and their index if it exists."""
    for index in sorted(path.parent.glob("*.index*.json")):
        try:
            named = set(_index(index, "").values())
        except ConfigError:  # damaged, so it names none
            continue
        if path.name in named and len(named) > 1:
            return len(named), index
    match = _ONE_OF.fullmatch(path.name)
    return (int(match[1]), None) if match else (1, None)


def _header(path: Path, asked_by: str) -> dict[str, tuple[int, ...]]:
    where = f"{asked_by}: {path}"
    try:
        with open_file(path) as opened:
            start = opened.read(2)
        with open_tensors(path) as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 no mapping
    except FileNotFoundError:
        raise ConfigError(f"{where}: {why_missing(path)}") from None
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror or error}") from None
    except safetensors.SafetensorError as error:
        if start == b"PK" or start[:1] == b"\x80":  # torch.save writes a zip archive, before torch 1.6 a bare pickle
            raise ConfigError(
                f"{where} is a pickle, which may run any code when it is read; load it with "
                "torch.load(..., weights_only=True) and write it with safetensors.torch.save_file"
            ) from None
        raise ConfigError(f"{where}: no safetensors file, or cut short; download it again: {error}") from None


def _index(path: Path, asked_by: str) -> dict[str, str]:
    """Return the names of files by the names of their tensors."""
    where = f"{asked_by}: {path}"
    try:
        content = json.loads(read_file(path))
    except FileNotFoundError:
        raise ConfigError(f"{where}: {why_missing(path)}") from None
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{where} is no JSON; expected an index of safetensors files") from None
    named = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(named, dict) or not named:
        raise ConfigError(f"{where} is no index of safetensors files: it has no `weight_map` with names of tensors")
    for tensor, name in named.items():
        if not isinstance(name, str) or not name.endswith(".safetensors"):
            raise ConfigError(
                f"{where}: {tensor!r} is in {name!r}; expected a safetensors file, because others may run code when "
                "they are read"
            )
        if os.path.isabs(name) or {"..", ""} & set(re.split(r"[/\\:]", name)) or "\0" in name:
            raise ConfigError(f"{where}: {tensor!r} is in {name!r}; expected a file in the folder of the index")
    return dict(named)
