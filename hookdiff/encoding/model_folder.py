"""Model folders of diffusers and transformers. The libraries see only the files that are part of the digest."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hookdiff.disk.reading import read_file
from hookdiff.disk.sharded import INDEX, Weights, read_weights
from hookdiff.encoding.digests import digest_of
from hookdiff.encoding.encoder_folder import why_no_folder
from hookdiff.errors import UserError, listed
from hookdiff.machine.network import no_connections

_ASKED_BY = "data.encode"
_WEIGHTS = ("*.safetensors", "*.safetensors.index*.json")
_PICKLES = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt")
_ADAPTER = "adapter_config.json"  # names base weights elsewhere, to which those of the folder would be added
_CODE = {  # keys of a config, at any depth, and why they are refused
    "auto_map": "names code of its own",
    "quantization_config": "is of quantized weights",
}
# Keys that name files elsewhere, or code for a layer, such as a kernel of a hub.
_ELSEWHERE = re.compile(
    r"(.*_)?(files?|paths?|dir|object|kwargs|weights|vocab|merges|spm|dic|kernels?|implementation(_internal)?)"
    r"|init_inputs|kernel_config|mecab_option|emoji"
)
_SHARD = re.compile(r".+-\d{5}-of-\d{5}(\.\w+)?\.safetensors")
_MOST_SHOWN, _SHOWN = 3, 60  # files or tensors, and characters of a value, in a message

Seen = Mapping[str, "Path | Mapping[str, Any]"]  # by name in the folder of a library: a file, or a table to write


class NoFolder(UserError):
    """There is no folder at the path of an encoder."""


def file_in(folder: Path, name: str, asked_by: str = _ASKED_BY) -> Path | None:
    """Return the path of the file `name`; None if there is none.

    Raises:
        UserError: if something else has the name, such as a pipe or a folder.
    """
    path = folder / name
    try:
        kind = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            raise UserError(f"{asked_by}: {path} is a link that leads nowhere") from None
        return None
    except OSError as error:
        raise UserError(f"{asked_by}: {path}: cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(kind):
        what = "a folder" if stat.S_ISDIR(kind) else "a pipe, a socket or a device"
        raise UserError(f"{asked_by}: {path} is {what}, expected a file")
    return path


def files_in(folder: Path, names: Iterable[str]) -> dict[str, Path]:
    """Return the files that exist among `names`, by name.

    Raises:
        UserError: if something else has such a name, as for `file_in`.
    """
    return {name: path for name in dict.fromkeys(names) if (path := file_in(folder, name))}


def table_in(
    folder: Path,
    name: str,
    what: str,
    fits: Callable[[Mapping[str, Any]], bool] = lambda _: True,
    asked_by: str = _ASKED_BY,
) -> dict[str, Any]:
    """Read the JSON file `name` of `folder`, which holds `what`, in words. Errors name folders nearby that fit.

    `asked_by` is the key that names the folder.

    Raises:
        UserError: if the file is missing or holds no table, or if it asks for code or quantized weights.
    """
    is_folder = folder.is_dir()
    if (path := file_in(folder, name, asked_by) if is_folder else None) is None:
        kind = UserError if is_folder else NoFolder
        raise kind(f"{asked_by}: {why_no_folder(str(folder), name, what, fits)}")
    try:
        table = json.loads(read_file(path))
    except OSError as error:
        raise UserError(f"{asked_by}: {path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, dict):
        raise UserError(f"{asked_by}: {path} is no table in JSON")
    for key, value in _nested(table):
        if key in _CODE:
            raise UserError(f"{asked_by}: {path} {_CODE[key]}, {key} = {str(value)[:_SHOWN]}, which is not used")
    return table


def _nested(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield all keys of nested tables, with their values unless these are None."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        if inner is not None:
            yield key, inner
        yield from _nested(inner)
    for inner in value if isinstance(value, list) else ():
        yield from _nested(inner)


def without_places(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without the keys, at any depth, that name files or code elsewhere."""
    inner = {key: value for key, value in table.items() if not _ELSEWHERE.fullmatch(key)}
    return {key: without_places(value) if isinstance(value, dict) else value for key, value in inner.items()}


