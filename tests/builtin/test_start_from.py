import shutil

import pytest
from safetensors.torch import load_file, save_file
from torch import nn

from hookdiff import ConfigError, build_loop, load_config
from hookdiff.builtin.start_from import Start
from hookdiff.experiment.probe import try_config
from hookdiff.testing import assert_same, toy_loop, weights
from tests.conftest import ran, refused


@pytest.fixture
def config(load_small):
    """Return a function that loads a small config with settings."""
    run = {"steps": 3, "log_every": 1, "plugins": ["ema", "checkpoint"]}
    return lambda *settings: load_small(*settings, run=run)


def newest(run):
    return max((run / "checkpoints").iterdir())


def test_a_new_run_starts_from_the_weights_of_another(config, tmp_path):
    build_loop(config(), tmp_path / "first").run()
    for name in ("model", "ema"):
        file = newest(tmp_path / "first") / f"{name}.safetensors"
        loaded = config(f"model.start_from={file}", "run.seed=7", "run.steps=1")
        loop = build_loop(loaded, tmp_path / name)
        assert loop.hparams["model"]["start_from"] == str(file)
        with loop:
            assert_same(weights(loop), load_file(file))
            assert_same(loop.plugins["ema"].shadow, load_file(file))  # the average starts from the file too
            assert loop.progress.step == 0


def test_a_resumed_run_has_its_own_weights_and_needs_no_file(config, tmp_path):
    build_loop(config(), tmp_path / "first").run()
    file = shutil.copy(newest(tmp_path / "first") / "model.safetensors", tmp_path / "given.safetensors")
    loaded = config(f"model.start_from={file}")
    whole = ran(build_loop(loaded, tmp_path / "whole"))
    build_loop(config(f"model.start_from={file}", "run.steps=2"), tmp_path / "run").run()
    (tmp_path / "given.safetensors").unlink()
    try_config(loaded, resume=True)
    with refused(ConfigError, "model.start_from", file):
        try_config(loaded)
    again = ran(build_loop(loaded, tmp_path / "run", resume=True))
    assert again.progress.step == 3
    assert_same(weights(again), weights(whole))


def test_the_recorded_config_starts_from_the_same_weights(config, tmp_path):
    build_loop(config("run.steps=1"), tmp_path / "first").run()
    file = newest(tmp_path / "first") / "model.safetensors"
    loaded = config(f"model.start_from={file}", "model.start_partial=true")
    loop = ran(build_loop(loaded, tmp_path / "run"))
    again = load_config(tmp_path / "run" / "config.toml")
    assert again.resolved() == loop.hparams
    assert loop.hparams["model"]["start_partial"] is True
    assert "start_from" not in build_loop(config(), tmp_path / "x").hparams["model"]
    unset = ["model.start_from=none", "model.start_partial=false"]
    without = load_config(tmp_path / "run" / "config.toml", (), unset).resolved()
    assert "start_from" not in without["model"]


def test_a_part_of_no_file_is_refused(config):
    with refused(ConfigError, "model.start_partial", "start_from"):
        config("model.start_partial=true")


def test_only_a_run_at_its_beginning_loads_the_file(tmp_path):
    loop = toy_loop({"start": Start(str(tmp_path / "gone.safetensors"))})
    loop.progress.position = 1
    with loop:
        pass
    assert Start().on_start(loop) is None


def test_a_wrong_file_is_refused_before_the_run_directory_is_made(config, tmp_path):
    loaded = config(f"model.start_from={tmp_path / 'gone.safetensors'}")
    with refused(ConfigError, "model.start_from", tmp_path / "gone.safetensors"):
        try_config(loaded)
    other = tmp_path / "other.safetensors"
    save_file(nn.Linear(2, 3).state_dict(), other)
    with refused(ConfigError, "model.start_from", other):
        build_loop(config(f"model.start_from={other}"), tmp_path / "run").run()
    assert not (tmp_path / "run").exists()
