"""Damaged and forged .npy and .npz files: each gives the values that numpy reads, or one message with its name."""

import io
import os
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings, strategies as st

from hookdiff import Feed, UserError
from hookdiff.data import Store
from hookdiff_array import Arrays
from tests.conftest import check_facts, finish, refused
from tests.hostile.test_cache import changes
from tests.hostile.test_run_dir import in_time

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
RGB = numpy.random.default_rng(0).integers(0, 256, (7, 5, 6, 3), dtype=numpy.uint8)
HERE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    numpy.save(out, array, allow_pickle=True)
    return out.getvalue()


def npz(compression: int = zipfile.ZIP_DEFLATED, **members: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), content, compression)  # without the time of day
    return out.getvalue()


def read(path: Path, **options: Any) -> bool:
    """Return whether all images can be read. Assert that they are right, or that one message names the file."""
    with in_time():
        try:
            data = Arrays(str(path), **options)
            (batch,) = Feed(data, store=Store(store="none")).unaugmented(torch.arange(len(data)))
        except (UserError, ValueError) as error:  # the table [data] turns a ValueError of a source into a UserError
            check_facts(error, path)
            return False
    if path.suffix == ".npy":
        expected = numpy.load(path)
    else:  # numpy takes a zip with a damaged first byte for another format
        expected = numpy.load(io.BytesIO(zipfile.ZipFile(path).read(f"{data.name}.npy")))
    if expected.dtype == numpy.uint8 and "value_range" not in options and expected.shape[-1] not in (2, 4):
        found = (batch.inputs.double() + 1).mul(127.5).round().numpy()
        if data.layout == "n h w c":
            found = found.transpose(0, 2, 3, 1)
        assert numpy.array_equal(found.reshape(expected.shape), expected)
    assert -1 <= batch.inputs.min() <= batch.inputs.max() <= 1
    assert data.labels is None or -1 <= data.labels.min() <= data.labels.max() < 2**24
    return True


LABELS = numpy.arange(7)


@given(data=st.data(), kind=st.sampled_from(["npy", "deflated", "stored"]))
@HERE
def test_changed_bytes_of_an_array(tmp_path: Path, data: st.DataObject, kind: str) -> None:
    packing = zipfile.ZIP_STORED if kind == "stored" else zipfile.ZIP_DEFLATED
    whole = npy(RGB) if kind == "npy" else npz(packing, images=npy(RGB), labels=npy(LABELS))
    for _ in range(data.draw(st.integers(1, 2))):
        if whole:
            whole = data.draw(changes(len(whole)))(whole)
    path = tmp_path / ("a.npy" if kind == "npy" else "a.npz")
    path.write_bytes(whole)
    if kind == "npy" or not read(path):
        read(path, value_range=(0.0, 255.0))


DTYPES = [
    "|u1",
    "<u2",
    ">u2",
    "<f4",
    "<f8",
    "<f2",
    "|b1",
    "|i1",
    "<i8",
    "<u8",
    "<c8",
    "|O",
    "<U3",
    "|S0",
    "|V4",
    "<M8[s]",
]
DIMENSION = st.integers(0, 8) | st.sampled_from([-1, 2**31, 2**32, 2**62, 2**63 - 1, 2**64, 10**30])
TEXTS = [
    *(
        "{}",
        "",
        "[",
        "(" * 3000,
        "-" * 9000,
        "{[]: 1}",
        "{1: 2, 'a': 3}",
        "__import__('os')",
        "{'descr': []}",
        "\0",
        "9" * 9000,
    ),
    "{'descr': [('a', '|u1'), ('b', '|O')], 'fortran_order': False, 'shape': (2, 3, 3)}",
    "{'descr': '|u1', 'fortran_order': False, 'shape': 9}",
    "{'descr': '|u1', 'fortran_order': 1, 'shape': (3, 3, 3)}",
    "{'descr': '|u1', 'fortran_order': False, 'shape': (3L, 3L, 3L)}",
]