def weights_in(folder: Path, usual: Sequence[str], asked_by: str = _ASKED_BY) -> Weights:
    """Find the weights in a folder: the first file of `usual` that exists, or else the only file of weights.

    An index counts as one file: it stands for the files that it names.

    Raises:
        UserError: for weights that are not in safetensors, damaged, missing, or ambiguous.
    """
    if os.path.lexists(folder / _ADAPTER):
        raise UserError(
            f"{asked_by}: {folder} has an {_ADAPTER}, so its weights are an adapter; merge it into its network"
        )
    there = sorted(path.name for pattern in _WEIGHTS for path in folder.glob(pattern))
    named = next((name for name in usual if name in there), None)
    if named is None:
        indices = [name for name in there if name.endswith(".json")]
        wholes = indices or [name for name in there if not _SHARD.fullmatch(name)]
        if len(wholes) > 1:
            expected = " or ".join(usual)
            raise UserError(f"{asked_by}: {folder} has {listed(wholes, _MOST_SHOWN)}; expected one, or {expected}")
        if not wholes and there:
            raise UserError(f"{asked_by}: {folder} has {listed(there, _MOST_SHOWN)}, and no index of them (*{INDEX})")
        if not wholes:
            pickled = [path.name for pattern in _PICKLES for path in folder.glob(pattern)]
            way_out = f"; {pickled[0]} is a pickle, which may run code: save it as safetensors" if pickled else ""
            raise UserError(f"{asked_by}: {folder} has no weights in safetensors{way_out}")
        named = wholes[0]
    file_in(folder, named, asked_by)
    return read_weights(folder / named, asked_by)


def usual_files(weights: Weights, usual: str) -> dict[str, Path]:
    """Return the files of `weights` by the names under which a library opens them; `usual` is that of a single file."""
    if weights.path in weights.files:
        return {usual: weights.path}
    index = usual.removesuffix(".safetensors") + INDEX
    return {index: weights.path, **{path.name: path for path in weights.files}}


def digest_seen(weights: Iterable[Weights], others: Iterable[Path], *texts: str, asked_by: str = _ASKED_BY) -> str:
    """Return a hash, as `digest_of` does, of the files of weights with their indices, of `others` and of `texts`.

    Raises:
        UserError: for a file that cannot be read.
    """
    files = [path for each in weights for path in dict.fromkeys([each.path, *each.files])]
    try:
        return digest_of([*files, *others], *texts)
    except OSError as error:
        raise UserError(f"{asked_by}: {error.filename}: cannot be read: {error.strerror}") from None


def load_network(
    kind: Any, folder: Path, config: Mapping[str, Any], weights: Weights, usual: str, **options: Any
) -> Any:
    """Load the network of a class of diffusers or transformers with `config`, from `weights` alone.

    `usual` is the name of a file of weights that the class opens.

    Raises:
        UserError: if the network cannot be loaded, or if weights are missing, which a library would draw at random.
    """
    seen: dict[str, Path | Mapping[str, Any]] = {"config.json": without_places(config)}
    if weights.path in weights.files:
        seen[usual] = weights.path
    else:
        stem, num = usual.removesuffix(".safetensors"), len(weights.files)
        names = {path: f"{stem}-{k:05}-of-{num:05}.safetensors" for k, path in enumerate(weights.files, 1)}
        seen |= {name: path for path, name in names.items()}
        size = sum(path.stat().st_size for path in weights.files)
        placed = {tensor: names[path] for tensor, path in weights.places.items()}
        seen[stem + INDEX] = {"metadata": {"total_size": size}, "weight_map": placed}
    network, report = load_seen(kind, folder, seen, use_safetensors=True, output_loading_info=True, **options)
    if missing := sorted(report["missing_keys"]):
        raise UserError(
            f"{_ASKED_BY}: {weights.path} lacks {len(missing)} tensors of a {kind.__name__}: "
            f"{listed(missing, _MOST_SHOWN)}"
        )
    return network


def load_seen(kind: Any, folder: Path, seen: Seen, **options: Any) -> Any:
    """Return the result of `kind.from_pretrained` for a folder with only the files and tables `seen`.

    Raises:
        UserError: if loading fails; the message names `folder`.
    """
    what, reason = f"{folder} cannot be loaded", f"{folder} has all that is read"
    with refused_as(what), TemporaryDirectory(prefix="hookdiff-") as place, refused_as(what, {place: str(folder)}):
        for name, content in seen.items():
            if isinstance(content, Path):
                _link(content, Path(place, name))
            else:
                Path(place, name).write_text(json.dumps(content))
        with no_connections(reason):
            return kind.from_pretrained(place, local_files_only=True, **options)


def _link(file: Path, name: Path) -> None:
    try:
        name.symlink_to(file.resolve())
    except OSError:  # on Windows a symbolic link needs a privilege, so copy the file
        shutil.copyfile(file, name)


@contextmanager
def refused_as(what: str, other_names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Turn any error of a library in the `with` into a UserError that begins with `what`.

    Panics of a library in Rust are included. `other_names` replace paths in the message.
    """
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        for path, name in (other_names or {}).items():
            reason = reason.replace(path, name)
        raise UserError(f"{_ASKED_BY}: {what}: {reason}") from error
