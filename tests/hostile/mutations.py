"""Ways to damage a file and the values in it; formats.py has the right outcome for each format."""

import logging
import os
import pickle
import re
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, settings, strategies as st

from tests.conftest import PATIENCE

HERE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # all examples have one working directory
CANARY, KEPT = "exploded", "kept"  # files in the working directory: a pickle has been read; the whole file


class Bomb:
    """Makes the file CANARY when it is read from a pickle."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path(CANARY),)


def flipped(whole: bytes, place: int) -> bytes:
    """Change the highest bit of a byte: text in ASCII is then no UTF-8."""
    changed = bytearray(whole)
    changed[place] ^= 0x80
    return bytes(changed)


# The content of the file becomes another.
CONTENT: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda whole: b"",
    "first byte": lambda whole: whole[:1],
    "half": lambda whole: whole[: len(whole) // 2],
    "without the last byte": lambda whole: whole[:-1],
    "without the first byte": lambda whole: whole[1:],
    "a byte more": lambda whole: whole + b"x",
    "first bit": lambda whole: flipped(whole, 0),
    "a bit in the middle": lambda whole: flipped(whole, len(whole) // 2),
    "a bit at the end": lambda whole: flipped(whole, -1),
    "zeros": lambda whole: bytes(len(whole)),
    "zeros from the middle": lambda whole: whole[: len(whole) // 2].ljust(len(whole), b"\0"),  # lost blocks of a disk
    "halves swapped": lambda whole: whole[len(whole) // 2 :] + whole[: len(whole) // 2],
    "a giant length": lambda whole: b"\xff" * 8 + whole[8:],
    "a length of zero": lambda whole: bytes(8) + whole[8:],
    "no UTF-8": lambda whole: b"\xff{",
    "a surrogate": lambda whole: b'"\xed\xa0\x80"',
    "text": lambda whole: b"version https://git-lfs.github.com/spec/v1\n" * 3,
    "list": lambda whole: b"[]",
    "object": lambda whole: b"{}",
    "null": lambda whole: b"null",
    "NaN": lambda whole: b"NaN",
    "deep": lambda whole: b"x = " * (whole[:1] == b"x") + b"[" * 100_000,
    "deep objects": lambda whole: b'{"a": ' * 5000,
    "deep keys": lambda whole: b"a." * 50_000 + b"b = 1",
    "digits": lambda whole: b"x = " * (whole[:1] == b"x") + b"9" * 100_000,
    "text for numbers": lambda whole: re.sub(rb"\d+", b'"x"', whole) if whole.isascii() else whole[1:],
    "another number": lambda whole: re.sub(rb"\d(?=\D*$)", b"8", whole) if whole.isascii() else whole[1:],
    "pickle": lambda whole: pickle.dumps(Bomb()),
    "empty zip": lambda whole: b"PK\5\6" + bytes(18),
}


def replace(path: Path, kind: str, outside: Path | None = None) -> None:
    """Put a thing of this `kind` in the place of `path`; `outside` has what links out of the folder lead to."""
    if path.parent.is_symlink() or not path.parent.is_dir():
        path.parent.unlink(missing_ok=True)
        path.parent.mkdir(parents=True)
    aside = path.with_name(f"{path.name}-aside")
    if os.path.lexists(path):
        path.rename(aside)
    outside = outside or path.parent / "outside"
    links = {
        "zero": Path("/dev/zero"),
        "file outside": outside / "file",
        "folder outside": outside / "folder",
        "its copy outside": outside / "run" / path.name,
        "nothing outside": outside / "new",
        "a link to itself": path,
        "its copy inside": aside,
    }
    if kind in links:
        path.symlink_to(links[kind])
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        here = os.open(path.parent, os.O_RDONLY)  # the path of a socket has at most 108 bytes
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{here}/{path.name}"[:107])
        os.close(here)
    elif kind == "device":
        try:
            os.mknod(path, 0o20666, os.makedev(1, 5))  # as /dev/zero
        except PermissionError:
            path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "damaged":
        path.write_bytes(b"\xff{")
    elif kind == "unreadable":
        path.write_bytes(aside.read_bytes())
        path.chmod(0)


# The file becomes another thing.
THINGS = ("gone", "pipe", "socket", "device", "zero", "folder", "nothing outside", "a link to itself")
LINK = "its copy inside"  # a link to the file, under another name
THINGS = (*THINGS, *["unreadable"] * bool(os.geteuid()), LINK)
HUGE = "huge"  # a sparse file of a tebibyte, for formats that know how long their files can be


@contextmanager
def mutated(path: Path, mutation: str) -> Iterator[None]:
    """Damage the file, or the whole folder, at `path`, and give it back at the end; meanwhile a copy is KEPT."""
    (shutil.copytree if path.is_dir() else shutil.copy2)(path, KEPT)
    try:
        if mutation in CONTENT:
            path.write_bytes(CONTENT[mutation](path.read_bytes()))
        elif mutation == HUGE:
            os.truncate(path, 1 << 40)
        else:
            replace(path, mutation)
        yield
    finally:
        for other in (path, path.with_name(f"{path.name}-aside")):
            remove(other)
        shutil.move(KEPT, path)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def in_time() -> Iterator[None]:
    """Fail if the `with` hangs, also in a call of the system."""

    def ring(*_: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def logged() -> Iterator[list[str]]:
    """Collect the warnings in the log."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("hookdiff")
    log.addHandler(handler)
    yield lines
    log.removeHandler(handler)


