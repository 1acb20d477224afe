import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from hookdiff import Loop, builtin_plugins
from hookdiff.log.picture import read_info
from hookdiff.run_dir.pictures_png import find_pictures
from hookdiff.testing.toy import toy_loop
from hookdiff_checkpoint import Checkpoint
from tests.conftest import RollBackAt, StopAt, acting, check_one, warnings


def draw(loop: Loop) -> None:
    loop.log.images({"seen/here": torch.full((1, 1, 64, 64), loop.progress.step / 10)})


def train(run_dir: Path, plugins: Mapping[str, object] | None = None, **options: Any) -> None:
    draws = {"draws": acting(after_optimizer_step=draw)}
    usual = {**builtin_plugins(), **draws, "checkpoint": Checkpoint(every=2)}
    toy_loop({**usual, **(plugins or {})}, run_dir=run_dir, **{"steps": 4, **options}).run()


def steps(run_dir: Path) -> list[int]:
    return list(find_pictures(run_dir).get("seen/here", {}))


def test_each_picture_is_a_file_that_says_its_name_and_step(tmp_path: Path) -> None:
    train(tmp_path)
    assert steps(tmp_path) == [1, 2, 3, 4]
    with Image.open(tmp_path / "seen" / "here" / "step-00000003.png") as image:
        info = read_info(image)
        assert (info["name"], info["step"]) == ("seen/here", 3)
        assert numpy.array(image).max() == round(1.3 * 127.5)


def test_a_resumed_run_removes_the_pictures_of_later_steps(tmp_path: Path) -> None:
    train(tmp_path, {"stop": StopAt(3)})
    foreign = tmp_path / "seen" / "here" / "step-00000009.png"
    Image.new("L", (4, 4)).save(foreign)  # of the user

    seen: list[list[int]] = []
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000003")
    train(tmp_path, {"look": acting(before_step=lambda: seen.append(steps(tmp_path)))}, resume=True)
    assert (seen, steps(tmp_path)) == ([[1, 2], [1, 2, 3]], [1, 2, 3, 4])
    assert foreign.exists()


def test_a_branch_begins_with_copies_of_the_pictures(tmp_path: Path) -> None:
    train(tmp_path / "trunk")
    train(tmp_path / "branch", resume=tmp_path / "trunk" / "checkpoints" / "step-00000002", steps=3)
    assert (steps(tmp_path / "trunk"), steps(tmp_path / "branch")) == ([1, 2, 3, 4], [1, 2, 3])


def test_a_resumed_run_keeps_the_pictures_of_a_branch_below_it_and_copies_of_the_user(tmp_path: Path) -> None:
    train(tmp_path)
    train(tmp_path / "branch", resume=tmp_path, steps=8)
    copy = Path(shutil.copytree(tmp_path / "seen" / "here", tmp_path / "best")) / "step-00000004.png"
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000004")
    train(tmp_path, resume=True, steps=3)
    assert (steps(tmp_path), steps(tmp_path / "branch")) == ([1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8])
    assert copy.exists()


def test_a_run_that_starts_anew_removes_the_pictures_of_the_run_before(tmp_path: Path) -> None:
    train(tmp_path, {"checkpoint": Checkpoint(every=100), "stop": StopAt(3)})
    shutil.rmtree(tmp_path / "checkpoints")
    before_the_first_step = acting(on_ready=lambda loop: loop.log.images({"first": torch.zeros(1, 1, 8, 8)}))
    train(tmp_path, {"first": before_the_first_step}, resume=True, steps=2)
    assert steps(tmp_path) == [1, 2]
    assert list(find_pictures(tmp_path)["first"]) == [0]


def test_a_rollback_removes_the_pictures_of_the_steps_after_the_checkpoint(tmp_path: Path) -> None:
    stop = acting(between_steps=lambda loop: loop.stop() if loop.progress.position == 7 else None)
    train(tmp_path, {"breaks": RollBackAt(5), "stop": stop, "checkpoint": Checkpoint(every=3)}, steps=9)
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_a_picture_that_cannot_be_written_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, {"blocks": acting(before_step=lambda: (tmp_path / "seen").touch())}, steps=1)
    check_one(warnings(caplog), tmp_path / "seen" / "here" / "step-00000001.png")
