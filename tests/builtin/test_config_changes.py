"""Changes of the config since the checkpoint: some are logged, others refused."""

import copy
import datetime
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hookdiff import Feed, UserError, build_loop, load_config
from hookdiff.builtin.config_changes import FIXED, FIXED_SWITCHES, Changes, changes, check_parts
from hookdiff.diffusion.diffusion import Diffusion
from hookdiff.disk.tree import flatten
from hookdiff.experiment.config import RunConfig
from hookdiff.options.fields import Fixed
from hookdiff.options.structure import described, marks_of, parameters
from hookdiff.testing.toy import toy_loop
from hookdiff_muon import muon
from hookdiff_networks import DiT, UNet
from tests.conftest import Restores, check_facts, check_one, ran, refused, saved, toy_run, warnings, wide, write_small

values = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
tables = st.dictionaries(st.sampled_from("abcd"), values, max_size=4)
configs = st.fixed_dictionaries({"run": tables, "model": tables})


@given(configs, configs)
def test_applying_the_changes_to_one_config_gives_the_other(old, new):
    merged = copy.deepcopy(old)
    for key, was, is_now in changes(old, new, {}):
        table, _, name = key.partition(".")
        assert old[table].get(name) == was
        merged[table][name] = is_now
    assert set_keys(merged) == set_keys(new)


def set_keys(config):
    return {(table, key): value for table in config for key, value in config[table].items() if value is not None}


def test_lists_equal_tuples_and_integers_equal_floats():
    assert not list(changes({"a": {"b": [1, 2], "c": 1}}, {"a": {"b": (1, 2), "c": 1.0}}, {}))


def test_a_date_equals_its_text_in_a_checkpoint():
    day = datetime.date(2026, 11, 22)
    assert not list(changes({"data": {"since": "2026-11-22"}}, {"data": {"since": day}}, {}))
    loop = toy_run(steps=1, hparams={"data": {"since": day, "hours": [datetime.time(8, 30)]}})
    tree = flatten(loop.state_dict())[1]
    assert tree["config"] == {"data": {"since": "2026-11-22", "hours": ["08:30:00"]}}


def test_a_missing_key_of_the_checkpoint_has_its_default():
    defaults = {"data": {"flip": 0.0, "resize": 8}}
    assert not list(changes({"data": {}}, {"data": {"flip": 0.0}}, defaults))
    assert list(changes({"data": {}}, {"data": {"flip": 0.5}}, defaults)) == [("data.flip", None, 0.5)]
    assert list(changes({"data": {"flip": 0.5}}, {"data": {"flip": 0.0}}, defaults)) == [("data.flip", 0.5, 0.0)]


def test_a_plugin_of_only_one_config_is_one_change_of_the_list():
    old = {"run": {"plugins": ["ema"]}, "plugins": {"ema": {"decay": 0.9}, "lr": {"warmup": 2}}}
    new = {"run": {"plugins": ["lr"]}, "plugins": {"lr": {"warmup": 3}, "fid": {"every": 4}}}
    assert [key for key, *_ in changes(old, new, {})] == ["run.plugins", "plugins.lr.warmup"]


