import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

from hookdiff import Feed, UserError
from hookdiff.images import Folder, Store, Transforms, feed_of
from tests.conftest import PATIENCE, as_list, refused
from tests.images.conftest import noise, write_folder

CPU = torch.device("cpu")
RANDOM = Transforms(image_size=8, resize=9, flip=True, color_jitter=(0.4, 0.4, 0.4, 0.2))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pictures")
    write_folder(root / "set", 23, size=(14, 11))
    return root


def make_feed(root: Path, store: Any, workers: int = 0, batch_size: int = 5, seed: int = 0, **options: Any) -> Feed:
    kept = Store(store=store, cache_dir=str(root / "cache"))
    options.setdefault("transforms", RANDOM)
    feed = feed_of(Folder(str(root / "set")), store=kept, workers=workers, drop_last=False, **options)
    return feed.bind(batch_size, seed)


def rows(batches: Any) -> dict[int, tuple[Tensor, int]]:
    found: dict[int, tuple[Tensor, int]] = {}
    for batch in batches:
        pairs = zip(batch.inputs, as_list(batch.labels), strict=True)
        found |= dict(zip(as_list(batch.indices), pairs, strict=True))
    return found


def assert_equal(one: dict[int, tuple[Tensor, int]], other: dict[int, tuple[Tensor, int]]) -> None:
    assert list(one) == list(other)
    for index, (image, label) in one.items():
        assert torch.equal(image, other[index][0])
        assert label == other[index][1]


@given(
    epoch=st.integers(0, 3),
    start=st.integers(0, 22),
    batch_size=st.integers(1, 23),
    seed=st.integers(0, 2),
    balanced=st.booleans(),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_store_changes_no_pixel(
    root: Path, epoch: int, start: int, batch_size: int, seed: int, balanced: bool
) -> None:
    whole = rows(make_feed(root, "memory", seed=seed, balanced=balanced).batches(epoch))
    for store in ("memory", "disk", "none"):
        feed = make_feed(root, store, batch_size=batch_size, seed=seed, balanced=balanced)
        order = feed.order(epoch)[start:].tolist()
        assert_equal(rows(feed.batches(epoch, start)), {index: whole[index] for index in dict.fromkeys(order)})


def test_workers_change_no_pixel_and_stay_for_the_next_epoch(root: Path) -> None:
    memory, workers = make_feed(root, "memory"), make_feed(root, "none", workers=2)
    others = multiprocessing.active_children()

    def pids() -> set[int | None]:
        return {process.pid for process in multiprocessing.active_children() if process not in others}

    running = []
    for epoch in range(3):
        assert_equal(rows(workers.batches(epoch)), rows(memory.batches(epoch)))
        running.append(pids())
    assert (len(running[0]), running[1:]) == (2, running[:1] * 2)
    half = workers.batches(3)
    next(half)
    half.close()  # the workers of an abandoned epoch are not used again
    assert_equal(rows(workers.batches(3)), rows(memory.batches(3)))
    assert_equal(rows(workers.batches(1, 10)), rows(memory.batches(1, 10)))
    assert len(pids()) == 2
    assert not pids() & running[0]


def test_two_epochs_may_be_read_at_once(root: Path) -> None:
    memory, workers = make_feed(root, "memory"), make_feed(root, "none", workers=1)
    pairs = list(zip(workers.batches(0), workers.batches(1), strict=True))
    for epoch in range(2):
        assert_equal(rows(pair[epoch] for pair in pairs), rows(memory.batches(epoch)))


SPAWN = """
import multiprocessing, sys, torch
from hookdiff.images import Folder, Store, Transforms, feed_of

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    transforms = Transforms(image_size=8, flip=True)
    feeds = [
        feed_of(Folder(sys.argv[1]), transforms, Store(store=store, unreadable="skip"), workers=workers)
        for store, workers in (("memory", 0), ("none", 1))
    ]
    for feed in feeds:
        feed.bind(8)
    for epoch in range(2):
        for one, other in zip(*(feed.batches(epoch) for feed in feeds), strict=True):
            assert torch.equal(one.inputs, other.inputs) and torch.equal(one.labels, other.labels)
    print("same")
"""


@pytest.mark.wide
def test_workers_may_be_spawned(root: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SPAWN)
    done = subprocess.run([sys.executable, script, root / "set"], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (0, "same\n"), done.stderr


@pytest.fixture
def own(tmp_path: Path) -> tuple[Path, list[Path]]:
    return tmp_path, write_folder(tmp_path / "set", 6)


def caches(root: Path) -> list[Path]:
    return sorted(path for path in (root / "cache").iterdir() if path.is_dir())


def test_a_cache_is_used_until_a_file_changes(own: tuple[Path, list[Path]]) -> None:
    root, paths = own
    first = rows(make_feed(root, "disk").batches(0))
    (cache,) = caches(root)
    made = cache.stat().st_mtime_ns
    assert_equal(rows(make_feed(root, "disk").batches(0)), first)
    assert (caches(root), cache.stat().st_mtime_ns) == ([cache], made)
    noise(99, 12, 9).save(paths[3])
    os.utime(paths[3], ns=(1, 1))
    after = rows(make_feed(root, "disk").batches(0))
    assert_equal(after, rows(make_feed(root, "memory").batches(0)))
    assert [index for index in after if not torch.equal(after[index][0], first[index][0])] == [3]
    make_feed(root, "disk", transforms=Transforms(image_size=8, resize=9))
    assert len(caches(root)) == 2  # random transforms make no other cache
    make_feed(root, "disk", transforms=Transforms(image_size=8))
    assert len(caches(root)) == 3


def test_several_threads_may_make_the_same_cache(own: tuple[Path, list[Path]]) -> None:
    root, _ = own
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(make_feed(root, "disk"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(found), len(caches(root))) == (4, 1)
    for feed in found:
        assert_equal(rows(feed.batches(0)), rows(found[0].batches(0)))


def test_a_cache_remembers_unreadable_files(own: tuple[Path, list[Path]]) -> None:
    root, paths = own
    paths[1].write_bytes(b"nothing")
    paths[4].write_bytes(paths[4].read_bytes()[:-80])
    kept = Store(store="disk", unreadable="skip", cache_dir=str(root / "cache"))
    for _ in range(2):
        feed = feed_of(Folder(str(root / "set")), store=kept)
        assert (feed.training.tolist(), list(feed.reader.prepared.survey.undecodable)) == ([0, 2, 3, 4, 5], [4])
    with refused(UserError, 2, 6, paths[1], paths[4]):
        make_feed(root, "disk")


def test_a_cache_that_cannot_be_written_is_refused(own: tuple[Path, list[Path]]) -> None:
    root, _ = own
    (root / "cache").write_text("a file")
    with refused(UserError, root / "cache"):
        make_feed(root, "disk")


def test_the_default_folder_of_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert Store().folder == Path("/somewhere/hookdiff")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert Store().folder == Path.home() / ".cache" / "hookdiff"
    assert Store(cache_dir="~/mine").folder == Path.home() / "mine"