def listing(folder: Path) -> dict[str, Any]:
    """Return each file below `folder` with its kind, content and time; links are not followed."""
    found = {}
    for path in sorted([folder, *folder.rglob("*")]):
        state = path.lstat()
        is_file = path.is_file() and not path.is_symlink() and state.st_size < 1 << 30
        found[str(path)] = state.st_mode, path.read_bytes() if is_file else None, state.st_mtime_ns
    return found


NUMBERS = [0, 1, 2, 255, 256, 65535, 65536, 2**24, 2**31 - 1, 2**31, 2**32 - 1]


@st.composite
def changes(draw: st.DrawFn, whole: bytes) -> bytes:
    """Draw a change of some bytes."""
    if not whole:
        return whole
    begin = draw(st.integers(0, len(whole) - 1))
    end = draw(st.integers(begin + 1, min(len(whole), begin + 4096)))
    other = draw(st.binary(min_size=1, max_size=64))
    number = draw(st.sampled_from(NUMBERS)).to_bytes(4, draw(st.sampled_from(["little", "big"])))
    return {
        "zeros": whole[:begin] + bytes(end - begin) + whole[end:],
        "random": whole[:begin] + (other * 64)[: end - begin] + whole[end:],
        "cut": whole[:begin],
        "remove": whole[:begin] + whole[end:],
        "insert": whole[:begin] + other + whole[begin:],
        "flip": whole[:begin] + bytes([whole[begin] ^ 1 << other[0] % 8]) + whole[begin + 1 :],
        "swap": whole[begin:] + whole[:begin],
        "number": whole[:begin] + number + whole[begin + 4 :],
    }[draw(st.sampled_from(["zeros", "random", "cut", "remove", "insert", "flip", "swap", "number"]))]


# Values of JSON and TOML

scalars = st.none() | st.booleans() | st.integers() | st.integers(-8, 64) | st.floats() | st.text(max_size=8)
extremes = st.sampled_from(
    [2**63, -(2**63), 10**400, -1, 0, float("inf"), float("nan"), 1e308, "", "\x1b[31m", "0", "unet"]
)
values: Any = st.recursive(
    scalars | extremes,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values in a tree of JSON."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [*([path] if path else []), *(place for key, value in items for place in places(value, (*path, key)))]


def forge_value(data: st.DataObject, root: Any, value: st.SearchStrategy[Any] = values) -> None:
    """Replace, remove or add a value at a random place of a tree of JSON."""
    place = data.draw(st.sampled_from(places(root)))
    for key in place[:-1]:
        root = root[key]
    change = data.draw(st.sampled_from(["replace", "remove", "add"]))
    if change == "remove":
        del root[place[-1]]
    elif change == "add" and isinstance(root[place[-1]], dict):
        root[place[-1]][data.draw(st.text(max_size=5))] = data.draw(value)
    else:
        root[place[-1]] = data.draw(value)


# Tensors

TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "removed": lambda tensor: None,
    "empty": lambda tensor: tensor.new_zeros(0),
    "one number": lambda tensor: tensor.new_ones(1),
    "scalar": lambda tensor: tensor.new_ones(()),
    "longer": lambda tensor: tensor.new_ones(*tensor.shape, 2),
    "shorter": lambda tensor: tensor.flatten()[:-1].clone(),
    "flat": lambda tensor: tensor.flatten().clone() if tensor.dim() != 1 else tensor[:, None].clone(),
    "half": lambda tensor: tensor.half() if tensor.is_floating_point() else tensor.int(),
    "double": lambda tensor: tensor.double(),
    "integers": lambda tensor: torch.ones_like(tensor, dtype=[torch.int64, torch.uint8][tensor.dtype == torch.int64]),
    "nan": lambda tensor: torch.full_like(tensor, float("nan") if tensor.is_floating_point() else -1),
    "infinite": lambda tensor: torch.full_like(tensor, float("inf") if tensor.is_floating_point() else 2**62),
    "negative": lambda tensor: -tensor.abs() - 1,
    "zeros": torch.zeros_like,
}


def forge_tensors(data: st.DataObject, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `tensors`, of which one to three are others or are left out, and one may be added."""
    for name in data.draw(st.lists(st.sampled_from([*sorted(tensors), "added"]), min_size=1, max_size=3, unique=True)):
        forged = TENSORS[data.draw(st.sampled_from(sorted(TENSORS)))](tensors.get(name, torch.ones(3)))
        tensors = {**{key: value for key, value in tensors.items() if key != name}}
        tensors |= {} if forged is None else {name: forged}
    return tensors
