"""Damaged and forged folders of kept steps: a replay runs with the weights in them, or one message refuses it."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli
import tomli_w
import torch
from attrs import define
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file

from hookdiff import Loop, UserError, build_loop, hookimpl, load_config
from hookdiff.disk import stamped
from hookdiff_nan.replay import replay, retrain
from tests.conftest import refused, write_small
from tests.hostile.test_checkpoints import KINDS, damage, forge_tensor, scalars, values

NAME = "step-00000003-position-00000003"
FILES = ("batch", "buffers", "data", "model", "plugins")
weights: list[dict[str, torch.Tensor]] = []  # that the replayed steps began with


@define(eq=False)
class Seen:
    """Notes the weights before each step."""

    @hookimpl
    def before_step(self, loop: Loop) -> None:
        weights.append({name: value.detach().clone() for name, value in loop.model.named_parameters()})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that diverged at its third step, with a checkpoint of each step."""
    folder = tmp_path_factory.mktemp("kept")
    tables: dict[str, Any] = {
        "run": {"plugins": ["amp", "clip", "ema", "nan", "checkpoint"], "seed": 5},
        "model": {"use": "unet", "channels": 8, "num_res_blocks": 1, "head_dim": 8, "num_classes": 10},
        "diffusion": {"process": "ddpm"},  # epsilon gets to NaN at this rate
        "optimizer": {"use": "sgd", "lr": 1e4},
        "plugins": {"checkpoint": {"every": 1}, "clip": {"rule": "adaptive"}, "amp": {"precision": "off"}},
    }
    loop = build_loop(load_config(write_small(folder / "config.toml", **tables)), folder / "run")
    assert loop.run() == "on_nan"
    assert [path.name for path in (folder / "run" / "nan").iterdir()] == [NAME]
    return folder / "run"


@pytest.fixture(autouse=True)
def settings_of_torch() -> Iterator[None]:
    """Give back the settings that a replay makes."""
    yield
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")


