"""Damaged and forged tar files and indices: each gives its samples, or one message with its name."""

import io
import os
import shutil
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings, strategies as st
from PIL import Image
from torch import Tensor

from hookdiff import Feed, StorageError, UserError
from hookdiff.data import Store
from hookdiff_shards import shards
from tests.conftest import check_facts, pixels, refused
from tests.hostile.test_cache import changes, logged
from tests.hostile.test_run_dir import in_time, replace

pytestmark = [
    pytest.mark.skipif(os.name == "nt", reason="Windows has no such files"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Pillow's about broken pictures
]
HERE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
NUM = 6


def tar(*members: tuple[tarfile.TarInfo, bytes], kind: int = tarfile.USTAR_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=kind) as archive:
        for member, content in members:
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def member(name: str, content: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, content


def png(seed: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels(seed)).save(file, "PNG")
    return file.getvalue()


def good(kind: int = tarfile.USTAR_FORMAT) -> bytes:
    pairs = [(member(f"{k}.png", png(k)), member(f"{k}.cls", b"1")) for k in range(NUM)]
    return tar(*(each for pair in pairs for each in pair), kind=kind)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def samples(path: str = "a.tar") -> Tensor:
    """Return all samples in the order of the shard; unreadable ones are zero."""
    feed = Feed(shards(path, index_dir="index"), store=Store(store="memory", unreadable="skip"))
    found = torch.zeros(len(feed.samples), *feed.shape)
    found[feed.usable] = torch.cat([batch.inputs for batch in feed.unaugmented(feed.usable)])
    return found


def expected() -> Tensor:
    return torch.stack([torch.from_numpy(pixels(k)).permute(2, 0, 1).float() / 127.5 - 1 for k in range(NUM)])


# Shards


@given(data=st.data(), kind=st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
@HERE
def test_changed_bytes_of_a_shard_give_samples_or_one_message(here: Path, data: st.DataObject, kind: int) -> None:
    whole = good(kind)
    (here / "a.tar").write_bytes(data.draw(changes(len(whole)))(whole))
    with in_time():
        try:
            samples()
        except (UserError, ValueError) as error:
            check_facts(error, "a.tar")


LONG = tarfile.TarInfo("x")
LONG.pax_headers = {"comment": "x" * (2 << 20)}


def header(name: str, size: bytes, kind: bytes = b"0") -> bytes:
    """Return a header of tar with any bytes for its size, and the right checksum."""
    block = bytearray(tarfile.TarInfo(name).tobuf(tarfile.USTAR_FORMAT))
    block[124:136], block[156:157], block[148:156] = size, kind, b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def pax(records: bytes) -> bytes:
    return header("p", b"%011o\0" % len(records), b"x") + records.ljust(512, b"\0")


END = bytes(1024)


@pytest.mark.parametrize(
    ("content", "facts"),
    [
        (good()[:-10_000], ["cut"]),
        (good()[:2048], ["cut", "end mark"]),  # between two members
        (good()[:512], ["cut", "byte 0"]),
        (good()[:700], ["cut"]),
        (good()[:100], ["cut"]),
        (END, ["no sample"]),
        (bytes(512), ["no sample"]),
        (header("0.png", b"77777777777\0") + END, ["cut", "byte 0", 8**11 - 1]),
        (header("0.png", b"\x80" + b"\xff" * 11) + END, ["cut", "byte 0"]),
        (header("0.png", b"\xff" * 12) + END, ["byte 0", "negative"]),
        (header("0.png", b"-0000000001\0") + END, ["byte 0", "negative"]),
        (header("0.png", b"+0000000001\0") + END, ["byte 0"]),
        (header("0.png", b"0_1\0".ljust(12, b"\0")) + END, ["byte 0"]),
        (header("0.png", b"\0" * 12, b"S") + END, ["0.png", "sparse"]),
        (header("0.png", b"\0" * 12, b"M") + END, ["0.png", "'M'"]),
        (header("0.png", b"\0" * 12, b"3") + END, ["0.png", "device"]),
        (header("0.png", b"\0" * 12, b"6") + END, ["0.png", "pipe"]),
        (header("0.png", b"\0" * 12, b"2") + END, ["0.png", "symbolic link", "--dereference"]),
        (header("0.png", b"\0" * 12, b"1") + END, ["0.png", "hard link", "--hard-dereference"]),
        (pax(b"20 GNU.sparse.map=1\n") + header("0.png", b"\0" * 12) + END, ["sparse"]),
        (pax(b"12 size=-99\n") + header("0.png", b"\0" * 12) + END, ["'-99'"]),
        (pax(b"12 size=999\n") + header("0.png", b"\0" * 12) + END[:512], ["cut", 999]),
        (pax(b"99 path=a\n") + header("0.png", b"\0" * 12) + END, ["byte 512", "broken"]),
        (pax(b"0 path=a\n") + header("0.png", b"\0" * 12) + END, ["broken"]),
        (pax(b"-3 path=a\n") + header("0.png", b"\0" * 12) + END, ["broken"]),
        (tar((LONG, b""), kind=tarfile.PAX_FORMAT), [1 << 20]),
        (tar(member("0.png", png(0)), member("0.png", png(1))), [2, "0.png"]),
        (tar(member("0.png", png(0)), member("0.PNG", png(1))), [2, "0.png"]),
        (tar(member("\x1b[31m.cls"), member("\x1b[31m.cls")), [2, "\\x1b[31m.cls"]),
    ],
)
def test_forged_headers_are_one_message(here: Path, content: bytes, facts: list[Any]) -> None:
    (here / "a.tar").write_bytes(content)
    with in_time(), refused(ValueError, "a.tar", *facts) as caught:
        samples()
    assert str(caught.value).isprintable()


def test_names_are_never_paths(here: Path) -> None:
    names = ["../../up.png", "/root.png", "a/../b.png", "con.png", "\x1b[2J\n.png", "\udcff.png"]
    (here / "a.tar").write_bytes(tar(*(member(name, png(k)) for k, name in enumerate(names)), kind=tarfile.PAX_FORMAT))
    before = {path for path in here.parent.rglob("*") if "index" not in str(path)}
    feed = Feed(shards("a.tar", index_dir="index"))
    assert torch.equal(torch.cat([batch.inputs for batch in feed.unaugmented(feed.usable)]), expected()[: len(names)])
    assert {path for path in here.parent.rglob("*") if "index" not in str(path)} == before
    assert all(feed.describe(index).isprintable() for index in range(len(names)))


def test_a_huge_sparse_file_is_not_read(here: Path) -> None:
    (here / "a.tar").write_bytes(good())
    os.truncate("a.tar", 1 << 40)
    with in_time():
        assert torch.equal(samples(), expected())
    (here / "b.tar").write_bytes(header("0.png", b"\x80" + (1 << 39).to_bytes(11, "big")))
    os.truncate("b.tar", (1 << 39) + 2048)
    with in_time(), refused(UserError, "b.tar[0.png]", 1 << 39, 1 << 30):
        samples("b.tar")


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "zero", "folder", "a link to itself", "bytes"])
def test_special_files_are_no_shards(here: Path, kind: str) -> None:
    replace(here / "a.tar", kind, here)
    with in_time(), refused(ValueError, "a.tar"):
        samples()


def test_a_shard_that_changes_is_indexed_again_or_reported(here: Path) -> None:
    (here / "a.tar").write_bytes(good())
    data = shards("a.tar", index_dir="index")
    other = tar(*(member(f"{k}.png", png(k + 1)) for k in range(NUM - 1)))
    (here / "a.tar").write_bytes(other)
    with refused(StorageError, "a.tar has changed"):
        Feed(data, store=Store(store="memory"))
    assert torch.equal(samples(), torch.cat([expected()[1:]]))
    assert shards("a.tar", index_dir="index").fingerprint() != data.fingerprint()


@pytest.mark.parametrize("size", [0, 512, 3000])
def test_a_shard_that_is_cut_during_a_training_is_reported(here: Path, size: int) -> None:
    (here / "a.tar").write_bytes(good())
    feed = Feed(shards("a.tar", index_dir="index"), store=Store(store="none"), drop_last=False).bind(NUM)
    next(feed.batches(0))
    os.truncate("a.tar", size)
    with in_time(), refused(UserError, "a.tar", "has changed"):
        next(feed.batches(1))


# Indices


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a shard and its index."""
    root = tmp_path_factory.mktemp("shards")
    (root / "a.tar").write_bytes(good())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert torch.equal(samples(), expected())
    return root


@pytest.fixture
def root(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    return made


def index_of(root: Path) -> Path:
    (found,) = (root / "index").glob("*.index")
    return found


def assert_made_again(root: Path, damage: Callable[[Path], object]) -> None:
    """Damage the index, and assert that it is made again, with the same samples and one line, and then used."""
    index, whole = index_of(root), root / "whole"
    shutil.copy(index, whole)
    try:
        damage(index)
        with in_time(), logged() as lines:
            assert torch.equal(samples(), expected())
        assert len(lines) == 1
        check_facts(lines[0], index.name, "a.tar")
        with in_time(), logged() as lines:
            assert torch.equal(samples(), expected())
        assert not lines
    finally:
        if os.path.lexists(index):
            index.unlink()
        whole.rename(index)


@given(data=st.data())
@HERE
def test_changed_bytes_of_an_index_change_no_sample(root: Path, data: st.DataObject) -> None:
    index = index_of(root)
    whole = index.read_bytes()
    index.write_bytes(data.draw(changes(len(whole)))(whole))
    try:
        with in_time():
            assert torch.equal(samples(), expected())
    finally:
        index.write_bytes(whole)


def test_every_changed_value_of_an_index_is_found(root: Path) -> None:
    whole = index_of(root).read_bytes()
    for place in range(8 + int.from_bytes(whole[:8], "little"), len(whole), 97):
        changed = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
        assert_made_again(root, lambda index, changed=changed: index.write_bytes(changed))


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "zero", "a link to itself", "nothing outside", "bytes"])
def test_special_files_are_no_indices(root: Path, kind: str) -> None:
    assert_made_again(root, lambda index: replace(index, kind, root))


def test_a_huge_index_is_not_read(root: Path) -> None:
    assert_made_again(root, lambda index: os.truncate(index, 1 << 40))


COLUMN = st.integers(-3, 40) | st.sampled_from([2**31, 2**62, 2**63 - 1, -(2**63)])


@given(row=st.integers(0, 2 * NUM - 1), column=st.integers(0, 7), value=COLUMN)
@example(row=0, column=3, value=0)
@HERE
def test_a_forged_index_gives_samples_or_one_message(root: Path, row: int, column: int, value: int) -> None:
    """Who can write an index can also forge it: that may hide samples, and may not break the reading of others."""
    from hookdiff_shards.files import Files
    from hookdiff_shards.index import load, save

    index, whole = index_of(root), root / "whole"
    shutil.copy(index, whole)
    try:
        (shard,) = Files(["a.tar"], {}).shards
        known = load(index, shard)
        assert known is not None
        table = numpy.array(known.table)
        table[row, column] = value
        known.table = table
        save(known, shard, index)
        with in_time(), suppress(UserError, ValueError):
            assert samples().shape[1:] == (3, 10, 10)
    finally:
        whole.rename(index)


def test_an_index_that_cannot_be_written_is_reported(here: Path) -> None:
    (here / "a.tar").write_bytes(good())
    (here / "index").write_text("a file")
    with refused(UserError, "index"):
        samples()