def test_added_and_removed_plugins_are_logged(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    state = toy_run(steps=2, hparams={"run": {"plugins": ["ema", "lr"]}}).state_dict()
    for plugins in (("lr", "clip", "fid"), ("lr", "ema")):
        resume(tmp_path, state, {"run": {"plugins": plugins}})
    others, order = caplog.messages
    check_facts(others, "run.plugins", "clip, fid", "ema")
    check_facts(order, "run.plugins", "order")


def of_parts() -> dict[str, str]:
    """Return the keys that the networks and the optimizer of the packages here mark as fixed."""
    parts: dict[Any, str] = {UNet: "model", DiT: "model", muon: "optimizer"}
    return {f"{table}.{k}": m.reason for part, table in parts.items() for k, m in marks_of(part, Fixed).items()}


def test_the_fixed_keys_are_keys_of_a_config():
    known = {
        "run": parameters(RunConfig),
        "data": described(Feed),
        "model": {"use", *parameters(UNet), *parameters(DiT)},
        "diffusion": parameters(Diffusion),
        "optimizer": {"use", "amsgrad", "centered", "momentum"},
    }
    for key in (*FIXED, *FIXED_SWITCHES):
        table, _, name = key.partition(".")
        assert name in known[table], key


def test_the_fixed_keys_are_in_the_docs():
    page = Path(__file__).parents[2] / "docs" / "how-to" / "resume-a-run.md"
    if not page.exists():
        pytest.skip("needs the sources")
    (table,) = re.findall(r"^\| \| why not \|\n\|---\|---\|\n((?:\|.*\n)*)", page.read_text("utf-8"), re.M)
    rows = {key: row.split("|")[2].strip() for row in table.splitlines() for key in re.findall(r"`(\w+\.\w+)`", row)}
    assert rows == {**FIXED, **FIXED_SWITCHES, **of_parts()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a folder with a small config and the run directory of its run, and the state of that run."""
    folder = tmp_path_factory.mktemp("trained")
    config = load_config(write_small(folder / "small.toml", run={"steps": 2}))
    return folder, saved(ran(build_loop(config, folder / "run")))


def resume_refused(trained, *settings, facts):
    """Resume the run with other settings, which must be refused; return the message."""
    folder, state = trained
    config = load_config(folder / "small.toml", settings=settings)
    before = (folder / "run" / "config.toml").read_bytes()
    with refused(UserError, *facts) as error:
        build_loop(config, folder / "run", resume=True, plugins={"memory": Restores(state)}).run()
    assert (folder / "run" / "config.toml").read_bytes() == before
    return str(error.value)


def test_golden_line_of_the_changes(write_config, tmp_path, caplog):
    memory, path = Restores(), write_config()
    caplog.set_level(logging.INFO)

    def runs(*settings, steps=2):
        """Train with `settings`, from the state of the previous call if there was one."""
        caplog.clear()
        config = load_config(path, settings=(f"run.steps={steps}", *settings))
        resume = memory.state is not None
        memory.state = saved(ran(build_loop(config, tmp_path / "run", resume=resume, plugins={"memory": memory})))
        return [message for message in caplog.messages if "->" in message] + warnings(caplog)

    assert [runs(), runs()] == [[], []]
    may = ["optimizer.lr=0.0005", "run.batch_size=8", "run.micro_batch=4", "data.flip=0.5", "diffusion.loss=l1"]
    assert runs(*may, steps=4) == [
        "changed since the checkpoint: run.steps 2 -> 4, run.batch_size 16 -> 8, run.micro_batch (not set) -> 4, "
        "data.flip 0.0 -> 0.5, diffusion.loss.use 'mse' -> 'l1', optimizer.lr 0.001 -> 0.0005"
    ]
    # A change to "auto" is logged once its size is found.
    (line,) = runs("run.micro_batch=auto", steps=4)
    check_facts(line, "run.batch_size 8 -> 16", "data.flip 0.5 -> 0.0", "optimizer.lr 0.0005 -> 0.001")
    assert "run.micro_batch" not in line


@pytest.mark.parametrize(
    ("setting", "change"),
    [
        ("optimizer.momentum=0.0", "0.95 -> 0.0"),
        ("run.seed=1", "0 -> 1"),
        ("model.head_dim=4", "8 -> 4"),
        ("diffusion.process.timesteps=50", "20 -> 50"),
        *wide(
            ('optimizer.adamw=["conv_in.*"]', "[] -> ['conv_in.*']"),
            ("data.held_out=0.5", "0 -> 0.5"),
            ("data.balanced=true", "False -> True"),
        ),
    ],
)
def test_a_change_of_a_fixed_key_is_refused(trained, setting, change):
    key = setting.partition("=")[0]
    reason = {**FIXED, **FIXED_SWITCHES, **of_parts()}[key.removesuffix(".timesteps")]
    facts = (f"{key} {change}", reason, "model.start_from")
    assert "optimizer.lr" not in resume_refused(trained, setting, "optimizer.lr=0.5", facts=facts)


@pytest.mark.parametrize("setting", ["diffusion.process=edm", "diffusion.process.use=edm"])
def test_another_process_is_refused_before_what_does_not_fit_it(setting):
    config = {"diffusion": {"process": {"use": "flow", "shift": 1.0}}, "sampling": {"spacing": {"use": "shifted"}}}
    with refused(UserError, "diffusion.process", "'flow' -> 'edm'", FIXED["diffusion.process"]):
        check_parts([setting], config)
    check_parts(["diffusion.process=flow", "diffusion.process.shift=2", "sampling.spacing=trailing"], config)


def test_all_changes_of_fixed_keys_are_refused_at_once(trained):
    facts = ("run.seed", "diffusion.prediction", "optimizer.use")
    resume_refused(trained, "run.seed=1", "optimizer.use=sgd", "diffusion.prediction=sample", facts=facts)


def resume(tmp_path, state, hparams):
    toy_run({"changes": Changes({}), "state": Restores(state)}, resume=tmp_path, steps=3, hparams=hparams)


def test_the_state_of_a_script_without_a_config_is_not_compared(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    state = toy_run(steps=2).state_dict()
    assert state["config"] == {}
    resume(tmp_path, state, {"run": {"seed": 1}})
    del state["config"], state["data"], state["random"]  # older versions did not save these
    resume(tmp_path, state, {"run": {"seed": 1}})
    assert caplog.messages == []


def test_the_shift_may_change_but_not_the_side_for_which_it_holds(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    flow = {"use": "flow", "shift": 1.0, "shift_side": 16.0}
    state = saved(toy_run(steps=2, hparams={"diffusion": {"process": flow}}))
    resume(tmp_path, state, {"diffusion": {"process": {**flow, "shift": 2.0}}})
    assert "diffusion.process.shift 1.0 -> 2.0" in caplog.text
    for other in ({"use": "flow", "shift": 1.0}, {**flow, "shift_side": 32.0}):
        with refused(UserError, "diffusion.process.shift_side 16.0", FIXED["diffusion.process"]):
            resume(tmp_path, state, {"diffusion": {"process": other}})


def test_a_rollback_is_not_compared(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    state = saved(toy_run(steps=2, hparams={"optimizer": {"lr": 1}}))
    plugins = {"changes": Changes({}), "state": Restores(state)}
    with toy_loop(plugins, run_dir=tmp_path, resume=True, steps=3, hparams={"optimizer": {"lr": 2}}) as loop:
        assert loop.hook.restore(loop=loop) is state
    check_one(caplog.messages, "optimizer.lr 1 -> 2")
