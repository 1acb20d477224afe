import json
import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from hookdiff import Metrics, UserError
from hookdiff.testing import assert_same, toy_loop, toy_model, weights
from hookdiff_amp import AMP
from hookdiff_checkpoint import Checkpoint, read_checkpoint
from hookdiff_clip import Clip
from hookdiff_ema import EMA
from hookdiff_lr import LR


def plugins(**checkpoint):
    return {
        "metrics": Metrics(),
        "lr": LR(warmup=3),
        "ema": EMA(decay=0.9),
        "amp": AMP("fp16", init_scale=2.0**18, growth_interval=4),
        "clip": Clip("adaptive", warmup=2, factor=0.9),
        "checkpoint": Checkpoint(**checkpoint),
    }


def train(run_dir, steps, resume=False, seed=0, **checkpoint):
    run_dir.mkdir(exist_ok=True)
    used = plugins(**checkpoint)
    used["lr"] = LR(warmup=3, total=20)
    loop = toy_loop(
        used, model=toy_model(seed, dropout=0.2), run_dir=run_dir, resume=resume, steps=steps, micro_batch=3
    )
    loop.run()
    return loop


def logged(run_dir):
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "time"} for line in lines]


@pytest.mark.parametrize("cut", [1, 7, 10, 13])
def test_a_resumed_run_is_the_run_that_was_never_stopped(tmp_path, cut):
    whole = train(tmp_path / "whole", 20)
    train(tmp_path / "cut", cut)
    again = train(tmp_path / "cut", 20, resume=True, seed=5)
    assert_same(weights(whole), weights(again))
    assert_same(whole.plugins["ema"].shadow, again.plugins["ema"].shadow)
    assert whole.progress == again.progress
    assert logged(tmp_path / "whole") == logged(tmp_path / "cut")
    for name in ("clip", "amp"):
        assert whole.plugins[name].state_dict() == again.plugins[name].state_dict()


def test_only_the_last_are_kept_and_nothing_partial_stays(tmp_path):
    train(tmp_path / "run", 20, every=4, keep_last=2)
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "step-00000016",
        "step-00000020",
    ]


def test_its_files_have_the_models_own_keys(tmp_path):
    loop = train(tmp_path / "run", 5)
    folder = tmp_path / "run" / "checkpoints" / "step-00000005"
    assert_same(load_file(folder / "model.safetensors"), weights(loop))
    toy_model().load_state_dict(load_file(folder / "ema.safetensors"))


@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json"])
@given(where=st.integers(0, 10**6), flip=st.integers(1, 255))
def test_a_changed_byte_is_noticed(tmp_path_factory, name, where, flip):
    run = tmp_path_factory.mktemp("run")
    train(run, 2)
    path = run / "checkpoints" / "step-00000002" / name
    data = bytearray(path.read_bytes())
    data[where % len(data)] ^= flip
    path.write_bytes(data)
    try:
        state = read_checkpoint(path.parent)
    except UserError as error:
        assert str(path.parent) in str(error)  # noqa: PT017 - most bytes of the manifest may change without harm
    else:
        assert name == "manifest.json"
        assert set(state["model"]) == set(toy_model().state_dict())


def test_resume_passes_over_a_damaged_checkpoint(tmp_path, caplog):
    train(tmp_path / "run", 8, every=4)
    (tmp_path / "run" / "checkpoints" / "step-00000008" / "model.safetensors").write_bytes(b"gone")
    with caplog.at_level(logging.INFO):
        again = train(tmp_path / "run", 20, resume=True)
    assert "passed over a checkpoint" in caplog.text
    assert "4 bytes" in caplog.text
    assert_same(weights(again), weights(train(tmp_path / "whole", 20)))


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    train(tmp_path / "run", 2)
    other = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.SiLU(), torch.nn.Linear(9, 4))
    loop = toy_loop({"checkpoint": Checkpoint()}, model=other, run_dir=tmp_path / "run", resume=True)
    with pytest.raises(UserError, match="of another model"):
        loop.run()


def test_a_plugin_without_saved_state_must_be_started_fresh(tmp_path):
    loop = toy_loop({"checkpoint": Checkpoint()}, run_dir=tmp_path, steps=3)
    loop.run()
    loop = toy_loop({"checkpoint": Checkpoint(), "ema": EMA()}, run_dir=tmp_path, resume=True)
    with pytest.raises(UserError, match="--fresh ema"):
        loop.run()


def test_it_needs_a_run_directory():
    with pytest.raises(UserError, match="run_dir"):
        toy_loop({"checkpoint": Checkpoint()}).run()
