"""Files of a run that have a second name, and folders that are links: nothing is written outside of the run."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hookdiff import Loop, hookimpl
from hookdiff.disk.files import own_files
from hookdiff.disk.lock import confine, is_locked
from tests.conftest import output, pixels, write_small
from tests.hostile.formats import run_of
from tests.hostile.mutations import listing

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no such links")

Command = Callable[..., tuple[int, str, str]]
# What writes below a run directory. RUN is that directory; the working directory is the folder around it.
WRITERS: dict[str, tuple[str, ...]] = {
    "resume": ("resume", "RUN", "--steps", "6"),
    "run": ("run", "RUN/config.toml", "--out", "RUN", "--overwrite"),
    "sample": ("sample", "RUN", "--num", "2", "--overwrite"),
    "each": ("sample", "RUN", "--num", "2", "--each", "RUN/samples/each", "--overwrite"),
    "archive": ("sample", "RUN", "--num", "2", "--out", "RUN/samples/all.npz", "--overwrite"),
    "report": ("report", "RUN"),
    "ema": ("ema", "RUN", "--draw", "--out", "RUN/ema/curves.png", "--overwrite"),
    "snapshot": ("ema", "RUN", "--std", "0.1", "--out", "RUN/ema/made.safetensors", "--overwrite"),
    "export": ("export", "RUN", "RUN/samples/model.safetensors", "--overwrite"),
    "mirror": ("mirror", "RUN", "--to", "tensorboard"),
    "data": ("data", "RUN/config.toml"),
    "fid": ("fid", "RUN", "--num", "40"),
}
FOLDERS = ("samples", "ema", "tensorboard", "checkpoints", "checkpoints/step-00000004", "cache")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `run`, which has all kinds of files."""
    from hookdiff import build_loop, load_config

    for name in ("bokeh", "tensorboard"):
        pytest.importorskip(name)
    folder = tmp_path_factory.mktemp("case") / "made"
    (folder / "pictures").mkdir(parents=True)
    for number in range(48):
        Image.fromarray(pixels(number, 8)).save(folder / "pictures" / f"{number}.png")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        path = write_small(
            folder / "mine.toml",
            run={"steps": 4, "log_every": 1, "plugins": ["checkpoint", "samples", "ema", "tensorboard"]},
            data={
                "source": "folder",
                "path": str(folder / "pictures"),
                "image_size": 8,
                "channels": 1,
                "store": "disk",
                "cache_dir": "run/cache",
            },
            plugins={
                "checkpoint": {"every": 2},
                "samples": {"every": 2, "num": 4},
                "ema": {"std": 0.1, "snapshot_every": 2},
            },
        )
        build_loop(load_config(path), Path("run")).run()
    return folder


def called(hookdiff: Command, words: tuple[str, ...]) -> tuple[int, str, str]:
    return hookdiff(*(word.replace("RUN", "run") for word in words))


def ready(made: Path, monkeypatch: pytest.MonkeyPatch, hookdiff: Command) -> Path:
    """Return a copy of the run in which is what the commands write; one for all tests."""
    folder = made.parent / "ready"
    if not folder.exists():
        shutil.copytree(made, folder, ignore=shutil.ignore_patterns("pictures"))
        monkeypatch.chdir(folder)
        for name in ("sample", "each", "archive", "report", "ema", "snapshot", "export"):
            output(called(hookdiff, WRITERS[name]))
    return folder


@pytest.mark.wide
def test_files_with_a_second_name_are_not_written_through(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hookdiff: Command
) -> None:
    original = ready(made, monkeypatch, hookdiff)
    before = listing(original)
    for name, words in WRITERS.items():
        copy = tmp_path / name
        shutil.copytree(original, copy, copy_function=os.link)
        monkeypatch.chdir(copy)
        code, _, err = called(hookdiff, words)
        assert code == 0, (name, err)
        assert listing(original) == before, name


@pytest.mark.wide
@pytest.mark.parametrize("name", FOLDERS)
def test_folders_that_are_links_are_not_written_through(
    name: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hookdiff: Command
) -> None:
    original = ready(made, monkeypatch, hookdiff)
    for command, words in WRITERS.items():
        copy, outside = tmp_path / command, tmp_path / f"{command}-outside"
        shutil.copytree(original, copy)
        (copy / "run" / name).rename(outside)
        (copy / "run" / name).symlink_to(outside)
        before = listing(outside)
        monkeypatch.chdir(copy)
        code, _, err = called(hookdiff, words)
        assert code in (0, 2), (command, err)
        assert listing(outside) == before, command


def test_a_run_that_is_a_link_goes_on(made: Path, here: Path, hookdiff: Command) -> None:
    shutil.copytree(made / "run", here / "disk" / "run")
    (here / "run").symlink_to("disk/run")
    for name in ("resume", "sample", "report"):
        output(called(hookdiff, WRITERS[name]))
    assert (here / "disk" / "run" / "report.html").is_file()
    assert list((here / "disk" / "run" / "samples").glob("seed-*.png"))


def test_a_snapshot_of_a_run_that_goes_on_stays_as_it_is(tmp_path: Path) -> None:
    run, snapshot = tmp_path / "run", tmp_path / "snapshot"

    class Snapshot:
        found: Any = None

        @hookimpl(trylast=True)
        def after_optimizer_step(self, loop: Loop) -> None:
            if loop.progress.step == 3:
                shutil.copytree(run, snapshot, copy_function=os.link)
                self.found = listing(snapshot)
                assert is_locked(snapshot)  # by the file that both have
            if loop.progress.step == 4:
                with pytest.raises(Exception, match="in use"):
                    run_of(run, 5, resume=True).run()

    plugin = Snapshot()
    run_of(run, 5, {"snapshot": plugin}).run()
    assert listing(snapshot) == plugin.found
    lines = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(lines)) == [1, 2, 3, 4, 5]
    assert not is_locked(run)


def test_a_library_gets_files_of_one_name(tmp_path: Path) -> None:
    for name in ("run", "elsewhere"):
        (tmp_path / name / ".aim").mkdir(parents=True)
        (tmp_path / name / ".aim" / "file").write_bytes(b"mine")
        os.link(tmp_path / name / ".aim" / "file", tmp_path / name / "second")
    confine(tmp_path / "run")
    for name in ("run", "elsewhere"):
        own_files(tmp_path / name / ".aim")
    assert (tmp_path / "elsewhere" / "second").stat().st_nlink == 2  # a large set of the user's own, say
    with (tmp_path / "run" / ".aim" / "file").open("r+b") as file:
        assert file.read() == b"mine"
        file.write(b" no more")
    assert (tmp_path / "run" / "second").read_bytes() == b"mine"