@pytest.fixture(scope="module")
def copied(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Return a function that copies the run and returns the kept step of the copy."""

    def copy() -> Path:
        other = tmp_path_factory.mktemp("forged") / "run"
        shutil.copytree(run, other)
        return other / "nan" / NAME

    return copy


def stamp(step: Path, facts: dict[str, Any]) -> None:
    """Write step.json with right digests of all files and of itself."""
    if isinstance(facts.get("files"), dict):
        for name in facts["files"]:
            if (step / name).is_file():
                facts["files"][name] = hashlib.sha256((step / name).read_bytes()).hexdigest()
    (step / "step.json").write_bytes(stamped({key: value for key, value in facts.items() if key != "sha256"}))


def facts_of(step: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((step / "step.json").read_bytes())
    return facts


def check(step: Path, watched: bool = True, lr: float | None = None) -> str:
    """Replay the step: return "refused" or "ran"; if it ran and is `watched`, its weights were those of the file."""
    weights.clear()
    before = {path: path.read_bytes() for path in step.parents[1].rglob("*") if path.is_file()}
    said: list[str] = []
    try:
        if lr is None:
            replay(step, [f"{__name__}:Seen"] if watched else [], [], False, True, said.append)
        else:
            retrain(step, lr, [], [], True, said.append)
    except UserError:
        return "refused"
    finally:
        assert {path: path.read_bytes() for path in step.parents[1].rglob("*") if path.is_file()} == before
    assert said
    if weights:
        saved = load_file(step / "model.safetensors")
        for name, value in weights[0].items():
            assert torch.equal(value.nan_to_num(7), saved[name].nan_to_num(7)), name
            assert value.dtype == saved[name].dtype
    return "ran"


@given(data=st.data())
def test_forged_facts(data: st.DataObject, copied: Callable[[], Path]) -> None:
    step = copied()
    facts = facts_of(step)
    part = data.draw(st.sampled_from([*sorted(facts.keys() - {"sha256"}), *["progress", "machine", "files"] * 2]))
    damage(data, {part: facts[part]} if not isinstance(facts[part], dict) else facts[part])
    if not isinstance(facts[part], dict):
        facts[part] = data.draw(values)
    stamp(step, facts)
    lr = data.draw(st.sampled_from([None, None, None, 1e-3]))
    check(step, data.draw(st.booleans()), lr)
    shutil.rmtree(step.parents[2])


@given(data=st.data())
def test_forged_tensors(data: st.DataObject, copied: Callable[[], Path]) -> None:
    step = copied()
    file = step / f"{data.draw(st.sampled_from(FILES))}.safetensors"
    tensors = load_file(file)
    names = st.sampled_from([*sorted(tensors), "added"])
    for name in data.draw(st.lists(names, min_size=1, max_size=3, unique=True)):
        forged = forge_tensor(tensors.get(name, torch.ones(3)), data.draw(st.sampled_from(KINDS)))
        tensors = {**tensors, name: forged} if forged is not None else {k: v for k, v in tensors.items() if k != name}
    save_file(tensors, file)
    stamp(step, facts_of(step))
    check(step, data.draw(st.booleans()))
    shutil.rmtree(step.parents[2])


small = st.integers(-8, 64) | scalars.filter(lambda value: type(value) is not int) | st.sampled_from(["unet", "", "0"])


@given(data=st.data())
def test_forged_configs(data: st.DataObject, copied: Callable[[], Path]) -> None:
    step = copied()
    config = tomli.loads((step / "config.toml").read_text())
    damage(data, config, small.filter(lambda value: value is not None))
    (step / "config.toml").write_bytes(tomli_w.dumps(config).encode("utf-8", "replace"))
    stamp(step, facts_of(step))
    check(step, data.draw(st.booleans()))
    shutil.rmtree(step.parents[2])


@given(data=st.data())
def test_damaged_bytes(data: st.DataObject, copied: Callable[[], Path]) -> None:
    step = copied()
    file = step / data.draw(st.sampled_from([*(f"{name}.safetensors" for name in FILES), "config.toml", "step.json"]))
    content = bytearray(file.read_bytes())
    start = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(start, min(len(content), start + 9)))
    content[start:end] = data.draw(st.binary(max_size=9))
    changed = bytes(content) != file.read_bytes()
    file.write_bytes(content)
    has_right_digests = file.name != "step.json" and data.draw(st.booleans())
    if has_right_digests:
        stamp(step, facts_of(step))
    assert check(step) == "refused" or has_right_digests or not changed
    shutil.rmtree(step.parents[2])


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path) -> None:
    other = path.with_name("elsewhere")
    path.rename(other)
    path.symlink_to(other)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("become", [pipe, link, folder])
@pytest.mark.parametrize("name", ["step.json", "config.toml", "model.safetensors", "report.txt"])
def test_only_files_are_opened(name: str, become: Callable[[Path], None], copied: Callable[[], Path]) -> None:
    step = copied()
    become(step / name)
    assert check(step) == "refused"


@pytest.mark.parametrize("name", ["../../config.toml", "/etc/hostname", "nested/model.safetensors"])
def test_a_file_outside_of_the_step_is_refused(name: str, copied: Callable[[], Path]) -> None:
    step = copied()
    facts = facts_of(step)
    facts["files"][name] = "0" * 64
    stamp(step, facts)
    with refused(UserError, step / "step.json", "files"):
        replay(step, [], [], False, True, print)


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("machine", "threads", 0),
        ("machine", "threads", 10**6),
        ("machine", "threads", True),
        ("machine", "matmul_precision", "low"),
        ("machine", "deterministic", "yes"),
        ("progress", "position", -1),
        ("progress", "epoch", 0.5),
        ("results", "per_sample", [None]),
        ("files", "model.safetensors", "0"),
    ],
)
def test_a_wrong_value_is_named(part: str, key: str, value: Any, copied: Callable[[], Path]) -> None:
    step = copied()
    facts = facts_of(step)
    facts[part][key] = value
    (step / "step.json").write_bytes(stamped({key: value for key, value in facts.items() if key != "sha256"}))
    threads = torch.get_num_threads()
    with refused(UserError, step / "step.json", part if part == "files" else f"{part}.{key}"):
        replay(step, [], [], False, True, print)
    assert torch.get_num_threads() == threads


def test_an_untouched_step_runs(copied: Callable[[], Path], capsys: pytest.CaptureFixture[str]) -> None:
    step = copied()
    assert replay(step, [], [], False, False, print)  # bit for bit
    assert check(step) == "ran"
    assert check(step, lr=1e-3) == "ran"


def test_a_link_out_of_the_run_directory_is_no_checkpoint(copied: Callable[[], Path], tmp_path: Path) -> None:
    step = copied()
    checkpoints = step.parents[1] / "checkpoints"
    shutil.move(checkpoints, tmp_path / "moved")
    checkpoints.symlink_to(tmp_path / "moved")
    said: list[str] = []
    retrain(step, 1e-3, [], [], False, said.append)
    assert "(step 0)" in said[0]
