"""Test that encoding which was stopped or killed goes on where it stood, and ends as the same files."""

import os
import re
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from attrs import define
from torch import Tensor
from torch.nn import functional

from hookdiff import InMemory, UserError, load_config
from hookdiff.encoding import Encoded, EncodedTexts, PictureEncoder, TextEncoder
from hookdiff.experiment.build import build_feed
from hookdiff.testing import on_ranks
from tests.conftest import check_facts, refused, warnings, wide, write_small
from tests.forked import begin

NUM = 200  # samples: seven chunks of pictures, four of texts


def samples() -> InMemory:
    images = torch.rand(NUM, 3, 8, 8, generator=torch.Generator().manual_seed(1)) * 2 - 1
    return InMemory(images, texts={"text": [[f"text {k:03}"] for k in range(NUM)]})


def pictures() -> InMemory:
    return InMemory(samples().images)


@define(frozen=True, slots=False)  # two bases with slots do not mix
class Ends:
    """Options of an encoder that ends the process by a signal, or raises an error, at a call with many rows."""

    log: str
    version: int = 1
    at: int = 0
    how: str = "SIGKILL"

    def note(self, num: int) -> None:
        """Write down that so many were encoded, or end."""
        if num in (1, 16):  # a trial
            return
        calls = len(Path(self.log).read_text().splitlines()) if Path(self.log).exists() else 0
        if self.at and calls == self.at:
            if not self.how.startswith("SIG"):
                raise OSError(self.how)
            os.kill(os.getpid(), getattr(signal, self.how))
        with open(self.log, "a") as file:
            file.write(f"{num}\n")


@define(frozen=True)
class Halves(Ends, PictureEncoder):
    def digest(self) -> str:
        return f"halves {self.version}"

    def open(self, device: torch.device) -> Encoded:
        return _Halves(self)


@define
class _Halves:
    ends: Ends

    def encode(self, pictures: Tensor) -> tuple[Tensor, Tensor | None]:
        self.ends.note(len(pictures))
        return functional.avg_pool2d(pictures, 2), None

    def decode(self, latents: Tensor) -> Tensor:
        return functional.interpolate(latents, scale_factor=2)


@define(frozen=True)
class Letters(Ends, TextEncoder):
    def digest(self) -> str:
        return f"letters {self.version}"

    def open(self, device: torch.device) -> EncodedTexts:
        return _Letters(self)


@define
class _Letters:
    ends: Ends

    def encode(self, texts: Sequence[str]) -> Mapping[str, Tensor]:
        self.ends.note(len(texts))
        return {"": torch.tensor([[float(sum(text.encode())), float(len(text))] for text in texts])}

    def lengths(self, texts: Sequence[str]) -> Sequence[int]:
        return [len(text) for text in texts]


def encode(path: Path, settings: Sequence[str] = ()) -> None:
    build_feed(load_config(path, settings=settings))


Write = Callable[[str], Path]
KINDS = ("image", "text")


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def config(kind: str) -> Path:
        use, source = {"image": ("Halves", "pictures"), "text": ("Letters", "samples")}[kind]
        encoders = {kind: {"use": f"{__name__}:{use}", "log": str(tmp_path / "log")}}
        data = {"source": f"{__name__}:{source}", "cache_dir": str(tmp_path / "cache"), "encode": encoders}
        return write_small(tmp_path / "small.toml", data=data)

    return config


