"""A config that has changed since the checkpoint: what is told, what is refused, and that nothing else is."""

import copy
import datetime
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hookdiff import UserError, build_loop, hookimpl, load_config
from hookdiff.builtin.changes import FIXED, FIXED_SWITCHES, Changes, changes
from hookdiff.diffusion import Diffusion
from hookdiff.disk import flatten
from hookdiff.experiment.config import FEED_KEYS, RunConfig
from hookdiff.experiment.optimizers import muon
from hookdiff.experiment.structure import parameters
from hookdiff.models import DiT, UNet
from hookdiff.models.init import Initialisation
from hookdiff.testing import toy_loop

REFUSED = "the config differs from that of the checkpoint in what cannot change:\n"
WAY_OUT = "\nset it back, or start another run from the weights alone (model.start_from)"

values = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
tables = st.dictionaries(st.sampled_from("abcd"), values, max_size=4)
configs = st.fixed_dictionaries({"run": tables, "model": tables})


@given(configs, configs)
def test_the_changes_turn_one_config_into_the_other(old, new):
    merged = copy.deepcopy(old)
    for key, was, is_now in changes(old, new, {}):
        table, _, name = key.partition(".")
        assert old[table].get(name) == was
        merged[table][name] = is_now
    assert set_keys(merged) == set_keys(new)


def set_keys(config):
    return {(table, key): value for table in config for key, value in config[table].items() if value is not None}


def test_lists_are_equal_to_tuples_and_numbers_to_numbers():
    assert not list(changes({"a": {"b": [1, 2], "c": 1}}, {"a": {"b": (1, 2), "c": 1.0}}, {}))


def test_a_date_is_the_text_that_a_checkpoint_has_of_it():
    day = datetime.date(2026, 11, 22)
    assert not list(changes({"data": {"since": "2026-11-22"}}, {"data": {"since": day}}, {}))
    loop = toy_loop(steps=1, hparams={"data": {"since": day, "hours": [datetime.time(8, 30)]}})
    loop.run()
    tree = flatten(loop.state_dict())[1]
    assert tree["config"] == {"data": {"since": "2026-11-22", "hours": ["08:30:00"]}}


def test_a_key_that_is_new_in_this_version_is_no_change_at_its_default():
    defaults = {"data": {"flip": 0.0, "resize": 8}}
    assert not list(changes({"data": {}}, {"data": {"flip": 0.0}}, defaults))
    assert list(changes({"data": {}}, {"data": {"flip": 0.5}}, defaults)) == [("data.flip", None, 0.5)]
    assert list(changes({"data": {"flip": 0.5}}, {"data": {"flip": 0.0}}, defaults)) == [("data.flip", 0.5, 0.0)]


def test_a_plugin_that_only_one_has_is_told_by_the_list_alone():
    old = {"run": {"plugins": ["ema"]}, "plugins": {"ema": {"decay": 0.9}, "lr": {"warmup": 2}}}
    new = {"run": {"plugins": ["lr"]}, "plugins": {"lr": {"warmup": 3}, "fid": {"every": 4}}}
    assert [key for key, *_ in changes(old, new, {})] == ["run.plugins", "plugins.lr.warmup"]


