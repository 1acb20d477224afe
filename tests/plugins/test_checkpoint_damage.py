"""Incomplete, damaged or forged checkpoints: a clear message or the newest intact one, never a wrong value."""

import hashlib
import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file

from hookdiff import UserError
from hookdiff.builtin import Metrics
from hookdiff.disk import flatten
from hookdiff.testing import assert_same, toy_loop, toy_model, weights
from hookdiff_checkpoint import Checkpoint, find_checkpoints, read_checkpoint
from hookdiff_ema import EMA
from tests.conftest import check_facts, finish, refused, warnings

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


def flip(path, others, where, value):
    data = bytearray(path.read_bytes())
    data[where % len(data)] ^= value
    path.write_bytes(data)


def truncate(path, others, where, value):
    data = path.read_bytes()
    path.write_bytes(data[: where % len(data)])


def extend(path, others, where, value):
    path.write_bytes(path.read_bytes() + bytes([value]))


def delete(path, others, where, value):
    path.unlink()


def swap(path, others, where, value):
    other = others[where % len(others)]
    if path.exists() and other.exists():
        one, two = path.read_bytes(), other.read_bytes()
        path.write_bytes(two)
        other.write_bytes(one)


def shuffle(path, others, where, value):
    data = path.read_bytes()
    cut = where % len(data)
    path.write_bytes(data[cut:] + data[:cut])


damages = st.tuples(
    st.sampled_from([flip, truncate, extend, delete, swap, shuffle]),
    st.sampled_from(SAVED),
    st.sampled_from(FILES),
    st.integers(0, 10**6),
    st.integers(1, 255),
)


@given(done=st.lists(damages, min_size=1, max_size=4))
def test_damage_leads_to_a_message_or_to_the_newest_intact_checkpoint(done, saved, tmp_path_factory):
    run = tmp_path_factory.mktemp("run") / "run"
    shutil.copytree(saved[0], run)
    folder = run / "checkpoints"
    for damage, step, file, where, value in done:
        if (folder / name(step) / file).exists():
            damage(folder / name(step) / file, [folder / name(other) / file for other in SAVED], where, value)
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


def rewrite(path, change):
    """Apply `change` to the manifest, and give it a valid digest."""
    manifest = json.loads("{" + path.read_text().partition("\n")[2])
    change(manifest)
    text = json.dumps(manifest, indent=1).encode().removeprefix(b"{\n")
    path.write_bytes(b'{"sha256": "%s",\n' % hashlib.sha256(text).hexdigest().encode() + text)


def forge(folder, file, data):
    """Replace a file by `data`, and put the digest of `data` into the manifest."""
    (folder / file).write_bytes(data)
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    rewrite(folder / "manifest.json", lambda manifest: manifest["files"].update({file: entry}))


def refusal(run, step=6):
    """Return the message about the only checkpoint, without the path of the run."""
    for other in set(SAVED) - {step}:
        shutil.rmtree(run / "checkpoints" / name(other))
    with pytest.raises(UserError) as caught:
        build(run).run()
    return str(caught.value).replace(str(run), "RUN")


def test_golden_message_of_a_damaged_checkpoint(broken):
    path = broken / "checkpoints" / name(6) / "model.safetensors"
    size = path.stat().st_size
    os.truncate(path, 100)
    assert refusal(broken) == (
        "RUN: none of its checkpoints can be used:\n"
        f"  RUN/checkpoints/step-00000006: model.safetensors has 100 bytes, {size:,} were written"
    )


def test_a_digest_that_is_right_changes_nothing(broken, saved):
    rewrite(broken / "checkpoints" / name(6) / "manifest.json", lambda manifest: None)
    with build(broken) as loop:
        assert is_what_was_saved(loop, saved[1])


def replace_by(kind):
    def damage(folder):
        (folder / "model.safetensors").unlink()
        kind(folder / "model.safetensors")

    return damage