def table(folder: Path) -> dict[str, bytes]:
    """Return the files of the only table, beside which nothing but locks is left."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.suffix != ".lock"]
    assert len({file.parent for file in files}) == 1
    return {file.name: file.read_bytes() for file in files}


def counts(folder: Path) -> list[int]:
    """Return the number of samples in each call of the encoder since the last time."""
    numbers = [int(line) for line in (folder / "log").read_text().splitlines()]
    (folder / "log").unlink()
    return numbers


def whole(path: Path) -> dict[str, bytes]:
    """Return the table that one process makes, and remove it."""
    encode(path)
    known = table(path.parent / "cache")
    shutil.rmtree(path.parent / "cache")
    return known


def stopped(path: Path, kind: str, at: int, how: str) -> tuple[int, str]:
    """Encode in a process that ends at call `at`; return its exit code and its stderr."""
    settings = (f"data.encode.{kind}.at={at}", f"data.encode.{kind}.how={how}")
    with begin(encode, path, settings, folder=path.parent, environment=os.environ) as process:
        _, err = process.communicate()
    return process.returncode, err


@pytest.mark.parametrize("how", [*wide("SIGKILL"), "SIGINT"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_killed_goes_on_where_it_stood(write: Write, tmp_path: Path, kind: str, how: str) -> None:
    path = write(kind)
    known, chunks = whole(path), counts(tmp_path)
    assert stopped(path, kind, 1, how)[0]
    assert stopped(path, kind, 3, how)[0]
    encode(path)
    assert table(tmp_path / "cache") == known
    assert counts(tmp_path) == chunks  # each once


@pytest.mark.parametrize("ranks", [(2, 1), *wide(((2, 3),))])
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_ranks_goes_on(write: Write, tmp_path: Path, kind: str, ranks: tuple[int, int]) -> None:
    path = write(kind)
    known, chunks = whole(path), counts(tmp_path)
    settings = (f"data.encode.{kind}.at=2", f"data.encode.{kind}.how=gone")
    with pytest.raises((OSError, RuntimeError, ExceptionGroup)):
        on_ranks(ranks[0], lambda rank: encode(path, settings))
    on_ranks(ranks[1], lambda rank: encode(path))
    assert table(tmp_path / "cache") == known
    assert sum(counts(tmp_path)) - sum(chunks) in (0, chunks[0])  # one of a round that another rank did not end


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_says_what_is_kept(
    write: Write, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = (f"data.encode.{kind}.at=2", f"data.encode.{kind}.how=SIGINT")
    with pytest.raises(KeyboardInterrupt):
        encode(write(kind), settings)
    num, total = ("64", "200") if kind == "image" else ("128", "201")
    check_facts(warnings(caplog)[-1], f"data.encode.{kind}", f"{num} of {total}", "kept")


def spoil(rest: Path) -> None:
    (column,) = (file for file in rest.iterdir() if file.suffix != ".jsonl")
    with column.open("r+b") as file:
        file.write(b"\1\2\3")


def tear(rest: Path) -> None:
    journal = rest / "chunks.jsonl"
    journal.write_bytes(journal.read_bytes()[:-5])


@pytest.mark.parametrize("damage", [spoil, tear])
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_chunk_is_made_again(write: Write, tmp_path: Path, kind: str, damage: Callable[[Path], None]) -> None:
    path = write(kind)
    known, chunks = whole(path), counts(tmp_path)
    stopped(path, kind, 2, "SIGKILL")
    (journal,) = (tmp_path / "cache").rglob("chunks.jsonl")
    damage(journal.parent)
    encode(path)
    assert (table(tmp_path / "cache"), sorted(counts(tmp_path))) == (known, sorted([*chunks, chunks[0]]))


@pytest.mark.parametrize("kind", KINDS)
def test_another_encoder_begins_anew_and_removes_what_was_left(
    write: Write, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "hookdiff")
    path = write(kind)
    known, chunks = whole(path), counts(tmp_path)
    stopped(path, kind, 2, "SIGKILL")
    counts(tmp_path)
    encode(path, (f"data.encode.{kind}.version=2",))
    assert (counts(tmp_path), table(tmp_path / "cache")) == (chunks, known)
    assert max(len(re.findall("[0-9a-f]{16,}", message)) for message in caplog.messages) == 1  # hashes in a line


def test_a_disk_that_was_full_leaves_what_is_written(
    write: Write, tmp_path: Path, small_disk: Callable[[Path], Path]
) -> None:
    path, disk = write("image"), tmp_path / "cache"
    known = whole(path)
    counts(tmp_path)
    small_disk(disk)
    stopped(path, "image", 2, "SIGKILL")
    counts(tmp_path)
    ballast = disk / "ballast"
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, os.statvfs(disk).f_bavail * 4096)
    with refused(UserError, "cache"):
        encode(path)
    ballast.unlink()
    encode(path)
    assert (table(disk), sum(counts(tmp_path))) == (known, NUM - 64)