@given(
    shape=st.lists(DIMENSION, max_size=5).map(tuple),
    dtype=st.sampled_from(DTYPES) | st.text(max_size=4),
    fortran=st.booleans(),
    text=st.none() | st.sampled_from(TEXTS) | st.text(max_size=60),
    version=st.sampled_from([(1, 0), (2, 0), (3, 0), (0, 0), (9, 9)]),
    length=st.none() | st.sampled_from([0, 1, 2**16 - 1, 2**32 - 1]),
    num_bytes=st.sampled_from([0, 1, 27, 630, 5000]),
    packed=st.booleans(),
    ranged=st.booleans(),
)
@example((2**62, 2, 2), "|u1", False, None, (1, 0), None, 630, True, False)
@example((0, 2**62, 2**62), "|u1", False, None, (1, 0), None, 630, False, False)
@example((1, 2**31, 1), "|u1", False, None, (1, 0), None, 630, False, False)
@example((0, 8, 8), "|u1", False, None, (1, 0), None, 630, False, False)
@HERE
def test_a_forged_header(
    tmp_path: Path,
    shape: Any,
    dtype: str,
    fortran: bool,
    text: str | None,
    version: tuple[int, int],
    length: int | None,
    num_bytes: int,
    packed: bool,
    ranged: bool,
) -> None:
    text = f"{{'descr': {dtype!r}, 'fortran_order': {fortran}, 'shape': {shape}, }}" if text is None else text
    head = text.encode("utf-8", "surrogatepass") + b"\n"
    known = min(len(head), 2**16 - 1) if length is None else length
    size = struct.pack("<H", known & 0xFFFF) if version == (1, 0) else struct.pack("<I", known)
    whole = b"\x93NUMPY" + bytes(version) + size + head + (bytes(range(256)) * 20)[:num_bytes]
    path = tmp_path / ("a.npz" if packed else "a.npy")
    path.write_bytes(npz(images=whole) if packed else whole)
    read(path, **({"value_range": (0.0, 255.0)} if ranged else {}))


@given(data=st.data())
@HERE
def test_a_forged_archive(tmp_path: Path, data: st.DataObject) -> None:
    """Sizes, flags, methods and places in the directory of a zip are absurd, and its checksums are right."""
    whole = bytearray(npz(zipfile.ZIP_STORED, images=npy(RGB), labels=npy(LABELS)))
    for _ in range(data.draw(st.integers(1, 3))):
        record = data.draw(st.sampled_from([whole.index(b"PK\1\2"), whole.rindex(b"PK\1\2"), whole.rindex(b"PK\5\6")]))
        at = record + data.draw(st.integers(4, 20))
        number = data.draw(st.sampled_from([0, 1, 9, 2**31, 2**32 - 1]) | st.integers(0, 2**32 - 1))
        field = struct.pack("<I", number)[: data.draw(st.sampled_from([2, 4]))]
        whole[at : at + len(field)] = field
    (tmp_path / "a.npz").write_bytes(bytes(whole))
    read(tmp_path / "a.npz")


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
        b"PK\5\6" + bytes(18),
        npy(RGB),
    ],
)
def test_an_archive_that_holds_no_images_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.npz").write_bytes(content)
    assert not read(tmp_path / "a.npz")