def link_elsewhere(folder):
    path = folder / "model.safetensors"
    path.symlink_to(path.replace(folder.parent / "elsewhere"))


def change(key, value):
    return lambda folder: rewrite(folder / "manifest.json", lambda manifest: manifest.update({key: value}))


def drop(table, key):
    return lambda folder: rewrite(folder / "manifest.json", lambda manifest: manifest[table].pop(key))


def make_newer(folder):
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"format": 3', b'"format": 6'))


DAMAGED = {
    "a flipped bit": (lambda f: flip(f / "ema.safetensors", [], 200, 1), ("ema.safetensors", "SHA-256")),
    "one in the manifest": (lambda f: flip(f / "manifest.json", [], 200, 1), ("manifest.json", "SHA-256")),
    "one that makes the format newer": (make_newer, ("manifest.json", "SHA-256")),
    "no JSON": (lambda f: (f / "manifest.json").write_bytes(b"\xff\x00"), ("manifest.json", "JSON")),
    "an older version": (change("format", 1), ("hookdiff", 1, 3)),
    "a folder": (replace_by(Path.mkdir), ("model.safetensors",)),
    "a pipe": (replace_by(os.mkfifo), ("model.safetensors",)),
    "a link": (link_elsewhere, ("manifest.json", "model.safetensors")),
    "a part without its file": (drop("files", "model.safetensors"), ("manifest.json", "model.safetensors")),
}


@pytest.mark.parametrize(("damage", "facts"), DAMAGED.values(), ids=DAMAGED.keys())
def test_the_damaged_file_is_named(damage, facts, broken):
    damage(broken / "checkpoints" / name(6))
    check_facts(refusal(broken), "step-00000006", *facts)


def test_a_checkpoint_of_a_newer_version_is_not_skipped(broken):
    change("format", 7)(broken / "checkpoints" / name(6))
    change("versions", {"hookdiff": "9.1"})(broken / "checkpoints" / name(6))
    with refused(UserError, broken / "checkpoints" / name(6), "9.1", 7, 4):
        build(broken).run()


def test_a_pickle_is_not_loaded(broken, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "was run"), "w"))

    torch.save(toy_model().state_dict(), tmp_path / "w.pt")
    shutil.copytree(broken, tmp_path / "again")
    for run, data in ((broken, pickle.dumps(Bomb())), (tmp_path / "again", (tmp_path / "w.pt").read_bytes())):
        forge(run / "checkpoints" / name(6), "model.safetensors", data)
        check_facts(refusal(run), "step-00000006", "model.safetensors")
    assert not (tmp_path / "was run").exists()


@pytest.mark.parametrize("data", [b"", b"\0" * 8, b"\0" * 100, b"\xff" * 100, b"\x02" + b"\0" * 7 + b"{}"])
def test_bytes_that_are_not_tensors(data, broken):
    forge(broken / "checkpoints" / name(6), "model.safetensors", data)
    message = refusal(broken)
    assert "model.safetensors" in message or "0.weight" in message  # a file without tensors is of another model


def test_a_foreign_models_weights(broken, tmp_path):
    other = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.SiLU(), torch.nn.Linear(9, 4))
    save_file(other.state_dict(), tmp_path / "other.safetensors")
    data = (tmp_path / "other.safetensors").read_bytes()
    (broken / "checkpoints" / name(6) / "model.safetensors").write_bytes(data)
    build(broken, 6).run()  # skipped: not as it was written
    forge(broken / "checkpoints" / name(6), "model.safetensors", data)
    check_facts(refusal(broken), "3.weight", "3.bias", "0.weight", (9, 4), (8, 4))


