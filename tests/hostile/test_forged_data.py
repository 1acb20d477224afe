"""Forged data with right checksums, and data that changes while it is read: the right samples, or one message."""

import hashlib
import json
import multiprocessing
import os
import shutil
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import example, given, strategies as st
from torch import Tensor

from hookdiff import StorageError, UserError
from hookdiff.images import Folder, Store, Transforms, feed_of
from hookdiff_array import Arrays
from hookdiff_shards import shards
from hookdiff_shards.files import Files
from hookdiff_shards.index import load, save
from tests.conftest import check_facts, check_one, pixels, refused, wide
from tests.hostile.formats import (
    KINDS,
    LABELS,
    MODES,
    NUM,
    RGB,
    is_image,
    make_set,
    member,
    npy,
    npz,
    numpy_reads,
    picture,
    samples,
    shard,
    tar,
)
from tests.hostile.mutations import HERE, NUMBERS, changes, in_time, logged, values

pytestmark = [
    pytest.mark.usefixtures("here"),
    pytest.mark.skipif(os.name == "nt", reason="Windows has no such files"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning"),  # Pillow's and numpy's about damage
]


# Arrays


def read_array(path: Path, **options: Any) -> bool:
    """Return whether all images can be read. Assert that they are right, or that one message names the file."""
    try:
        with in_time():
            data = Arrays(str(path), **options)
            found = samples(data)
    except (UserError, ValueError) as error:
        check_facts(error, path)
        return False
    assert options or numpy_reads(path, found, data.name)
    assert -1 <= found.min() <= found.max() <= 1
    assert data.labels is None or -1 <= data.labels.min() <= data.labels.max() < 2**24
    return True


DTYPES = [
    *("|u1", "<u2", ">u2", "<f4", "<f8", "<f2", "|b1", "|i1"),
    *("<i8", "<u8", "<c8", "|O", "<U3", "|S0", "|V4", "<M8[s]"),
]
DIMENSION = st.integers(0, 8) | st.sampled_from([-1, 2**31, 2**32, 2**62, 2**63 - 1, 2**64, 10**30])
TEXTS = [
    *("{}", "", "[", "(" * 3000, "-" * 9000, "{[]: 1}", "{1: 2, 'a': 3}", "__import__('os')", "{'descr': []}", "\0"),
    "9" * 9000,
    "{'descr': [('a', '|u1'), ('b', '|O')], 'fortran_order': False, 'shape': (2, 3, 3)}",
    "{'descr': '|u1', 'fortran_order': False, 'shape': 9}",
    "{'descr': '|u1', 'fortran_order': 1, 'shape': (3, 3, 3)}",
    "{'descr': '|u1', 'fortran_order': False, 'shape': (3L, 3L, 3L)}",
]


def with_header(
    shape: Any,
    dtype: str = "|u1",
    fortran: bool = False,
    text: str | None = None,
    version: tuple[int, int] = (1, 0),
    length: int | None = None,
    num_bytes: int = 630,
) -> bytes:
    """Return the bytes of an .npy with any header."""
    text = f"{{'descr': {dtype!r}, 'fortran_order': {fortran}, 'shape': {shape}, }}" if text is None else text
    head = text.encode("utf-8", "surrogatepass") + b"\n"
    known = min(len(head), 2**16 - 1) if length is None else length
    size = struct.pack("<H", known & 0xFFFF) if version == (1, 0) else struct.pack("<I", known)
    return b"\x93NUMPY" + bytes(version) + size + head + (bytes(range(256)) * 20)[:num_bytes]


HEADERS = st.builds(
    with_header,
    st.lists(DIMENSION, max_size=5).map(tuple),
    st.sampled_from(DTYPES) | st.text(max_size=4),
    st.booleans(),
    st.none() | st.sampled_from(TEXTS) | st.text(max_size=60),
    st.sampled_from([(1, 0), (2, 0), (3, 0), (0, 0), (9, 9)]),
    st.none() | st.sampled_from([0, 1, 2**16 - 1, 2**32 - 1]),
    st.sampled_from([0, 1, 27, 630, 5000]),
)


@given(whole=HEADERS, packed=st.booleans(), options=st.sampled_from([{}, {"value_range": (0.0, 255.0)}]))
@example(with_header((2**62, 2, 2)), True, {})
@example(with_header((0, 2**62, 2**62)), False, {})
@example(with_header((1, 2**31, 1)), False, {})
@example(with_header((0, 8, 8)), False, {})
@HERE
def test_a_header_of_npy(here: Path, whole: bytes, packed: bool, options: dict[str, Any]) -> None:
    path = here / ("a.npz" if packed else "a.npy")
    path.write_bytes(npz(images=whole) if packed else whole)
    read_array(path, **options)


@given(data=st.data())
@HERE
def test_a_directory_of_a_zip(here: Path, data: st.DataObject) -> None:
    """Sizes, flags, methods and places are absurd."""
    whole = bytearray(npz(zipfile.ZIP_STORED, images=npy(RGB), labels=npy(LABELS)))
    for _ in range(data.draw(st.integers(1, 3))):
        record = data.draw(st.sampled_from([whole.index(b"PK\1\2"), whole.rindex(b"PK\1\2"), whole.rindex(b"PK\5\6")]))
        at = record + data.draw(st.integers(4, 20))
        number = data.draw(st.sampled_from([0, 1, 9, 2**31, 2**32 - 1]) | st.integers(0, 2**32 - 1))
        field = struct.pack("<I", number)[: data.draw(st.sampled_from([2, 4]))]
        whole[at : at + len(field)] = field
    (here / "a.npz").write_bytes(bytes(whole))
    read_array(here / "a.npz")


@pytest.mark.parametrize(
    "content",
    [
        npz(images=b"no array"),
        npz(images=b""),
        npz(images=npy(RGB)[:-1]),
        npz(images=npy(numpy.array([{"a": 1}, None], dtype=object))),
        npz(images=npy(RGB), labels=b"no array"),
        npz(images=npy(RGB), labels=npy(LABELS[:-1])),
        npz(images=npy(RGB), labels=npy(LABELS.astype("uint64") + 2**63)),
        npz(images=npy(RGB), labels=npy(LABELS + 2**40)),
        npz(images=npy(RGB), labels=npy(LABELS - 2)),
        npz(images=npy(numpy.zeros((3, 0, 4), "uint8"))),
        npz(),
        npy(RGB),
    ],
)
def test_an_archive_that_holds_no_images_is_refused(here: Path, content: bytes) -> None:
    (here / "a.npz").write_bytes(content)
    assert not read_array(here / "a.npz")


def test_a_folder_in_an_archive_is_no_array(here: Path) -> None:
    with zipfile.ZipFile(here / "a.npz", "w") as archive:
        archive.mkdir("images.npy")
        archive.writestr("readme.txt", "hello")
    with refused(ValueError, here / "a.npz"):
        Arrays(str(here / "a.npz"))
    with refused(ValueError, here / "a.npz", "'readme.txt'"):
        Arrays(str(here / "a.npz"), images="readme.txt")


def head_of(shape: bytes) -> bytes:
    whole = npy(numpy.zeros((1, 8, 8), "uint8"))[:128].replace(b"(1, 8, 8)", shape)
    return whole[:-1].rstrip()[:127].ljust(127) + b"\n"


def test_an_array_larger_than_memory_is_refused(here: Path) -> None:
    """The header and the directory agree on 4 TiB; only the file is short."""
    content = bytearray(npz(zipfile.ZIP_STORED, images=head_of(b"(%d, 8, 8)" % 2**36) + bytes(64)))
    at = content.index(b"PK\1\2")
    extra = struct.pack("<HHQ", 1, 8, 2**42 + 128)
    name_length = struct.unpack_from("<H", content, at + 28)[0]
    struct.pack_into("<I", content, at + 24, 2**32 - 1)
    struct.pack_into("<H", content, at + 30, len(extra))
    content[at + 46 + name_length : at + 46 + name_length] = extra
    end = content.rindex(b"PK\5\6")
    struct.pack_into("<I", content, end + 12, struct.unpack_from("<I", content, end + 12)[0] + len(extra))
    (here / "a.npz").write_bytes(bytes(content))
    with in_time(), refused(ValueError, here / "a.npz", "4,096.0 GiB"):
        Arrays(str(here / "a.npz"))


def test_images_of_a_sparse_file_are_too_large(here: Path) -> None:
    (here / "a.npy").write_bytes(head_of(b"(2, %d, 8)" % 2**36))
    os.truncate(here / "a.npy", 2**40 + 128)
    with in_time(), refused(ValueError, here / "a.npy", 2**39):
        Arrays(str(here / "a.npy"))


@given(
    low=st.floats() | st.sampled_from([0.0, -1.0]),
    high=st.floats() | st.sampled_from([1.0, 255.0]),
    dtype=st.sampled_from(["float64", "float32", "uint8", "int64"]),
)
@example(0.0, float("inf"), "uint8")
@example(float("-inf"), float("inf"), "uint8")
@example(0.0, float("nan"), "uint8")
@example(0.0, 5e-324, "uint8")
@example(-1.7e308, 1.7e308, "uint8")
@HERE
def test_any_value_range(here: Path, low: float, high: float, dtype: str) -> None:
    numpy.save(here / "a.npy", RGB.astype(dtype))
    try:
        data = Arrays(str(here / "a.npy"), value_range=(low, high))
    except ValueError as error:
        check_facts(error, "value_range")
        return
    try:
        found = torch.stack([data.load(index) for index in range(len(data))]).numpy().astype(float)
    except ValueError as error:  # values outside, to which the feed adds the file
        assert not (low <= RGB.min() and RGB.max() <= high)
        check_facts(error, "value_range")
        return
    expected = (RGB.transpose(0, 3, 1, 2) - low) / (high - low) * 255
    assert numpy.abs(found - expected).max() <= 0.5 + 1e-6


# Pictures


def read_picture(path: Path, store: Any, transforms: Transforms) -> None:
    """Read the only picture in a folder; assert that its sample is one, or that the message names the file."""
    try:
        with in_time():
            kept = Store(store=store, cache_dir=str(path.parent / "cache"))
            (batch,) = feed_of(Folder(str(path.parent)), transforms, kept).unaugmented(torch.tensor([0]))
    except UserError as error:
        check_facts(error, path)
        return
    assert is_image(batch.inputs)
    if transforms.image_size:
        assert batch.inputs.shape[2:] == (transforms.image_size,) * 2


@given(data=st.data(), kind=st.sampled_from(sorted(KINDS)), store=st.sampled_from(["memory", "none", "disk"]))
@HERE
def test_a_picture_of_any_mode_with_absurd_numbers(here: Path, data: st.DataObject, kind: str, store: str) -> None:
    whole = picture(kind, data.draw(st.sampled_from(MODES.get(KINDS[kind], ["RGB"]))))
    for _ in range(data.draw(st.integers(0, 3))):
        whole = data.draw(changes(whole))
    path = here / f"a.{data.draw(st.sampled_from(sorted(KINDS)))}"
    sides, channels = st.none() | st.integers(2, 32), st.sampled_from([None, 1, 3])
    transforms = Transforms(image_size=data.draw(sides), upscale=True, channels=data.draw(channels))
    path.write_bytes(whole)
    try:
        read_picture(path, store, transforms)
    finally:
        path.unlink()


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, content: bytes, depth: int = 8, colour: int = 0) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", content) + chunk(b"IEND", b"")


