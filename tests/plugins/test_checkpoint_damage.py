"""Incomplete, damaged or forged checkpoints: a clear message or the newest intact one, never a wrong value."""

import json
import os
import re
import shutil

import pytest
from hypothesis import given, strategies as st

from hookdiff import UserError
from hookdiff.builtin.logged import Metrics
from hookdiff.disk.tree import flatten
from hookdiff.testing import assert_same, toy_loop, toy_model
from hookdiff_checkpoint import Checkpoint, read_checkpoint
from hookdiff_ema import EMA
from tests.conftest import check_facts, refused, warnings
from tests.hostile.mutations import changes

SAVED = (2, 4, 6)
FILES = ("ema.safetensors", "manifest.json", "model.safetensors", "optimizers.safetensors")


def build(run_dir, steps=8, resume=True, model=None):
    plugins = {"metrics": Metrics(), "ema": EMA(decay=0.9), "checkpoint": Checkpoint(every=2)}
    return toy_loop(plugins, run_dir=run_dir, resume=resume, steps=steps, model=model or toy_model(3), batch_size=10)


def name(step):
    return f"step-{step:08d}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run that saved at steps 2, 4 and 6, and the content of each save: name, tensors, the rest."""
    run = tmp_path_factory.mktemp("saved") / "run"
    run.mkdir()
    build(run, 6, resume=False).run()
    return run, {step: flatten(read_checkpoint(run / "checkpoints" / name(step))) for step in SAVED}


@pytest.fixture
def broken(saved, tmp_path):
    """A copy of the run to be damaged."""
    shutil.copytree(saved[0], tmp_path / "run")
    return tmp_path / "run"


def is_what_was_saved(loop, states):
    """Whether the loop, which has not made a step, has exactly one of the saved states."""
    tensors, tree = states[loop.progress.step]
    now, now_tree = flatten(loop.state_dict())
    assert_same(now, tensors)
    return json.dumps(now_tree, sort_keys=True) == json.dumps(tree, sort_keys=True)


def delete(path, others, draw):
    path.unlink()


def swap(path, others, draw):
    other = others[draw(st.integers(0, 2))]
    if path.exists() and other.exists():
        one, two = path.read_bytes(), other.read_bytes()
        path.write_bytes(two)
        other.write_bytes(one)


def change(path, others, draw):
    path.write_bytes(draw(changes(path.read_bytes())))


@given(data=st.data())
def test_damage_leads_to_a_message_or_to_the_newest_intact_checkpoint(data, saved, tmp_path_factory):
    run = tmp_path_factory.mktemp("run") / "run"
    shutil.copytree(saved[0], run)
    folder = run / "checkpoints"
    for _ in range(data.draw(st.integers(1, 4))):
        step, file = data.draw(st.sampled_from(SAVED)), data.draw(st.sampled_from(FILES))
        damage = data.draw(st.sampled_from([change, change, delete, swap]))
        if (folder / name(step) / file).exists():
            damage(folder / name(step) / file, [folder / name(other) / file for other in SAVED], data.draw)
    intact = [
        step
        for step in SAVED
        if all(
            (folder / name(step) / file).exists()
            and (folder / name(step) / file).read_bytes() == (saved[0] / "checkpoints" / name(step) / file).read_bytes()
            for file in FILES
        )
    ]
    loop = build(run)
    try:
        with loop:
            # Swapped files of two intact folders may give an intact checkpoint of another name; no value is ever wrong.
            assert is_what_was_saved(loop, saved[1])
            assert loop.progress.step >= max(intact, default=2)
    except UserError as error:
        assert not intact
        check_facts(error, run)


@pytest.mark.parametrize("step", SAVED)
@pytest.mark.parametrize("file", FILES)
def test_a_file_that_is_missing_is_named(step, file, broken, caplog):
    (broken / "checkpoints" / name(step) / file).unlink()
    with refused(UserError, name(step), file, "No such file or directory"):
        read_checkpoint(broken / "checkpoints" / name(step))
    with build(broken) as loop:
        assert loop.progress.step == (4 if step == 6 else 6)
    assert len(warnings(caplog)) == (step == 6 or file == "manifest.json")


@pytest.mark.parametrize(
    ("file", "damage", "fact"),
    [
        ("ema.safetensors", lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:], "SHA-256"),
        ("manifest.json", lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:], "SHA-256"),
        ("manifest.json", lambda data: data.replace(b'"format": 3', b'"format": 6'), "SHA-256"),  # no newer version
        ("manifest.json", lambda data: b"\xff\x00", "JSON"),
    ],
)
def test_a_damaged_file_is_named_with_the_reason_and_passed_over(file, damage, fact, broken):
    path = broken / "checkpoints" / name(6) / file
    path.write_bytes(damage(path.read_bytes()))
    with refused(UserError, name(6), file, fact):
        read_checkpoint(path.parent)
    with build(broken) as loop:
        assert loop.progress.step == 4


def test_golden_message_of_a_damaged_checkpoint(broken):
    path = broken / "checkpoints" / name(6) / "model.safetensors"
    size = path.stat().st_size
    os.truncate(path, 100)
    for other in SAVED[:2]:
        shutil.rmtree(broken / "checkpoints" / name(other))
    with pytest.raises(UserError) as caught:
        build(broken).run()
    assert str(caught.value).replace(str(broken), "RUN") == (
        "RUN: none of its checkpoints can be used:\n"
        f"  RUN/checkpoints/step-00000006: model.safetensors has 100 bytes, {size:,} were written"
    )


def test_all_checkpoints_that_were_tried_are_named(broken):
    for step, file in zip(SAVED, FILES, strict=False):
        (broken / "checkpoints" / name(step) / file).write_bytes(b"gone")
    with refused(UserError, broken) as caught:
        build(broken).run()
    assert sorted(set(re.findall(r"step-\d+", str(caught.value)))) == [name(step) for step in SAVED]


def test_reading_shares_nothing_with_the_files(saved):
    folder = saved[0] / "checkpoints" / name(6)
    before = {file: (folder / file).read_bytes() for file in FILES}
    for tensor in flatten(read_checkpoint(folder))[0].values():
        tensor.zero_()
    assert before == {file: (folder / file).read_bytes() for file in FILES}
