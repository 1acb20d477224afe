"""Tables that are filled in chunks. An interrupted table is continued later, and its files end the same."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from hookdiff.data.table import FORMAT, Column, check_room, column_file, finish_table, is_in_use
from hookdiff.disk.files import discard, make_folder, sync_folder, write_file, writing
from hookdiff.disk.reading import open_file, read_file
from hookdiff.machine.ranks import first_rank_does, gathered_or_raised, num_ranks, rank
from hookdiff.terminal.pace import paced

logger = logging.getLogger("hookdiff")

_JOURNAL = "chunks.jsonl"  # the work, and then the number, checksum and facts of each written chunk

# Takes numbers of chunks. Yields each number, the rows of its chunk by column, and facts about it, as values for JSON.
MakeChunks = Callable[[Sequence[int]], Iterator[tuple[int, Mapping[str, Tensor], Any]]]


def make_in_chunks(
    path: Path,
    columns: Mapping[str, Column],
    chunks: Sequence[Tensor],
    of: str,
    origin: str,
    make: MakeChunks,
    facts: Callable[[list[Any]], Any],
) -> None:
    """Write the table `path`. All ranks make it together, so all must call this.

    Chunks that an interrupted process has left are checked and kept, whatever its number of ranks.

    Args:
        path: the table; the caller holds its lock.
        columns: its columns.
        chunks: the rows of each chunk: n, int64, ascending. All other rows are zeros.
        of: the work, in words for messages.
        origin: the source of the work, in words. Unfinished tables of the same work and origin for other data or
            another encoder are removed.
        make: makes chunks.
        facts: returns the facts of the table, given the facts of its chunks in order; the first rank calls it.

    Raises:
        UserError: if the disk fails, or has no room for the table.
    """
    table = UnfinishedTable(path, columns, chunks, of, origin)
    there = first_rank_does(table.begin)
    with table.closed() if rank() == 0 else nullcontext():
        filled = make([number for number in range(len(chunks)) if number not in there][rank() :: num_ranks()])
        rounds = -(-(len(chunks) - len(there)) // num_ranks())
        with closing(paced(range(rounds), rounds, f"data: {of}", "chunks", size=lambda _: 1)) as shown:
            for _ in shown:
                group = [*filter(None, gathered_or_raised(lambda: next(filled, None)))]
                first_rank_does(lambda group=group: table.add(group))  # type: ignore[misc]
        first_rank_does(lambda: table.finish(facts))


@define(eq=False)
class UnfinishedTable:
    """The unfinished table of `path`: files of the columns, and a journal of the written chunks."""

    path: Path
    columns: Mapping[str, Column]
    chunks: Sequence[Tensor]
    of: str
    origin: str
    _there: dict[int, tuple[int, Any]] = field(factory=dict, init=False)  # checksum and facts, by chunk
    _files: dict[str, Any] = field(factory=dict, init=False)  # of the columns by their names, and the journal

    @property
    def folder(self) -> Path:
        """The folder of the unfinished table."""
        return self.path.with_name(f".{self.path.name}.rest")

    def begin(self) -> set[int]:
        """Open the files, and return the numbers of the chunks that they already hold.

        Raises:
            UserError: if the disk has no room for the other chunks.
        """
        with writing(self.folder):
            self._remove_stale()
            head = json.dumps([self.of, self.origin, self._key()])
            lines = _lines(self.folder)
            if lines[:1] != [head]:
                discard(self.folder)
            check_room(self.path, self.columns, _allocated(self.folder))
            make_folder(self.folder)
            for name, column in self.columns.items():
                place = self.folder / column_file(name)
                self._files[name] = open_file(place, "r+b" if place.exists() else "x+b")
                self._files[name].truncate(column.num_bytes)
            for line in lines[1:] if lines[:1] == [head] else ():
                self._take(line)
            discard(self.folder / _JOURNAL)  # its last line may be incomplete
            known = (json.dumps([number, *entry]) for number, entry in self._there.items())
            write_file(self.folder / _JOURNAL, "".join(f"{line}\n" for line in (head, *known)).encode())
            self._files[_JOURNAL] = open_file(self.folder / _JOURNAL, "ab")
        if self._there:
            num = sum(len(self.chunks[number]) for number in self._there)
            logger.info("data: %s: goes on from an earlier run: %s", self.of, self._count(num))
        return set(self._there)

    def add(self, group: Sequence[tuple[int, Mapping[str, Tensor], Any]]) -> None:
        """Write the rows of a group of chunks, and add the chunks to the journal."""
        with writing(self.folder):
            for number, values, facts in group:
                checksum = 0
                for name in self.columns:
                    content = values[name].contiguous().numpy().tobytes()
                    checksum, at = zlib.crc32(content, checksum), 0
                    for start, size in self._places(name, number):
                        self._files[name].seek(start)
                        _write(self._files[name], content[at : at + size])
                        at += size
                self._there[number] = checksum, facts
                _write(self._files[_JOURNAL], f"{json.dumps([number, checksum, facts])}\n".encode())

    def finish(self, facts: Callable[[list[Any]], Any]) -> None:
        """Turn the files, which have all chunks, into the finished table."""
        with writing(self.folder):
            for file in self._files.values():
                os.fsync(file.fileno())
            finish_table(self.folder, self.columns, facts([self._there[number][1] for number in sorted(self._there)]))
            sync_folder(self.folder)
            discard(self.path)
            os.replace(self.folder, self.path)
            discard(self.path / _JOURNAL)
            sync_folder(self.path.parent)

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Close the files at the end of the `with`; log the progress after an error or an interrupt."""
        try:
            yield
        except BaseException:
            if num := sum(len(self.chunks[number]) for number in self._there):
                logger.warning("data: %s: %s, kept; the next start goes on from there", self.of, self._count(num))
            raise
        finally:
            for file in self._files.values():
                file.close()

    def _count(self, num: int) -> str:
        return f"{num:,} of {sum(map(len, self.chunks)):,} encoded"

    def _key(self) -> str:
        """Return a hash of the columns and the chunks of the table."""
        rows = hashlib.sha256(torch.cat(tuple(self.chunks)).numpy().tobytes()) if self.chunks else hashlib.sha256()
        columns = sorted((name, column.dtype, column.shape) for name, column in self.columns.items())
        sizes = {len(chunk) for chunk in self.chunks}
        return hashlib.sha256(repr((FORMAT, columns, sorted(sizes), rows.hexdigest())).encode()).hexdigest()

    def _take(self, line: str) -> None:
        """Count the chunk in a `line` of the journal as made if its rows have the checksum."""
        try:
            number, checksum, facts = json.loads(line)
            written = 0
            for name in self.columns:
                for start, size in self._places(name, number):
                    self._files[name].seek(start)
                    written = zlib.crc32(self._files[name].read(size), written)
        except (ValueError, TypeError, LookupError):  # an incomplete line
            return
        if written == checksum:
            self._there[number] = checksum, facts

    def _places(self, name: str, number: int) -> Iterator[tuple[int, int]]:
        """Yield the start and the size in bytes of each part of a chunk in the file of a column."""
        rows, column = self.chunks[number], self.columns[name]
        width = column.num_bytes // column.shape[0]
        for part in torch.tensor_split(rows, (rows.diff() != 1).nonzero().flatten() + 1):
            yield int(part[0]) * width, len(part) * width

    def _remove_stale(self) -> None:
        """Remove unfinished tables of the same work on other data or by another encoder, unless they are in use."""
        begins = f"[{json.dumps(self.of)}, {json.dumps(self.origin)}, "
        for folder in self.path.parent.parent.glob("*/.*.rest"):
            if folder == self.folder or not (lines := _lines(folder)) or not lines[0].startswith(begins):
                continue
            table = folder.with_name(folder.name.removeprefix(".").removesuffix(".rest"))
            locks = {table, table.parent} - {self.path.parent}  # this process holds its own lock
            if not any(map(is_in_use, locks)):
                text = "data: %s: removes a table in %s that was begun with other data or another encoder"
                logger.info(text, self.of, table.parent)
                discard(folder)


def _lines(folder: Path) -> list[str]:
    try:
        return read_file(folder / _JOURNAL).decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return []


def _allocated(folder: Path) -> int:
    """Return the bytes on disk of the files of a folder. Rows that are not written take no space."""
    if os.name == "nt" or not folder.is_dir():
        return 0
    return sum(os.stat(file).st_blocks * 512 for file in folder.iterdir())


def _write(file: Any, content: bytes) -> None:
    while content:  # a disk that is almost full may take only a part of it
        content = content[file.write(content) :]
