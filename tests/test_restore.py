"""What a run begins with: what is refused, and what is told."""

import logging
from pathlib import Path

import pytest
import torch

from hookdiff import Loop, UserError, hookimpl
from hookdiff.errors import NoCheckpoint
from hookdiff.testing import toy_loop
from hookdiff_checkpoint import Checkpoint


class Keeps:
    """Has a state to give, if there is one."""

    def __init__(self, state):
        self.state = state

    @hookimpl
    def restore(self):
        return self.state


def test_without_a_checkpoint_the_run_starts_anew_unless_a_place_was_named(tmp_path: Path, caplog):
    caplog.set_level(logging.INFO)
    run = tmp_path / "run"
    loop = toy_loop({"keeps": Keeps({})}, run_dir=run, resume=True, steps=3)
    assert loop.run() == "done"
    assert caplog.messages == []  # nothing was there
    run.mkdir()
    (run / "metrics.jsonl").touch()
    assert toy_loop({"keeps": Keeps({})}, run_dir=run, resume=True, steps=3).run() == "done"
    assert caplog.messages == [f"{run} has no checkpoint to go on from: the run starts anew"]
    for named in (run, str(run)):
        with pytest.raises(NoCheckpoint, match=f"^{run} has no checkpoint$"):
            toy_loop({"keeps": Keeps({})}, run_dir=run, resume=named, steps=3).run()
    with pytest.raises(UserError, match=r"rum: no such folder; did you mean 'run'\?$"):
        toy_loop({"keeps": Keeps({})}, run_dir=run, resume=tmp_path / "rum", steps=3).run()


def test_a_run_that_nobody_restores_is_refused_and_stays_as_it_is(tmp_path: Path):
    saved = toy_loop({"checkpoint": Checkpoint(every=2)}, run_dir=tmp_path, steps=4)
    saved.run()
    before = sorted(tmp_path.rglob("*"))
    for resume in (True, tmp_path):
        with pytest.raises(UserError, match=": none of the run's plugins reads"):
            toy_loop(run_dir=tmp_path, resume=resume, steps=8).run()
    assert sorted(tmp_path.rglob("*")) == before


def test_another_seed_is_refused(tmp_path: Path):
    def loop(seed: int, **options) -> Loop:
        return toy_loop({"checkpoint": Checkpoint(every=2)}, run_dir=tmp_path, seed=seed, **options)

    loop(7, steps=2).run()
    with pytest.raises(UserError, match="was made with the seed 7, from which all randomness follows; this run has 0"):
        loop(0, steps=4, resume=True).run()
    assert loop(7, steps=4, resume=True).run() == "done"


@pytest.mark.parametrize("part", ["random", "data"])
def test_what_another_hand_wrote_is_told(part: str, tmp_path: Path):
    first = toy_loop(steps=2)
    first.run()
    state = {**first.state_dict(), part: None}
    with pytest.raises(UserError, match=f"the checkpoint's state of '{part}' cannot be loaded: AttributeError"):
        toy_loop({"keeps": Keeps(state)}, run_dir=tmp_path, resume=True, steps=3).run()


def test_another_number_of_samples_is_warned_of(tmp_path: Path, caplog):
    def loop(samples: int, **options) -> Loop:
        data = torch.zeros(samples, 1, 4, 4)
        return toy_loop({"checkpoint": Checkpoint(every=2)}, data=data, run_dir=tmp_path, **options)

    caplog.set_level(logging.WARNING, "hookdiff")
    loop(40, steps=2).run()
    loop(40, steps=4, resume=True).run()
    assert caplog.messages == []
    loop(30, steps=6, resume=True).run()
    assert caplog.messages == ["the data has 30 samples to train on; the checkpoint was made with 40"]


def test_places_may_be_text(tmp_path: Path):
    plugins = {"checkpoint": Checkpoint(every=2)}
    toy_loop(plugins, run_dir=str(tmp_path / "run"), steps=2).run()
    again = toy_loop(plugins, run_dir=str(tmp_path / "other"), resume=str(tmp_path / "run"), steps=4)
    again.run()
    assert again.first_step == 2