@pytest.mark.parametrize(
    "outside",
    ["../model.safetensors", "/etc/passwd", "a/../../x.safetensors", "..", "", ".safetensors", "a\\b.safetensors"],
)
def test_a_path_that_leaves_the_folder(outside, broken):
    def leave(manifest):
        manifest["files"][outside] = manifest["files"].pop("model.safetensors")
        manifest["parts"]["model"]["file"] = outside

    rewrite(broken / "checkpoints" / name(6) / "manifest.json", leave)
    check_facts(refusal(broken), "step-00000006", "manifest.json", repr(outside))


@pytest.mark.parametrize("count", [-1, 1.5, None, "6", float("inf"), [], {}])
@pytest.mark.parametrize("key", ["position", "step"])
def test_a_count_that_is_not_valid(key, count, broken):
    path = broken / "checkpoints" / name(6) / "manifest.json"
    rewrite(path, lambda manifest: manifest["parts"]["progress"]["values"].update({key: count}))
    check_facts(refusal(broken), "step-00000006", "manifest.json")


def test_a_checkpoint_without_a_model(broken):
    drop("parts", "model")(broken / "checkpoints" / name(6))
    check_facts(refusal(broken), "manifest.json", "'model'")


def test_all_checkpoints_that_were_tried_are_named(broken):
    for step, file in zip(SAVED, FILES, strict=False):
        extend(broken / "checkpoints" / name(step) / file, [], 0, 1)
    with refused(UserError, broken) as caught:
        build(broken).run()
    assert sorted(set(re.findall(r"step-\d+", str(caught.value)))) == [name(step) for step in SAVED]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def places(node, path=()):
    """The paths of all nodes below `node`."""
    for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        yield (*path, key)
        yield from places(node[key], (*path, key))


@given(data=st.data())
def test_a_manifest_that_is_forged_leads_to_no_traceback(data, saved, tmp_path_factory):
    run = tmp_path_factory.mktemp("run") / "run"
    shutil.copytree(saved[0] / "checkpoints" / name(6), run / "checkpoints" / name(6))

    manifest = json.loads((run / "checkpoints" / name(6) / "manifest.json").read_bytes())
    del manifest["sha256"]
    *path, last = data.draw(st.sampled_from(list(places(manifest))))
    other, is_gone = data.draw(values), data.draw(st.booleans())

    def change(manifest):
        for key in path:
            manifest = manifest[key]
        if is_gone:
            del manifest[last]
        else:
            manifest[last] = other

    rewrite(run / "checkpoints" / name(6) / "manifest.json", change)
    # What a plugin keeps for itself only it can judge, and it may do so late.
    steps = 6 if any(key.startswith("plugins/") for key in (*path, last) if isinstance(key, str)) else 8
    try:
        build(run, steps).run()
    except UserError as error:
        assert str(error)  # noqa: PT017


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "file"), list(zip([flip, truncate, delete, extend], FILES, strict=True)))
def test_no_traceback_at_the_command_line(damage, file, start, write_config, tmp_path):
    words = ["run", write_config(run={"steps": 2, "plugins": ["checkpoint", "ema"]}), "--out", tmp_path / "run"]
    assert finish(start(tmp_path, *words))[0] == 0
    damage(tmp_path / "run" / "checkpoints" / name(2) / file, [], 300, 1)
    code, _, err = finish(start(tmp_path, *words, "--resume"))
    assert code == 2
    check_facts(err, tmp_path / "run", name(2))
    assert "Traceback" not in err


def test_reading_shares_nothing_with_the_files(saved):
    folder = saved[0] / "checkpoints" / name(6)
    before = {file: (folder / file).read_bytes() for file in FILES}
    for tensor in flatten(read_checkpoint(folder))[0].values():
        tensor.zero_()
    assert before == {file: (folder / file).read_bytes() for file in FILES}


def test_plain_safetensors_reads_the_files(saved):
    loop = build(saved[0].parent / "again", 6, resume=False)
    loop.run()
    folder = saved[0] / "checkpoints" / name(6)
    assert find_checkpoints(saved[0])[0][0].path == folder
    assert_same(load_file(folder / "model.safetensors"), weights(loop))
