"""The conditions of texts: a row for each text, encoded once by all ranks and kept in files."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import cattrs
import torch
from attrs import define, field
from torch import Tensor

from hookdiff.data.rest import make_in_chunks
from hookdiff.data.table import FORMAT, Column, load_if_sound, locked, read_table
from hookdiff.disk.files import make_folder
from hookdiff.encoding.digests import digest_of
from hookdiff.encoding.encoder import STORED, TextEncoder, TextNetwork
from hookdiff.encoding.encoder_output import EncoderOutput
from hookdiff.encoding.soundness import AT_ONCE, TextSoundness, few_of, report_texts
from hookdiff.encoding.time_ids import of_prompt
from hookdiff.encoding.tokens import TokenFacts, of_same_tokens
from hookdiff.errors import UserError, listed, nearest
from hookdiff.images.store import Store
from hookdiff.images.texts import check_text
from hookdiff.machine.ranks import agree, first_rank_does, gathered_or_raised, rank
from hookdiff.options.structure import structured
from hookdiff.terminal.words import byte_size

logger = logging.getLogger("hookdiff")

_CHUNK = 64  # texts that are encoded together
_SHOWN = 60  # characters of a text in a message

_Rows = Mapping[str, Tensor]  # by the name of a condition, a row for each text


@define(eq=False)
class TextTable:
    """The rows of a text encoder, one for each text. A text is encoded at its first use, and its row kept in a file."""

    name: str  # of the encoder
    encoder: TextEncoder
    store: Store
    device: torch.device
    network: TextNetwork | None = field(default=None, init=False)
    returned: EncoderOutput = field(init=False)
    holds_network: bool = field(default=False, init=False)  # keep the network in memory, as more texts will follow
    _tried: _Rows | None = field(default=None, init=False)  # the rows of the first texts
    _parts: list[_Rows] = field(factory=list, init=False)
    _places: dict[str, tuple[int, int]] = field(factory=dict, init=False)  # part and row, by the digest of a text
    _soundness: list[tuple[TextSoundness, Sequence[str]]] = field(factory=list, init=False)  # and digests of the texts
    _facts: list[_Facts] = field(factory=list, init=False)  # facts of each part
    _reported: set[str] = field(factory=set, init=False)  # the prompts that have been looked at

    def __attrs_post_init__(self) -> None:
        self.returned = EncoderOutput(self.where, self.encoder)

    @property
    def where(self) -> str:
        """The key of the encoder, for messages."""
        return f"data.encode.{self.name}"

    @property
    def is_kept(self) -> bool:
        """Whether rows are kept; else a text is encoded each time."""
        return self.encoder.stored(self.store).store != "none"

    def known(self, texts: Iterable[str]) -> bool:
        """Return whether all `texts`, and the empty text, have rows or need no rows. All ranks must call this."""
        return not (self.is_kept and agree(bool(self._lacking(self._folder, sorted({"", *texts})))))

    def want(self, texts: Iterable[str]) -> None:
        """Encode `texts`, and the empty text, unless they have rows, in sorted order. All ranks must call this.

        Raises:
            UserError: if the disk has no room for the rows.
        """
        wanted = sorted({"", *texts})
        self._reported = set()  # a trial reports nothing
        if self.is_kept:
            self._keep(wanted)
            self.network, self.holds_network = None, False  # frees its memory for the training
        else:
            self._soundness = []
            first_rank_does(lambda: self._look(wanted))
            self._report_soundness(wanted)
        if rank() == 0:
            self._report_tokens(wanted)

    @property
    def _folder(self) -> Path:
        return self.store.folder / "texts" / digest_of([], self.returned.digest(), str(FORMAT))

    def _keep(self, wanted: Sequence[str]) -> None:
        folder = self._folder
        first_rank_does(lambda: make_folder(folder))
        if not agree(bool(self._lacking(folder, wanted))):
            self._report_soundness(wanted)
            return
        with locked(folder, shared=False) if rank() == 0 else nullcontext():
            # Another run may have made some meanwhile.
            lacking = first_rank_does(lambda: self._lacking(folder, wanted, report=True))
            soundness = first_rank_does(lambda: self._look(lacking)) if lacking else None
            self._report_soundness(wanted)
            if soundness:
                self._make(folder, lacking, soundness)
                agree(False)  # wait for the first rank, which writes
        if agree(bool(self._lacking(folder, wanted))):
            raise UserError(f"data.cache_dir: not all ranks find {folder}; set a folder that all machines share")

    def rows(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Return the conditions of `texts` by their names, a row for each text: float32, or bool.

        Texts without a row are encoded now, and their rows are kept in memory.
        """
        if not self.is_kept:
            return self._ready(self._stored(texts))
        if lacking := sorted({text for text in texts if _digest(text) not in self._places}):
            rows, facts = self._stored(lacking), self._facts_of(lacking)  # if that fails, nothing is kept
            self._places |= {_digest(text): (len(self._parts), row) for row, text in enumerate(lacking)}
            self._parts.append(rows)
            self._tried = self._tried or rows
            self._facts.append(facts)
            self.network = self.network if self.holds_network else None
        places = torch.tensor([self._places[_digest(text)] for text in texts]).view(-1, 2)
        conditions: dict[str, Tensor] = {}
        for name, first in self._parts[0].items():
            conditions[name] = torch.empty(len(texts), *first.shape[1:], dtype=first.dtype)
            for number in sorted(set(places[:, 0].tolist())):
                here = places[:, 0] == number
                conditions[name][here] = self._parts[number][name][places[here, 1]]
        return self._ready(conditions)

    def report_prompts(self, texts: Iterable[str]) -> None:
        """Warn once about each of the encoded `texts` that is truncated, or unknown to the tokenizer."""
        new = sorted(set(texts) - self._reported)
        self._reported.update(new)
        if new and rank() == 0:
            self._report_tokens(new)

    def nothing(self) -> dict[str, Tensor]:
        """Return the conditions of an empty text, by name."""
        return {name: rows[0] for name, rows in self.rows([""]).items()}

    def _ready(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {self.name + name: rows.float() if rows.is_floating_point() else rows for name, rows in columns.items()}

    def _open(self) -> TextNetwork:
        if self.network is None:
            self.network = self.encoder.opened(self.device)
            if self.encoder.limit and not self.network.lengths:
                raise self.returned.wrong(
                    f"limit = {self.encoder.limit}", "lengths(texts) of the network that open() returns"
                )
        return self.network

    def _lacking(self, folder: Path, wanted: Sequence[str], report: bool = False) -> list[str]:
        """Read the files in `folder`, and return the texts that are in none of them."""
        self._parts, self._places, self._facts, self._soundness = [], {}, [], []
        for path in sorted(folder.glob("*-*")):
            num = path.name.rpartition("-")[2]
            if not num.isdecimal():
                continue
            part = load_if_sound(path, "table of texts", partial(_read, num=int(num)), report)
            if part is not None:
                self._places |= {digest: (len(self._parts), row) for row, digest in enumerate(part[0].digests)}
                self._facts.append(part[0])
                self._soundness += [(seen, part[0].digests)] if (seen := part[0].soundness) else []
                self._parts.append(part[1])
        for rows in self._parts[:1]:
            columns = {name: Column.of(column, len(column)) for name, column in rows.items()}
            self.returned.forms = {name: (column.shape[1:], column.dtype) for name, column in columns.items()}
        size = sum(column.nbytes for part in self._parts for column in part.values())
        if self.encoder.stored(self.store).in_memory(size):
            self._parts = [{name: column.clone() for name, column in part.items()} for part in self._parts]
        return [text for text in wanted if _digest(text) not in self._places]

    def _make(self, folder: Path, texts: Sequence[str], soundness: TextSoundness) -> None:
        """Encode `texts` into one more file."""
        name = hashlib.sha256("\0".join(texts).encode("utf-8", "surrogateescape")).hexdigest()[:16]
        path = folder / f"{name}-{len(texts)}"
        # The first rows give the shapes and dtypes of all rows, on all ranks.
        first = gathered_or_raised(lambda: self._tried or self._stored(texts[:1]))[0]

        columns = {name: Column.of(rows, len(texts)) for name, rows in first.items()}
        size = byte_size(sum(column.num_bytes for column in columns.values()))
        first_rank_does(lambda: logger.info("data: encoding %s texts into %s: %s", f"{len(texts):,}", folder, size))
        chunks = torch.split(torch.arange(len(texts)), _CHUNK)

        def make(numbers: Sequence[int]) -> Iterator[tuple[int, dict[str, Tensor], None]]:
            for number in numbers:
                start = int(chunks[number][0])
                yield number, self._stored(texts[start : start + _CHUNK]), None

        def facts(_: list[Any]) -> Any:
            return cattrs.unstructure(self._facts_of(texts, soundness))

        make_in_chunks(path, columns, chunks, f"encoding by {self.where}", max(texts), make, facts)
        self.network = None  # frees its memory for the training

    def _look(self, texts: Sequence[str]) -> TextSoundness:
        """Return the facts about the encoder that a few of `texts` show."""
        rows: list[int] = few_of(torch.arange(len(texts))).tolist()
        few = [texts[row] for row in rows]
        starts = range(0, len(few), AT_ONCE)
        parts = [self._made(few[start : start + AT_ONCE], torch.float32) for start in starts]
        encoded = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        facts = TokenFacts.of(self._open(), few, self.encoder.limit)
        soundness = TextSoundness.of(dict(zip(rows, few, strict=True)), facts, encoded)
        self._soundness.append((soundness, [*map(_digest, texts)]))
        return soundness

    def _report_soundness(self, texts: Sequence[str]) -> None:
        """Warn of faults of the encoder of `texts`."""
        by_digest = {_digest(text): text for text in texts}
        parts = [
            (soundness, known)
            for soundness, digests in self._soundness
            if (known := {row: by_digest[digest] for row, digest in enumerate(digests) if digest in by_digest})
        ]
        report_texts(self.where, self.encoder, parts)

    def _made(self, texts: Sequence[str], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the rows of `texts` on the CPU, floats as `dtype`."""
        with torch.no_grad():
            columns = self.returned.of_texts(self._open().encode(texts), len(texts)).items()
            return {name: (rows.to(dtype) if rows.is_floating_point() else rows).cpu() for name, rows in columns}

    def _stored(self, texts: Sequence[str]) -> dict[str, Tensor]:
        encoded = self._made(texts, STORED)
        for rows in encoded.values():
            if rows.is_floating_point() and not rows.isfinite().all():
                bad = int((~rows.isfinite().view(len(texts), -1).all(1)).nonzero()[0])
                text = f"{texts[bad][:_SHOWN]!r} becomes values beyond the range of float16"
                raise UserError(f"{self.where}: {text}; let the encoder scale them down")
        return encoded

    def _facts_of(self, texts: Sequence[str], soundness: TextSoundness | None = None) -> _Facts:
        facts = TokenFacts.of(self._open(), texts, self.encoder.limit)
        return _Facts([_digest(text) for text in texts], facts.cut, facts.unknown, facts.tokens, soundness)

    def _report_tokens(self, texts: Sequence[str]) -> None:
        """Warn of texts that are cut, unknown to the tokenizer, or the same as another text in tokens."""
        parts = self._facts if self.is_kept else [self._facts_of(texts)]
        text_of = {_digest(text): text for text in texts}
        tokens_of = {digest: each for part in parts for digest, each in zip(part.digests, part.tokens, strict=False)}
        cut_digests = {part.digests[row] for part in parts for row in part.cut}
        unknown_digests = {part.digests[row] for part in parts for row in part.unknown}
        cut = [text for digest, text in text_of.items() if digest in cut_digests]
        unknown = [text for digest, text in text_of.items() if digest in unknown_digests]
        tokens = [tokens_of.get(digest, "") for digest in text_of]
        same = [] if "" in tokens else of_same_tokens(texts, tokens)
        of_all = f"of {len(texts):,} texts"
        if cut:
            text = f"{len(cut):,} {of_all} are cut at {self.encoder.limit} tokens, such as {cut[0][:_SHOWN]!r}"
            logger.warning("%s: %s", self.where, text)
        if unknown:
            text = f"{len(unknown):,} {of_all} have hardly a word that the tokenizer knows, such as "
            logger.warning("%s: %s%r", self.where, text, unknown[0][:_SHOWN])
        if same:
            num, (text, other) = f"{len(same):,} {of_all}", (part[:_SHOWN] for part in same[0])
            logger.warning("%s: %s have the same tokens as another, such as %r and %r", self.where, num, text, other)


class Nothing(Mapping[str, Tensor | None]):
    """The conditions of an empty text, by name. The encoders of `rows` make them at the first use.

    The value is None for conditions that `stay` as they are.
    """

    def __init__(self, rows: Mapping[str, TextTable], stay: Collection[str]) -> None:
        self._rows, self._stay = rows, stay

    @cached_property
    def _made(self) -> dict[str, Tensor | None]:
        values = {name: value for rows in self._rows.values() for name, value in rows.nothing().items()}
        return {**values, **dict.fromkeys(self._stay)}

    def __getitem__(self, name: str) -> Tensor | None:
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


@define(eq=False)
class TextConditions:
    """The conditions of captions and prompts, and the conditions that stand for no text."""

    rows: Mapping[str, TextTable]  # by the names of the encoders
    time_ids: Sequence[str]  # the conditions that hold the sizes of a picture
    nothing: Nothing = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.nothing = Nothing(self.rows, self.time_ids)

    @property
    def encoders(self) -> dict[str, TextEncoder]:
        """The encoders, by name."""
        return {name: rows.encoder for name, rows in self.rows.items()}

    @property
    def kinds(self) -> tuple[str, ...]:
        """The names of the captions that the encoders take, such as "text"."""
        return tuple(dict.fromkeys(rows.encoder.texts for rows in self.rows.values()))

    @property
    def digests(self) -> dict[str, str]:
        """The digests of the encoders, by name."""
        return {name: rows.returned.digest() for name, rows in self.rows.items()}

    def embed(self, texts: Mapping[str, Sequence[str]], are_prompts: bool = True) -> dict[str, Tensor]:
        """Return the conditions of `texts` (n of each kind), by name, with n rows each.

        If the texts `are_prompts`, a warning names texts that an encoder truncates.

        Raises:
            UserError: for a kind of texts that no encoder takes, for a missing kind, and for prompts that are no texts.
        """
        for prompt in chain.from_iterable(texts.values()) if are_prompts else ():
            try:
                check_text(prompt)
            except ValueError as error:
                raise UserError(f"prompt {prompt[:_SHOWN]!a}: {error}") from None
        for kind in texts:
            if kind not in self.kinds:
                known = f"expected {listed(self.kinds, 3)}{nearest(kind, self.kinds)}"
                raise UserError(f"texts: no encoder takes {kind!r}; {known}")
        conditions: dict[str, Tensor] = {}
        for rows in self.rows.values():
            if rows.encoder.texts not in texts:
                raise UserError(f"texts: add {rows.encoder.texts!r}, which {rows.where} needs")
            conditions |= rows.rows(list(texts[rows.encoder.texts]))
            if are_prompts:
                rows.report_prompts(texts[rows.encoder.texts])
        return conditions

    def of_size(self, size: Sequence[int], num: int) -> dict[str, Tensor]:
        """Return the conditions (n 6) of `num` generated pictures of this height and width."""
        return dict.fromkeys(self.time_ids, of_prompt(size).expand(num, -1))


@define(frozen=True)
class _Facts:
    digests: list[str]  # of the texts, in the order of their rows
    cut: list[int]  # rows of texts that the encoder truncates
    unknown: list[int] = field(factory=list)  # rows of texts with hardly a word that it knows
    tokens: list[str] = field(factory=list)  # a hash of the tokens of each text, if they are known
    soundness: TextSoundness | None = None  # of texts that were encoded for a table


def _read(path: Path, num: int) -> tuple[_Facts, dict[str, Tensor]]:
    facts, columns = read_table(path, num)
    about = structured(_Facts, facts)
    rows = (*about.cut, *about.unknown)
    if {len(about.digests), len(about.tokens or about.digests)} != {num} or not all(0 <= row < num for row in rows):
        raise ValueError("it is of other texts")
    return about, columns


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]