def test_a_folder_in_an_archive_is_no_array(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.mkdir("images.npy")
        archive.writestr("readme.txt", "hello")
    with refused(ValueError, tmp_path / "a.npz"):
        Arrays(str(tmp_path / "a.npz"))
    with refused(ValueError, tmp_path / "a.npz", "'readme.txt'"):
        Arrays(str(tmp_path / "a.npz"), images="readme.txt")


def test_an_array_larger_than_memory_is_refused(tmp_path: Path) -> None:
    """The header and the directory agree on 4 TiB; only the file is short."""
    whole = npy(numpy.zeros((1, 8, 8), "uint8"))
    head = whole[:128].replace(b"(1, 8, 8)", b"(%d, 8, 8)" % 2**36)[:128]
    head = head[:-1].rstrip().ljust(127) + b"\n"
    content = bytearray(npz(zipfile.ZIP_STORED, images=head + whole[128:]))
    at = content.index(b"PK\1\2")
    extra = struct.pack("<HHQ", 1, 8, 2**42 + 128)
    name_length = struct.unpack_from("<H", content, at + 28)[0]
    struct.pack_into("<I", content, at + 24, 2**32 - 1)
    struct.pack_into("<H", content, at + 30, len(extra))
    content[at + 46 + name_length : at + 46 + name_length] = extra
    end = content.rindex(b"PK\5\6")
    struct.pack_into("<I", content, end + 12, struct.unpack_from("<I", content, end + 12)[0] + len(extra))
    (tmp_path / "a.npz").write_bytes(bytes(content))
    with in_time(), refused(ValueError, tmp_path / "a.npz", "4096.0"):
        Arrays(str(tmp_path / "a.npz"))


def test_images_of_a_sparse_file_are_too_large(tmp_path: Path) -> None:
    head = npy(numpy.zeros((1, 8, 8), "uint8"))[:128].replace(b"(1, 8, 8)", b"(2, %d, 8)" % 2**36)
    (tmp_path / "a.npy").write_bytes(head[:-1].rstrip()[:127].ljust(127) + b"\n")
    os.truncate(tmp_path / "a.npy", 2**40 + 128)
    with in_time(), refused(ValueError, tmp_path / "a.npy", 2**39):
        Arrays(str(tmp_path / "a.npy"))


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
def test_any_value_range(tmp_path: Path, low: float, high: float, dtype: str) -> None:
    numpy.save(tmp_path / "a.npy", RGB.astype(dtype))
    try:
        data = Arrays(str(tmp_path / "a.npy"), value_range=(low, high))
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


def cut_then_read(path: Path) -> None:
    data = Arrays(str(path))
    assert data.load(6) is not None
    os.truncate(path, path.stat().st_size - 10)
    with pytest.raises(UserError) as caught:
        list(Feed(data, store=Store(store="none")).unaugmented(torch.arange(7)))
    check_facts(caught.value, f"{path}[6]")


def test_a_file_that_shrinks_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(npy(RGB))
    cut_then_read(tmp_path / "a.npy")


def test_a_file_that_is_replaced_stays_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(npy(RGB))
    data = Arrays(str(path))
    (tmp_path / "other").write_bytes(npy(255 - RGB))
    (tmp_path / "other").replace(path)
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

CONFIG = """
[run]
steps = 40
batch_size = 4
device = "cpu"
log_every = 1
plugins = ["hd_cut:Cut"]
[data]
source = "array"
path = "a.npy"
store = "none"
workers = {workers}
[model]
use = "unet"
channels = 8
num_res_blocks = 1
head_dim = 8
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_on_a_file_that_shrinks_ends_with_one_message(
    tmp_path: Path, start: Callable[..., Any], workers: int
) -> None:
    numpy.save(tmp_path / "a.npy", numpy.zeros((64, 8, 8), "uint8"))
    (tmp_path / "hd_cut.py").write_text(CUT)
    (tmp_path / "c.toml").write_text(CONFIG.format(workers=workers))
    code, _, err = finish(start(tmp_path, "run", "c.toml"))
    assert (code, "Traceback" in err) == (2, False), err
    assert "a.npy[" in err


SPAWN = """
import multiprocessing, numpy, sys, torch
from hookdiff import Feed
from hookdiff.data import Store
from hookdiff_array import Arrays

if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[2])
    expected = torch.from_numpy(numpy.load(sys.argv[1])).permute(0, 3, 1, 2).float() / 127.5 - 1
    for store, workers in (("memory", 0), ("none", 2)):
        feed = Feed(Arrays(sys.argv[1]), store=Store(store=store), workers=workers, drop_last=False).bind(2)
        for epoch in range(2):
            for batch in feed.batches(epoch):
                assert torch.equal(batch.inputs, expected[batch.indices])
    print("same")
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_the_same(tmp_path: Path, method: str) -> None:
    (tmp_path / "a.npy").write_bytes(npy(RGB))
    (tmp_path / "script.py").write_text(SPAWN)
    words = [sys.executable, tmp_path / "script.py", tmp_path / "a.npy", method]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "same\n"), done.stderr
