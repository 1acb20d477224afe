"""Saves the state of a run in the folder of a checkpoint. Each rank saves its pieces, and the main rank the rest."""

from __future__ import annotations

import errno
from collections.abc import Collection, Container, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from attrs import asdict, define
from torch import Tensor

from hookdiff import UserError
from hookdiff.disk import (
    Written,
    check_tensors,
    discard,
    flatten,
    new_file,
    new_folder,
    partial_of,
    stamped,
    write_file,
    write_tensors,
)
from hookdiff.machine import BackgroundGroup, is_sharded, local, num_ranks, rank
from hookdiff_checkpoint.folder import FORMAT, MANIFEST, PLUGINS, SHARDED, CheckpointInfo, file_of, mapped, verify
from hookdiff_checkpoint.pieces import PieceLocation, Pieces, Start


@define(frozen=True)
class Part:
    """The share of one rank in a part of the state."""

    tensors: Mapping[str, Tensor]  # tensors that are not in pieces; only on the main rank
    values: Mapping[str, Any]
    pieces: Mapping[str, Tensor]  # pieces that this rank writes
    places: Mapping[str, PieceLocation]  # of all tensors in pieces

    @property
    def bytes(self) -> int:
        """The bytes that the tensors take on the disk; pieces that are put together lie there twice for a while."""
        twice = [piece for name, piece in self.pieces.items() if self.places[name].is_whole]
        return sum(tensor.nbytes for tensor in (*self.tensors.values(), *self.pieces.values(), *twice))


Parts = Mapping[str, Part]


def split(state: Mapping[str, Any]) -> dict[str, Part]:
    """Return this rank's share of the state of a loop, by part. Tensors are not copied; all other values are.

    If tensors of a plugin have keys of the model, as an average of the weights has, they are written whole to a file
    with only these keys, so that other programs can load it. All other sharded tensors stay in pieces. Raises UserError
    for a value that no file can hold.
    """
    parts = {name: content for name, content in state.items() if name != "plugins"}
    parts |= {f"{PLUGINS}{name}": content for name, content in state["plugins"].items()}
    flat = {}
    for name, content in parts.items():
        try:
            tensors, values = flatten(content, name)
            check_tensors({f"{name}/{key}": tensor for key, tensor in tensors.items()})
        except TypeError as error:
            raise UserError(f"this run cannot be saved: {error}") from None
        flat[name] = tensors, values
    keys = flat["model"][0].keys()
    return {name: _part(*content, keys if name.startswith(PLUGINS) else ()) for name, content in flat.items()}


def _part(tensors: Mapping[str, Tensor], values: Mapping[str, Any], whole: Container[str]) -> Part:
    is_main = rank() == 0
    sharded = [name for name, tensor in tensors.items() if is_sharded(tensor) and num_ranks() > 1]
    # A file with the name of the part is for other programs. If it has keys of the model, it has no other keys. Buffers
    # alone get no such file: other programs would take it for the model.
    in_pieces: Collection[str] = tensors if sharded else ()
    if any(name in whole for name in tensors):
        in_pieces = [name for name in tensors if name in sharded or name not in whole]
    try:
        places = {name: PieceLocation.of(tensors[name], name in whole) for name in in_pieces}
    except UserError as error:
        raise UserError(f"this run cannot be saved: {error}") from None
    pieces = {name: local(tensors[name]) for name, place in places.items() if place.is_mine}
    others = {name: local(tensor) for name, tensor in tensors.items() if name not in places}
    return Part(others if is_main else {}, values, pieces, places)


@define(frozen=True)
class PieceFile:
    """A file of pieces that a rank has written."""

    part: str
    name: str
    written: Written
    starts: Mapping[str, Start]  # by name of the tensor
    is_kept: bool  # False: the main rank puts the pieces together in the file of the part

    def pieces(self, folder: Path) -> dict[str, Tensor]:
        """Return the verified pieces, by name of the tensor; they are mapped into memory."""
        verify(folder / self.name, self.written.bytes, self.written.sha256)
        return mapped(folder / self.name)


def write_checkpoint(path: Path, parts: Parts, facts: Mapping[str, Any], aside: BackgroundGroup) -> CheckpointInfo:
    """Write the folder `path`, which appears completely or not at all. All ranks call this; they agree through `aside`.

    The manifest has the numbers, strings and `facts` of the main rank. An error on one rank is raised on all ranks.
    """
    is_main, folder = rank() == 0, partial_of(path)
    with ExitStack() as made:
        aside.gathered_or_raised(lambda: made.enter_context(new_folder(path)) if is_main else None)
        of_ranks = aside.gathered_or_raised(lambda: _write_pieces(folder, parts))
        files = [file for of_rank in of_ranks for file in of_rank]

        def complete() -> CheckpointInfo | None:
            if not is_main:
                return None
            manifest = _write_rest(folder, parts, facts, files)
            made.close()  # gives the folder its name
            return CheckpointInfo.of(path, manifest)

        info = aside.gathered_or_raised(complete)[0]
    assert info
    return info


def _write_pieces(folder: Path, parts: Parts) -> list[PieceFile]:
    if any(part.pieces for part in parts.values()) and not folder.is_dir():
        what = f"rank {rank()} does not see the files of the first rank; all ranks must share the disk"
        raise OSError(errno.EIO, what)
    files, of_rank = [], f"{rank() + 1:05d}-of-{num_ranks():05d}"
    for name, part in parts.items():
        for is_kept in (True, False):
            pieces = {key: piece for key, piece in part.pieces.items() if part.places[key].is_whole != is_kept}
            if pieces:
                file = "." * (not is_kept) + file_of(name, of_rank)
                written = write_tensors(folder / file, pieces)
                starts = {key: part.places[key].start for key in pieces}
                files.append(PieceFile(name, file, written, starts, is_kept))
    return files


def _write_rest(folder: Path, parts: Parts, facts: Mapping[str, Any], files: Sequence[PieceFile]) -> dict[str, Any]:
    """Write the values and the whole tensors, and then the manifest, which is returned."""
    manifest: dict[str, Any] = {"format": FORMAT, **facts, "files": {}, "parts": {}}
    manifest["files"] = {file.name: asdict(file.written) for file in files if file.is_kept}
    for name, part in parts.items():
        of_part = [file for file in files if file.part == name]
        tensors = {**part.tensors, **_put_together(folder, part.places, [file for file in of_part if not file.is_kept])}
        whole = file_of(name) if tensors else None
        if whole:
            manifest["files"][whole] = asdict(write_tensors(folder / whole, tensors))
        manifest["parts"][name] = {"file": whole, "values": part.values}
        sharded = {
            key: place.manifest({file.name: file.starts[key] for file in of_part if key in file.starts})
            for key, place in part.places.items()
            if not place.is_whole
        }
        if sharded:
            manifest["format"], manifest["parts"][name]["sharded"] = SHARDED, sharded
    for file in files:
        if not file.is_kept:
            discard(folder / file.name)
    with new_file(folder / MANIFEST) as unnamed:  # a manifest that exists is complete
        write_file(unnamed, stamped(manifest))
    return manifest


def _put_together(folder: Path, places: Mapping[str, PieceLocation], files: Sequence[PieceFile]) -> dict[str, Tensor]:
    """Return the tensors that are written whole. Each takes memory only while it is written."""
    opened = [(file.starts, file.pieces(folder)) for file in files]
    return {
        name: Pieces(
            place.shape, place.dtype, {starts[name]: pieces[name] for starts, pieces in opened if name in starts}
        )
        for name, place in places.items()
        if place.is_whole
    }