SIDE = st.sampled_from(NUMBERS) | st.integers(0, 40)
CONTENT = st.binary(max_size=40) | st.sampled_from([zlib.compress(bytes(1 << 20)), zlib.compress(b"")])
PNGS = st.builds(png, SIDE, SIDE, CONTENT, st.sampled_from([1, 2, 4, 8, 16, 3, 255]), st.integers(0, 7))


@given(whole=PNGS, image_size=st.sampled_from([None, 2, 8, 300]))
@HERE
def test_a_png_of_any_size(here: Path, whole: bytes, image_size: int | None) -> None:
    (here / "a.png").write_bytes(whole)
    read_picture(here / "a.png", "none", Transforms(image_size=image_size, upscale=True))


@pytest.mark.parametrize(
    ("width", "height", "size"),
    [(60_000_000, 1, 60_000_001), (50_000, 50_000, 1 << 24), (2**31 - 1, 2**31 - 1, 1 << 24)],
)
def test_a_picture_that_would_become_huge_is_refused(here: Path, width: int, height: int, size: int) -> None:
    """Of a line of 60 million pixels, 8 sides would have 15 GiB; its file has 60 kB. The others are bombs."""
    (here / "a.png").write_bytes(png(width, height, zlib.compress(bytes(size))))
    with in_time(), refused(UserError, here / "a.png", *["60000000 x 1"] * (height == 1)):
        feed_of(Folder(str(here)), Transforms(image_size=8, upscale=True))


