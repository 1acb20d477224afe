"""Hostile run directories: pipes, devices and links in place of files, and directories that go away during a run.

Every case ends in time, with the weights of an undisturbed run or with one error of the user. Nothing outside of the
run directory changes.
"""

import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from attrs import define
from hypothesis import event, given, settings, strategies as st

from hookdiff import ConfigError, Loop, StorageError, UserError, hookimpl
from hookdiff.cli.summary import run_summary
from hookdiff.experiment.toml_file import read_toml
from hookdiff.run_dir.metrics_jsonl import read_metrics
from hookdiff.testing.compare import assert_same, weights
from hookdiff_checkpoint import find_checkpoints, read_checkpoint
from hookdiff_ema.snapshots import find_snapshots, plan, reconstruct
from hookdiff_nan.record import read_record
from tests.conftest import ran
from tests.hostile.formats import STEP, run_of
from tests.hostile.mutations import in_time, listing, replace

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")

STEPS, SAVED = 8, 4
fewer = settings(max_examples=settings().max_examples // 2)  # each trains
PLACES = [
    *(".lock", "config.toml", ".config.toml.partial", "metrics.jsonl", "outcome.json", ".outcome.json.partial"),
    *("checkpoints", "checkpoints/step-00000004", "checkpoints/step-00000006", "checkpoints/.step-00000006.partial"),
    *("checkpoints/.step-00000006.replaced", "checkpoints/.step-00000002.removed", "checkpoints/.writable"),
    *(f"checkpoints/step-00000004/{name}.safetensors" for name in ("model", "optimizers", "ema", "new")),
    *("checkpoints/step-00000004/manifest.json", "checkpoints/step-00000002/manifest.json"),
    *("nan", STEP, f"{STEP}/step.json", f"{STEP}/model.safetensors", f"{STEP}/config.toml", f"{STEP}/report.txt"),
    *("samples", "samples/6.png", "samples/.6.png.partial", "samples/.6.png.partial/x"),
    *("ema", "ema/step-00000004-std=0.1.safetensors", "ema/.step-00000006-std=0.1.safetensors.partial"),
]


@define(eq=False)
class Attack:
    """Calls `strike` before step `at`; `waits` for the save that is under way."""

    at: int
    strike: Callable[[], object]
    waits: bool = True

    @hookimpl(tryfirst=True)
    def before_step(self, loop: Loop) -> None:
        if loop.progress.position + 1 == self.at:
            if self.waits:
                checkpoint: Any = loop.plugins["checkpoint"]
                checkpoint.on_nan(loop)
            self.strike()


def build(run: Path, attack: Attack | None = None, steps: int = STEPS, resume: bool = False) -> Loop:
    loop: Loop = run_of(run, steps, {"attack": attack} if attack else {}, resume=resume)
    return loop


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has saved at steps 2 and 4."""
    run = tmp_path_factory.mktemp("saved") / "run"
    build(run, steps=SAVED).run()
    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return weights(ran(build(tmp_path_factory.mktemp("whole") / "run")))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    log = logging.getLogger("hookdiff")
    log.disabled = True
    yield
    log.disabled = False


def make_outside(folder: Path, saved: Path) -> Path:
    """Make a folder with files that look like those of a run, and a file."""
    shutil.copytree(saved, folder / "run")
    shutil.copytree(saved / "checkpoints", folder / "folder")
    for name in (".step-00000009.removed", ".step-00000009.partial", "step-00000009"):
        shutil.copytree(saved / "checkpoints" / "step-00000004", folder / "folder" / name)
    for name in ("step-00000009-std=0.1.safetensors", "manifest.json"):
        (folder / "folder" / name).write_bytes(b"mine")
    (folder / "file").write_bytes(b"mine\n" * 100)
    return folder


KINDS = [
    *("pipe", "socket", "device", "zero", "file outside", "folder outside", "its copy outside", "nothing outside"),
    *("a link to itself", "its copy inside", "folder", "damaged"),
]


def read_all(run: Path, loop: Loop | None) -> None:
    """Read all that a run directory has, as the commands do; each thing is read or refused."""
    with suppress(UserError):
        found, _ = find_checkpoints(run)
        for one in found:
            with suppress(UserError):
                read_checkpoint(one.path)
    with suppress(OSError):
        read_metrics(run / "metrics.jsonl")
    with suppress(UserError):
        read_record(run / STEP)
    for path in (run / "config.toml", run / STEP / "config.toml"):
        with suppress(ConfigError):
            read_toml(path)
    with suppress(UserError):
        for snapshot in find_snapshots(run):
            assert snapshot.std == 0.1
    if loop:
        run_summary(loop, "done", "run", 1.0)


@pytest.mark.wide
@fewer
@given(place=st.sampled_from(PLACES), kind=st.sampled_from(KINDS), at=st.integers(0, STEPS), resume=st.booleans())
def test_special_files_and_links(
    place: str, kind: str, at: int, resume: bool, saved: Path, whole: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("case")
    run, outside = folder / "run", make_outside(folder / "outside", saved)
    if resume or not at:
        shutil.copytree(saved, run)
    before = listing(outside)
    strike = lambda: replace(run / place, kind, outside)  # noqa: E731
    if not at:
        strike()
    loop = build(run, Attack(at, strike), resume=resume or not at)
    threads = threading.active_count()
    with in_time():
        try:
            loop.run()
            event("the run is done")
            assert_same(weights(loop), whole)
        except UserError:
            event("the run is refused or ends")
        read_all(run, loop)
    assert threading.active_count() <= threads
    assert listing(outside) == before
    shutil.rmtree(folder)


def move(run: Path) -> None:
    run.rename(run.with_name("elsewhere"))


def move_and_make(run: Path) -> None:
    move(run)
    run.mkdir()


def move_and_copy(run: Path) -> None:
    move(run)
    shutil.copytree(run.with_name("elsewhere"), run, copy_function=os.link)  # the lock is the same file


def link_a_copy(run: Path) -> None:
    move(run)
    shutil.copytree(run.with_name("elsewhere"), run.with_name("copy"))
    run.symlink_to("copy")


def make_a_file(run: Path) -> None:
    move(run)
    run.write_text("mine")


def remove_the_lock(run: Path) -> None:
    (run / ".lock").unlink()


def replace_the_lock(run: Path) -> None:
    remove_the_lock(run)
    (run / ".lock").write_text("elsewhere 17\n")


WAYS = [move, shutil.rmtree, move_and_make, move_and_copy, link_a_copy, make_a_file, remove_the_lock, replace_the_lock]


@pytest.mark.wide
@fewer
@given(way=st.sampled_from(WAYS), at=st.integers(1, STEPS), waits=st.booleans(), resume=st.booleans())
def test_a_directory_that_is_moved_or_removed_ends_the_run(
    way: Callable[[Path], None], at: int, waits: bool, resume: bool, saved: Path, tmp_path_factory: Any
) -> None:
    folder = tmp_path_factory.mktemp("case")
    run = folder / "run"
    if resume:
        shutil.copytree(saved, run)
        at = max(at, SAVED + 2)
    after: dict[str, Any] = {}

    def strike() -> None:
        try:
            way(run)
        except OSError:  # a save made a new file while the folder was removed
            shutil.rmtree(run, ignore_errors=True)
        after.update(listing(folder))

    with in_time(), pytest.raises(StorageError) as caught:
        build(run, Attack(at, strike, waits), resume=resume).run()
    assert str(run) in str(caught.value)
    event(f"{way.__name__}, {'between saves' if waits else 'at any moment'}")
    now = listing(folder)
    if waits:  # then nothing at all was written; the lock is emptied when it is released
        for files in (after, now):
            for path in [path for path in files if path.endswith(".lock") or Path(path) == folder]:
                del files[path]
        assert now == after
    elif way in (move, shutil.rmtree, move_and_make, make_a_file):  # a save under way may end in the moved folder
        old = {path for path in now if Path(path).is_relative_to(run)}
        assert old == {path for path in after if Path(path).is_relative_to(run)}
    shutil.rmtree(folder)


def test_a_directory_that_a_link_still_leads_to_is_the_same(tmp_path: Path, whole: Any) -> None:
    def strike() -> None:
        move(tmp_path / "run")
        (tmp_path / "run").symlink_to("elsewhere")

    assert_same(weights(ran(build(tmp_path / "run", Attack(4, strike)))), whole)
    assert find_checkpoints(tmp_path / "elsewhere")[0][0].path.name == f"step-{STEPS:08d}"


def test_another_working_directory_is_not_written_to(here: Path) -> None:
    (here / "other").mkdir()
    with pytest.raises(StorageError):
        build(Path("run"), Attack(4, lambda: os.chdir(here / "other"))).run()
    assert not list((here / "other").iterdir())


def test_snapshots_are_read_where_the_path_is_not_utf8(tmp_path: Path) -> None:
    run = tmp_path / os.fsdecode(b"latin-\xe9")
    build(run, steps=SAVED).run()
    build(run, resume=True).run()
    assert [one.step for one in find_snapshots(run)] == [2, 4, 6, 8]
    assert reconstruct(plan(find_snapshots(run), 0.1))
