"""Each format with each mutation, and with any changed bytes: an error that names the file, or the right values."""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings, strategies as st

from hookdiff import UserError
from hookdiff_report.cli import command as report
from hookdiff_watch.cli import command as watch
from tests.conftest import check_facts, check_one
from tests.hostile.formats import FORMATS, MUTATIONS, Format, make_history
from tests.hostile.mutations import CANARY, HERE, changes, in_time, listing, logged, mutated

pytestmark = [
    pytest.mark.usefixtures("here"),  # its end leaves the folders of the formats
    pytest.mark.skipif(os.name == "nt", reason="Windows has no such files"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning"),  # Pillow's and numpy's about damage
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Format], tuple[Path, Any]]:
    """Return a function that gives the folder of a format, and what a file there holds; it makes each folder once."""
    folders: dict[Any, tuple[Path, Any]] = {}
    whole: dict[Any, Path] = {}  # for all formats that are made alike

    def make(one: Format) -> tuple[Path, Any]:
        if one.make not in whole:
            whole[one.make] = tmp_path_factory.mktemp("whole")
            os.chdir(whole[one.make])
            one.make(whole[one.make])
        if one.name not in folders:
            folder = tmp_path_factory.mktemp("made")
            shutil.copytree(whole[one.make], folder, dirs_exist_ok=True)
            os.chdir(folder)
            folders[one.name] = folder, one.read(folder)
        os.chdir(folders[one.name][0])
        return folders[one.name]

    return make


def find(one: Format, folder: Path) -> Path:
    (path,) = folder.glob(one.file)
    return path


def same(value: Any, other: Any) -> bool:
    if isinstance(value, tuple) and isinstance(other, tuple):
        return len(value) == len(other) and all(map(same, value, other))
    if isinstance(value, torch.Tensor):
        return isinstance(other, torch.Tensor) and value.shape == other.shape and torch.equal(value, other)
    return bool(value == other)


def check(one: Format, outcome: str, path: Path, folder: Path, good: Any) -> None:
    """Read the damaged file, and assert the right outcome."""
    rule, before = one.rule, listing(folder)
    with in_time(), logged() as lines:
        try:
            value, error = one.read(folder), None
        except rule.errors as caught:
            value, error = None, caught
    facts = rule.named.format(name=path.name).split()
    if error:
        assert outcome in ("refused", "any"), error
        check_facts(error, *facts)
    elif outcome == "any":
        assert rule.is_valid(value)
    else:
        assert same(value, rule.left_out(path, good) if outcome == "left out" else good)
        assert outcome != "refused"
    if outcome == "made again":
        check_one(lines, *facts)
        with in_time(), logged() as lines:
            assert same(one.read(folder), good)
        assert not lines
    if rule.is_read_only:
        assert listing(folder) == before
    assert not Path(CANARY).exists()


# Each has a reader, or a rule, of its own; the other formats are wide.
KINDS = """config, metrics, skimmed metrics, followed metrics, outcome, lock, newest picture, sheet of a film, manifest
model.safetensors in a checkpoint, step.json of a kept step, snapshot of an average, png in a folder, captions, txt
picture left out, memory, pixels of a cache, labels, csv, labels, jsonl, npy, deflated npz, statistics, shard, ustar
weights to start from"""
rows = [pytest.param(one, id=one.name, marks=[pytest.mark.wide] * (one.name not in KINDS)) for one in FORMATS]


@pytest.mark.parametrize("one", rows)
def test_a_damaged_file(made: Callable[[Format], tuple[Path, Any]], one: Format) -> None:
    folder, good = made(one)
    path = find(one, folder)
    for mutation in one.rule.mutations:
        try:
            with mutated(path, mutation):
                check(one, one.rule.right(mutation), path, folder, good)
        except BaseException as error:
            error.add_note(f"{one.name}: {mutation}")
            raise


WHOLE = Format("whole run", make_history, "", lambda folder: None)
FILES = ["config.toml", "outcome.json", "grid/step-00000002.png"]
FILES += [f"{name}.jsonl" for name in ("metrics", "events", "texts", "distributions")]


@pytest.mark.wide
@given(file=st.sampled_from(FILES), mutation=st.sampled_from(MUTATIONS), command=st.sampled_from([report, watch]))
def test_what_shows_a_damaged_run_ends_with_one_message_at_most(
    made: Callable[[Format], tuple[Path, Any]], file: str, mutation: str, command: click.Command
) -> None:
    folder, _ = made(WHOLE)
    with mutated(folder / "run" / file, mutation), in_time(), suppress(UserError):
        done = CliRunner().invoke(command, [str(folder / "run")], catch_exceptions=False)
        assert done.exit_code == 0, done.output


def means(content: bytes) -> Any:
    """Return the values in JSON, which may be written with other spaces, and any other content as it is."""
    try:
        return repr(json.loads(content))
    except (ValueError, RecursionError):
        return content


@pytest.mark.wide
@pytest.mark.parametrize("one", [one for one in FORMATS if "half" in one.rule.mutations], ids=lambda one: one.name)
@given(data=st.data())
@settings(HERE, max_examples=settings().max_examples // 2)
def test_changed_bytes(made: Callable[[Format], tuple[Path, Any]], one: Format, data: st.DataObject) -> None:
    folder, good = made(one)
    path = find(one, folder)
    whole = path.read_bytes()
    changed = data.draw(changes(whole))
    for _ in range(data.draw(st.integers(0, 2))):
        changed = data.draw(changes(changed))
    outcome = "same" if means(changed) == means(whole) else one.rule.changed
    with mutated(path, "its copy inside"):
        path.unlink()
        path.write_bytes(changed)
        check(one, outcome, path, folder, good)