def test_a_text_that_is_a_bomb_is_refused_or_ignored(here: Path) -> None:
    text = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 27)))
    whole = png(8, 8, zlib.compress(bytes(72)))
    (here / "a.png").write_bytes(whole[:33] + text * 4 + whole[33:])
    read_picture(here / "a.png", "memory", Transforms())


@pytest.mark.parametrize("name", ["a.png", "a.jpg"])
def test_postscript_is_never_run(here: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    tool, ran = here / "bin" / "gs", here / "ran"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\ntouch {ran}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    (here / "set").mkdir()
    text = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    (here / "set" / name).write_bytes(text)
    with refused(UserError, here / "set" / name):
        feed_of(Folder(str(here / "set")))
    assert not ran.exists()


# Shards


def read_shard(path: str = "a.tar") -> Tensor:
    found: Tensor = samples(shards(path, index_dir="index"), store="memory", unreadable="skip")
    return found


def expected(seeds: range = range(NUM)) -> Tensor:
    return torch.stack([torch.from_numpy(pixels(k, 24)).permute(2, 0, 1).float() / 127.5 - 1 for k in seeds])


LONG = tarfile.TarInfo("x")
LONG.pax_headers = {"comment": "x" * (2 << 20)}
END = bytes(1024)


def header(name: str, size: bytes = bytes(12), kind: bytes = b"0") -> bytes:
    """Return a header of tar with any bytes for its size, and the right checksum."""
    block = bytearray(tarfile.TarInfo(name).tobuf(tarfile.USTAR_FORMAT))
    block[124:136], block[156:157], block[148:156] = size, kind, b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def pax(records: bytes) -> bytes:
    return header("p", b"%011o\0" % len(records), b"x") + records.ljust(512, b"\0") + header("0.png")


@pytest.mark.parametrize(
    ("content", "facts"),
    [
        (shard()[:-10_000], ["truncated"]),
        (shard()[:2560], ["truncated", "end mark"]),  # between two members
        (shard()[:512], ["truncated", "byte 0"]),
        (shard()[:700], ["truncated"]),
        (shard()[:100], ["truncated"]),
        (END, ["no sample"]),
        (bytes(512), ["no sample"]),
        (header("0.png", b"77777777777\0") + END, ["truncated", "byte 0", 8**11 - 1]),
        (header("0.png", b"\x80" + b"\xff" * 11) + END, ["truncated", "byte 0"]),
        (header("0.png", b"\xff" * 12) + END, ["byte 0", "negative"]),
        (header("0.png", b"-0000000001\0") + END, ["byte 0", "negative"]),
        (header("0.png", b"+0000000001\0") + END, ["byte 0"]),
        (header("0.png", b"0_1\0".ljust(12, b"\0")) + END, ["byte 0"]),
        (header("0.png", kind=b"S") + END, ["0.png", "sparse"]),
        (header("0.png", kind=b"M") + END, ["0.png", "'M'"]),
        (header("0.png", kind=b"3") + END, ["0.png", "device"]),
        (header("0.png", kind=b"6") + END, ["0.png", "pipe"]),
        (header("0.png", kind=b"2") + END, ["0.png", "symbolic link", "--dereference"]),
        (header("0.png", kind=b"1") + END, ["0.png", "hard link", "--hard-dereference"]),
        (pax(b"20 GNU.sparse.map=1\n") + END, ["sparse"]),
        (pax(b"12 size=-99\n") + END, ["'-99'"]),
        (pax(b"12 size=999\n") + END[:512], ["truncated", 999]),
        (pax(b"99 path=a\n") + END, ["byte 512", "broken"]),
        (pax(b"0 path=a\n") + END, ["broken"]),
        (pax(b"-3 path=a\n") + END, ["broken"]),
        (tar((LONG, b""), kind=tarfile.PAX_FORMAT), [1 << 20]),
        (tar(member("0.png", picture("png")), member("0.png", picture("png"))), [2, "0.png"]),
        (tar(member("0.png", picture("png")), member("0.PNG", picture("png"))), [2, "0.png"]),
        (tar(member("\x1b[31m.cls"), member("\x1b[31m.cls")), [2, "\\x1b[31m.cls"]),
    ],
)
def test_headers_of_tar_are_one_message(here: Path, content: bytes, facts: list[Any]) -> None:
    (here / "a.tar").write_bytes(content)
    with in_time(), refused(ValueError, "a.tar", *facts) as caught:
        read_shard()
    assert str(caught.value).isprintable()


def test_names_in_a_shard_are_never_paths(here: Path) -> None:
    names = ["../../up.png", "/root.png", "a/../b.png", "con.png", "\x1b[2J\n.png", "\udcff.png"]
    members = (member(name, picture("png", seed=k)) for k, name in enumerate(names))
    (here / "a.tar").write_bytes(tar(*members, kind=tarfile.PAX_FORMAT))
    before = {path for path in here.parent.rglob("*") if "index" not in str(path)}
    data = shards("a.tar", index_dir="index")
    assert torch.equal(samples(data), expected())
    assert {path for path in here.parent.rglob("*") if "index" not in str(path)} == before
    assert all(feed_of(data).describe(index).isprintable() for index in range(len(names)))


def test_a_huge_picture_in_a_sparse_shard_is_not_read(here: Path) -> None:
    (here / "b.tar").write_bytes(header("0.png", b"\x80" + (1 << 39).to_bytes(11, "big")))
    os.truncate("b.tar", (1 << 39) + 2048)
    with in_time(), refused(UserError, "b.tar[0.png]", 1 << 39, 1 << 30):
        read_shard("b.tar")


def test_an_index_that_cannot_be_written_is_reported(here: Path) -> None:
    (here / "a.tar").write_bytes(shard())
    (here / "index").write_text("a file")
    with refused(UserError, "index"):
        read_shard()


# Caches and indices. Who can write one can also forge it: that may hide samples, but not break the reading of others.


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with pictures, a shard, and the cache and the index of them."""
    folder = tmp_path_factory.mktemp("made")
    make_set(folder)
    (folder / "a.tar").write_bytes(shard())
    return folder


@pytest.fixture
def root(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    assert torch.equal(read_shard(), expected())
    assert len(read_set()) == NUM
    return made


def read_set() -> Tensor:
    found: Tensor = samples(Folder("set"), 8, store="disk", unreadable="skip")
    return found


@contextmanager
def restored(path: Path) -> Iterator[None]:
    """Give back a file or folder at the end."""
    whole = path.with_name("whole")
    (shutil.copytree if path.is_dir() else shutil.copy)(path, whole)
    try:
        yield
    finally:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        whole.rename(path)


@given(
    field=st.sampled_from(["shape", "kinds", "unreadable", "undecodable", "checksums"]),
    value=values
    | st.lists(st.integers(-2, 40), max_size=4)
    | st.lists(st.tuples(st.integers(-2, NUM + 2), st.text(max_size=9)), max_size=NUM)
    | st.permutations([3, 8, 8]),
)
@example(field="unreadable", value=[[k, "forged"] for k in range(NUM)])
@HERE
def test_a_forged_cache_is_used_or_made_again(root: Path, field: str, value: Any) -> None:
    (cache,) = (path for path in (root / "cache").iterdir() if path.is_dir())
    with restored(cache):
        about = {**json.loads((cache / "about.json").read_text()), field: value, "digest": ""}
        about["digest"] = hashlib.sha256(json.dumps(about).encode()).hexdigest()
        (cache / "about.json").write_text(json.dumps(about))
        try:
            with in_time():
                found = read_set()
        except UserError as error:
            check_facts(error, f"none of the {NUM} images")
        else:
            assert is_image(found)
            assert found.shape[1:] == (3, 8, 8)


def test_the_lock_of_a_cache_that_is_a_link_is_not_written_through(root: Path, here: Path) -> None:
    (lock,) = (root / "cache").glob("*.lock")
    (here / "mine").write_text("precious")
    with restored(lock):
        lock.unlink()
        lock.symlink_to(here / "mine")
        read_set()
    assert (here / "mine").read_text() == "precious"


COLUMN = st.integers(-3, 40) | st.sampled_from([2**31, 2**62, 2**63 - 1, -(2**63)])


@given(row=st.integers(0, 2 * NUM - 1), column=st.integers(0, 7), value=COLUMN)
@example(row=0, column=3, value=0)
@HERE
def test_a_forged_index_gives_samples_or_one_message(root: Path, row: int, column: int, value: int) -> None:
    (index,) = (root / "index").glob("*.index")
    with restored(index):
        (shard,) = Files(["a.tar"], {}).shards
        known = load(index, shard)
        assert known is not None
        known.table = numpy.array(known.table)
        known.table[row, column] = value
        save(known, shard, index)
        with in_time(), suppress(UserError, ValueError):
            assert read_shard().shape[1:] == (3, 24, 24)


def test_every_changed_value_of_an_index_is_found(root: Path) -> None:
    (index,) = (root / "index").glob("*.index")
    whole = index.read_bytes()
    for place in range(8 + int.from_bytes(whole[:8], "little"), len(whole), 97):
        index.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with logged() as lines:
            assert torch.equal(read_shard(), expected())
        check_one(lines, index.name, "a.tar")


# Data that changes while it is read


@pytest.mark.parametrize("size", [0, 512, 3000])
def test_a_shard_that_is_cut_during_a_training_is_reported(here: Path, size: int) -> None:
    (here / "a.tar").write_bytes(shard())
    feed = feed_of(shards("a.tar", index_dir="index"), store=Store(store="none"), drop_last=False).bind(NUM)
    next(feed.batches(0))
    os.truncate("a.tar", size)
    with in_time(), refused(UserError, "a.tar", "has changed"):
        next(feed.batches(1))


def test_a_shard_that_changes_is_indexed_again_or_reported(here: Path) -> None:
    (here / "a.tar").write_bytes(shard())
    data = shards("a.tar", index_dir="index")
    (here / "a.tar").write_bytes(shard(seeds=range(1, NUM)))
    with refused(StorageError, "a.tar has changed"):
        feed_of(data, store=Store(store="memory"))
    assert torch.equal(read_shard(), expected(range(1, NUM)))
    assert shards("a.tar", index_dir="index").fingerprint() != data.fingerprint()


def test_an_array_that_is_replaced_stays_the_same(here: Path) -> None:
    path = here / "a.npy"
    path.write_bytes(npy(RGB))
    data = Arrays(str(path))
    (here / "other").write_bytes(npy(255 - RGB))
    (here / "other").replace(path)
    for index in range(7):
        assert numpy.array_equal(data.load(index).numpy(), RGB[index].transpose(2, 0, 1))
    path.unlink()
    assert numpy.array_equal(data.load(3).numpy(), RGB[3].transpose(2, 0, 1))


CUT = """
import os
from hookdiff import hookimpl

class Cut:
    @hookimpl
    def before_step(self, loop):
        if loop.progress.position == 3:
            os.truncate("a.npy", 200)
"""


@pytest.mark.parametrize("workers", [0, *wide(1)])
def test_a_run_on_an_array_that_shrinks_ends_with_one_message(
    hookdiff: Any, write_config: Any, user_module: Callable[..., None], workers: int
) -> None:
    numpy.save("a.npy", numpy.zeros((64, 8, 8), "uint8"))
    user_module(f"hd_cut_{workers}", CUT)
    data = {"source": "array", "path": "a.npy", "store": "none", "workers": workers}
    run = {"steps": 40, "batch_size": 4, "log_every": 1, "plugins": [f"hd_cut_{workers}:Cut"]}
    before = multiprocessing.active_children()
    code, _, err = hookdiff("run", write_config(run=run, data=data))
    assert code == 2, err
    assert "a.npy[" in err
    assert set(multiprocessing.active_children()) <= set(before)


@pytest.mark.parametrize("method", ["fork", *wide("spawn")])
def test_workers_read_the_same_array(here: Path, method: str) -> None:
    (here / "a.npy").write_bytes(npy(RGB))
    expected = torch.from_numpy(RGB).permute(0, 3, 1, 2).float() / 127.5 - 1
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method(method, force=True)
    try:
        with closing(feed_of(Arrays("a.npy"), store=Store(store="none"), workers=1, drop_last=False)) as feed:
            feed.bind(2)
            for epoch in range(2):
                for batch in feed.batches(epoch):
                    assert torch.equal(batch.inputs, expected[batch.indices])
    finally:
        multiprocessing.set_start_method(before, force=True)
