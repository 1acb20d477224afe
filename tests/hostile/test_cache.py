"""Damaged and forged caches of pixels: each is made again, with a line that says so, or gives its samples."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, strategies as st
from PIL import Image
from torch import Tensor

from hookdiff import Feed, UserError
from hookdiff.data import Folder, Store, Transforms
from tests.conftest import check_facts, pixels
from tests.hostile.test_run_dir import in_time, replace

NUM, SIDE = 12, 6


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """A folder with pictures and a whole cache of their pixels, and the samples."""
    root = tmp_path_factory.mktemp("cache")
    (root / "set").mkdir()
    for k in range(NUM):
        Image.fromarray(pixels(k)).save(root / "set" / f"{k:02}.png")
    return root, samples(root)


def samples(root: Path) -> Tensor:
    feed = Feed(
        Folder(str(root / "set")),
        Transforms(image_size=SIDE),
        Store(store="disk", cache_dir=str(root / "cache"), unreadable="skip"),
    )
    return torch.cat([batch.inputs for batch in feed.unaugmented(torch.arange(NUM))])


def cache_of(root: Path) -> Path:
    (found,) = (path for path in (root / "cache").iterdir() if path.is_dir())
    return found


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


def assert_made_again(made: tuple[Path, Tensor], damage: Callable[[Path], object]) -> None:
    """Damage the cache, and assert that it is made again, with the same samples and one line, and then used."""
    root, expected = made
    cache = cache_of(root)
    whole = root / "whole"
    shutil.copytree(cache, whole)
    try:
        damage(cache)
        with in_time(), logged() as lines:
            assert torch.equal(samples(root), expected)
        assert len(lines) == 1
        check_facts(lines[0], cache)
        with in_time(), logged() as lines:
            assert torch.equal(samples(root), expected)
        assert not lines
    finally:
        for path in (root / "cache").iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        whole.rename(cache)


@st.composite
def changes(draw: st.DrawFn, size: int) -> Callable[[bytes], bytes]:
    """Draw a function that changes some of `size` bytes."""
    begin = draw(st.integers(0, size - 1))
    end = draw(st.integers(begin + 1, min(size, begin + 4096)))
    kind = draw(st.sampled_from(["zeros", "random", "cut", "remove", "insert", "flip", "empty"]))
    other = draw(st.binary(min_size=1, max_size=64))

    def change(whole: bytes) -> bytes:
        return {
            "zeros": whole[:begin] + bytes(end - begin) + whole[end:],
            "random": whole[:begin] + (other * 64)[: end - begin] + whole[end:],
            "cut": whole[:begin],
            "remove": whole[:begin] + whole[end:],
            "insert": whole[:begin] + other + whole[begin:],
            "flip": whole[:begin] + bytes([whole[begin] ^ 1 << other[0] % 8]) + whole[begin + 1 :],
            "empty": b"",
        }[kind]

    return change


def means(content: bytes) -> Any:
    """Return the values in JSON, which may be written with other spaces, and any other content as it is."""
    try:
        return repr(json.loads(content))
    except (ValueError, RecursionError):
        return content


@given(data=st.data(), name=st.sampled_from(["pixels", "about.json"]))
def test_changed_bytes_are_found(made: tuple[Path, Tensor], data: st.DataObject, name: str) -> None:
    whole = (cache_of(made[0]) / name).read_bytes()
    changed = data.draw(changes(len(whole)))(whole)
    if means(changed) != means(whole):
        assert_made_again(made, lambda cache: (cache / name).write_bytes(changed))


JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-3, 20) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)


@given(content=JSON)
def test_any_json_is_no_cache(made: tuple[Path, Tensor], content: Any) -> None:
    assert_made_again(made, lambda cache: (cache / "about.json").write_text(json.dumps(content)))


@pytest.mark.parametrize("content", ["[" * 100_000, "9" * 100_000, '{"shape": ' * 5000, "\ud800", "nan", "\0"])
def test_absurd_json_is_no_cache(made: tuple[Path, Tensor], content: str) -> None:
    assert_made_again(made, lambda cache: (cache / "about.json").write_bytes(content.encode("utf-8", "surrogatepass")))


@pytest.mark.parametrize("name", ["pixels", "about.json"])
def test_a_huge_file_is_not_read(made: tuple[Path, Tensor], name: str) -> None:
    assert_made_again(made, lambda cache: os.truncate(cache / name, 1 << 40))


def test_zeroed_pixels_are_not_trained_on(made: tuple[Path, Tensor]) -> None:
    assert_made_again(made, lambda cache: (cache / "pixels").write_bytes(bytes((cache / "pixels").stat().st_size)))


@given(
    name=st.sampled_from(["pixels", "about.json", "."]),
    kind=st.sampled_from(["pipe", "socket", "device", "zero", "a link to itself", "nothing outside"]),
)
@example(name="pixels", kind="folder")
@example(name="about.json", kind="folder")
def test_special_files_are_not_opened(made: tuple[Path, Tensor], name: str, kind: str) -> None:
    assert_made_again(made, lambda cache: replace(cache / name, kind, made[0]))


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "folder", "a link to itself"])
def test_a_lock_that_is_no_file_is_refused(made: tuple[Path, Tensor], kind: str) -> None:
    root, expected = made
    lock = cache_of(root).with_suffix(".lock")
    lock.unlink(missing_ok=True)
    replace(lock, kind, root)
    with in_time(), pytest.raises(UserError) as caught:
        samples(root)
    check_facts(caught.value, lock)
    lock.rmdir() if lock.is_dir() else lock.unlink()
    assert torch.equal(samples(root), expected)


def test_a_lock_that_is_a_link_is_not_written_through(made: tuple[Path, Tensor], tmp_path: Path) -> None:
    mine, lock = tmp_path / "mine", cache_of(made[0]).with_suffix(".lock")
    mine.write_text("precious")
    lock.unlink(missing_ok=True)
    lock.symlink_to(mine)
    samples(made[0])
    lock.unlink()
    assert mine.read_text() == "precious"


def forged(cache: Path, field: str, value: Any) -> None:
    """Change a field of about.json, and make its digest right again if that is possible."""
    about = json.loads((cache / "about.json").read_text())
    about = {**about, field: value, "digest": ""}
    about["digest"] = hashlib.sha256(json.dumps(about).encode()).hexdigest()
    (cache / "about.json").write_text(json.dumps(about))


FIELDS = ["shape", "kinds", "unreadable", "undecodable", "checksums"]


@given(
    field=st.sampled_from(FIELDS),
    value=JSON
    | st.lists(st.integers(-2, 40), max_size=4)
    | st.lists(st.tuples(st.integers(-2, NUM + 2), st.text(max_size=9)), max_size=NUM)
    | st.permutations([3, SIDE, SIDE]),
)
@example(field="unreadable", value=[[k, "forged"] for k in range(NUM)])
def test_a_forged_cache_is_used_or_made_again(made: tuple[Path, Tensor], field: str, value: Any) -> None:
    """Who can write a cache can also forge it: that may hide samples, and may not break the reading of others."""
    root, expected = made
    cache, whole = cache_of(root), root / "whole"
    shutil.copytree(cache, whole)
    forged(cache, field, value)
    try:
        with in_time():
            found = samples(root)
        assert found.shape == expected.shape
        assert found.min() >= -1
        assert found.max() <= 1
    except UserError as error:
        check_facts(error, f"none of the {NUM} images")
    finally:
        shutil.rmtree(cache)
        whole.rename(cache)
