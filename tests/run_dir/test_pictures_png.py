import os
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image

from hookdiff.log.picture import Picture
from hookdiff.run_dir.pictures_png import find_pictures, picture_files, picture_path, read_picture

PIXELS = numpy.arange(64, dtype=numpy.uint8).reshape(8, 8)


def save(run_dir: Path, name: str, step: int, folder: str | None = None) -> Path:
    """Write the picture `name` into the folder of that name, or into another one."""
    path = picture_path(run_dir, folder or name, step)
    Picture(PIXELS, {"name": name, "step": step}).save(path)
    return path


def test_pictures_of_other_runs_and_copies_are_not_those_of_the_run(tmp_path: Path) -> None:
    logged = save(tmp_path, "samples/denoising", 1)
    for mark in ("config.toml", "metrics.jsonl"):
        save(tmp_path / mark[0], "samples", 1)
        (tmp_path / mark[0] / mark).touch()
    save(tmp_path, "samples", 1, "lost/samples")  # of a run that has lost its files
    save(tmp_path, "samples", 2, "best")
    save(tmp_path, "checkpoints/step-00000002/samples", 2)
    save(tmp_path, ".trash/samples", 2)
    for mark in ("config.toml", "metrics.jsonl"):
        (tmp_path / mark).touch()
    assert find_pictures(tmp_path) == {"samples/denoising": {1: logged}}


def test_the_pictures_after_a_step_are_found_and_no_others_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {step: save(tmp_path, "samples", step) for step in (1, 90_000_000, 100_000_000)}
    opened, open_image = [], Image.open
    monkeypatch.setattr(Image, "open", lambda path, **how: opened.append(path) or open_image(path, **how))
    assert (picture_files(tmp_path, "samples"), list(picture_files(tmp_path, "samples"))) == (paths, list(paths))
    assert (picture_files(tmp_path, "none"), opened) == ({}, [])
    assert find_pictures(tmp_path, after=1) == {"samples": {step: paths[step] for step in list(paths)[1:]}}
    assert (opened, find_pictures(tmp_path, after=100_000_000)) == (list(paths.values())[1:], {})


def test_a_folder_may_vanish_during_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged, scandir = save(tmp_path, "samples", 1), os.scandir
    (tmp_path / "other").mkdir()

    def scan(folder: Any) -> Any:
        if Path(folder).name == "other":
            Path(folder).rmdir()
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", scan)
    assert find_pictures(tmp_path) == {"samples": {1: logged}}
    assert not (tmp_path / "other").exists()


def test_the_pixels_are_those_that_were_saved(tmp_path: Path) -> None:
    picture = read_picture(save(tmp_path, "samples", 1))
    assert picture is not None
    assert (numpy.array(picture) == PIXELS).all()