def test_plugins_are_told_by_what_is_new_and_what_is_gone(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    first = toy_loop(steps=2, hparams={"run": {"plugins": ["ema", "lr"]}})
    first.run()
    resumed(tmp_path, first.state_dict(), {"run": {"plugins": ("lr", "clip", "fid")}})
    resumed(tmp_path, first.state_dict(), {"run": {"plugins": ("lr", "ema")}})
    assert caplog.messages == [
        "changed since the checkpoint: run.plugins with clip, fid without ema",
        "changed since the checkpoint: run.plugins in another order",
    ]


def test_what_cannot_change_are_keys_that_there_are():
    known = {
        "run": parameters(RunConfig),
        "data": FEED_KEYS,
        "model": {"use", *parameters(UNet), *parameters(DiT), *parameters(Initialisation)},
        "diffusion": parameters(Diffusion),
        "optimizer": {"use", "amsgrad", "centered", "momentum", *parameters(muon)},
    }
    for key in (*FIXED, *FIXED_SWITCHES):
        table, _, name = key.partition(".")
        assert name in known[table], key


def test_what_cannot_change_is_in_the_docs():
    page = Path(__file__).parents[2] / "docs" / "how-to.md"
    if not page.exists():
        pytest.skip("needs the sources")
    (table,) = re.findall(r"^\| \| why not \|\n\|---\|---\|\n((?:\|.*\n)*)", page.read_text("utf-8"), re.M)
    told = {key: row.split("|")[2].strip() for row in table.splitlines() for key in re.findall(r"`(\w+\.\w+)`", row)}
    assert told == {**FIXED, **FIXED_SWITCHES}


class Kept:
    """Gives the run the state that another one ended with."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    @hookimpl
    def restore(self) -> dict[str, Any]:
        return self.state

    @hookimpl(trylast=True)
    def on_stop(self, loop, reason):
        if reason == "done":
            self.state = copy.deepcopy(loop.state_dict())


@pytest.fixture
def runs(write_config, tmp_path, caplog):
    """Return a function that makes two steps with `settings`, from the state of the run before, if there was one."""
    kept, path = Kept(), write_config()
    caplog.set_level(logging.INFO)

    def call(*settings, steps=2):
        caplog.clear()
        config = load_config(path, settings=(f"run.steps={steps}", *settings))
        resume = bool(kept.state)
        build_loop(config, tmp_path / "run", resume=resume, plugins={"kept": kept}).run()
        return [message for message in caplog.messages if message.startswith("changed") or "the data has" in message]

    return call


def test_what_may_change_is_told(runs):
    assert runs() == []
    assert runs() == []
    may = ["optimizer.lr=0.0005", "run.batch_size=8", "run.micro_batch=4", "data.flip=0.5", "diffusion.loss=l1"]
    assert runs(*may, steps=4) == [
        "changed since the checkpoint: run.steps 2 -> 4, run.batch_size 16 -> 8, run.micro_batch (not set) -> 4, "
        "data.flip 0.0 -> 0.5, diffusion.loss 'mse' -> 'l1', optimizer.lr 0.001 -> 0.0005"
    ]
    # Back to a batch that is not cut, and to one that is tried out, which says itself what it found.
    assert runs("run.micro_batch=auto", steps=4) == [
        "changed since the checkpoint: run.batch_size 8 -> 16, data.flip 0.5 -> 0.0, diffusion.loss 'l1' -> 'mse', "
        "optimizer.lr 0.0005 -> 0.001"
    ]


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("run.seed=1", "run.seed 0 -> 1: all randomness follows from it"),
        ("model.head_dim=4", "model.head_dim 8 -> 4: the weights are of the network as it was"),
        ("data.held_out=0.5", "data.held_out 0 -> 0.5: samples that were trained on would be held out, or the other"),
        ("data.balanced=true", "data.balanced False -> True: the epoch under way has another order"),
        ("diffusion.timesteps=50", "diffusion.timesteps 20 -> 50: the weights have learned this meaning of inputs"),
        ("optimizer.amsgrad=true", "optimizer.amsgrad False -> True: the state of the optimizer is of another kind"),
    ],
)
def test_what_cannot_change_is_refused_by_key(runs, setting, line, tmp_path):
    runs()
    before = (tmp_path / "run" / "config.toml").read_bytes()
    with pytest.raises(UserError) as error:
        runs(setting, "optimizer.lr=0.5")
    assert str(error.value).startswith(f"{REFUSED}  {line}")
    assert str(error.value).endswith(WAY_OUT)
    assert "optimizer.lr" not in str(error.value)
    assert (tmp_path / "run" / "config.toml").read_bytes() == before


def test_all_that_cannot_change_is_refused_at_once(runs):
    runs()
    with pytest.raises(UserError) as error:
        runs("run.seed=1", "optimizer.use=sgd", "diffusion.prediction_type=sample")
    assert [line.split()[0] for line in str(error.value).splitlines()[1:-1]] == [
        "run.seed",
        "diffusion.prediction_type",
        "optimizer.use",
    ]


class Fixed:
    """Has a state to give."""

    def __init__(self, state):
        self.state = state

    @hookimpl
    def restore(self):
        return self.state


def resumed(tmp_path, state, hparams):
    plugins = {"changes": Changes({}), "fixed": Fixed(state)}
    loop = toy_loop(plugins, run_dir=tmp_path, resume=True, steps=3, hparams=hparams)
    loop.run()
    return loop


def test_a_script_without_a_config_is_left_alone(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    started = toy_loop(steps=2)
    started.run()
    state = started.state_dict()
    assert state["config"] == {}
    resumed(tmp_path, state, {"run": {"seed": 1}})
    del state["config"], state["data"], state["random"]  # of an older version
    resumed(tmp_path, state, {"run": {"seed": 1}})
    assert caplog.messages == []


def test_a_rollback_is_not_looked_at(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    first = toy_loop(steps=2, hparams={"optimizer": {"lr": 1}})
    first.run()
    state = copy.deepcopy(first.state_dict())
    plugins = {"changes": Changes({}), "fixed": Fixed(state)}
    loop = toy_loop(plugins, run_dir=tmp_path, resume=True, steps=3, hparams={"optimizer": {"lr": 2}})
    with loop:
        assert loop.hook.restore(loop=loop) is state
    assert caplog.messages == ["changed since the checkpoint: optimizer.lr 1 -> 2"]
