"""`hookdiff selftest resume`: every plugin of hookdiff passes, and a plugin that does not resume is named."""

import json
import os
import subprocess
import tomllib
from pathlib import Path
from subprocess import CompletedProcess
from typing import IO, Any

import pytest
import tomli_w
import torch
from click.testing import CliRunner, Result
from hypothesis import given, strategies as st
from PIL import Image
from torch import Tensor

from hookdiff import UserError, load_config
from hookdiff.testing import ValueKey, all_differences, snapshot, toy_loop
from hookdiff_selftest.cli import resume as command
from hookdiff_selftest.resume import Plan, make_plan
from hookdiff_selftest.state_recorder import put_back
from hookdiff_selftest.written import files, inside, logged, number_difference
from tests import first_party
from tests.conftest import check_facts
from tests.forked import begin, run_code

# With these each plugin does something in the half of 12 steps, before the save and after it.
OPTIONS: dict[str, dict[str, Any]] = {
    **first_party.OPTIONS,
    "clip": {"rule": {"use": "adaptive", "warmup": 2, "factor": 0.9}},
    "debug": {"every": 3},
    "loss": {"window": 20, "plateau": 0, "every": 3},
    "memory": {"empty_cache_every": 4},
    "spectral": {},
}
KINDS = [*first_party.KINDS]
slow = pytest.mark.slow
DEAR = {"aim", "compile", "report", "wandb"}  # plugins that cost seconds in each run
# ddp is there, and excludes fsdp; lora gives other names to layers, of which spectral names one.
ALL = [name for name in KINDS if name not in DEAR and name not in ("fsdp", "lora")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a selftest, whose runs are forked from a process that has imported torch."""

    def run(command: list[str], stdout: IO[bytes], env: dict[str, str], **streams: Any) -> CompletedProcess[bytes]:
        _, _, _, code, *words = command
        with open(os.devnull) as nothing:
            places = (nothing.fileno(), stdout.fileno(), stdout.fileno())
            process = begin(run_code, code, words, folder=tmp_path, environment=env, streams=places)
        return CompletedProcess(command, process.wait())

    if os.name != "nt":
        monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(folder: Path, *plugins: str, source: str = "tests.faulty:Rolled", workers: int = 0) -> Path:
    tables = {
        "run": {"epochs": 9, "batch_size": 10, "micro_batch": 4, "log_every": 3, "device": "cpu", "plugins": plugins},
        "data": {"source": source, "workers": workers, "held_out": 8},
        "model": {"use": "tests.faulty:Net"},
        "diffusion": {"process": {"use": "vp", "schedule": "cosine", "timesteps": 20}},
        "optimizer": {"lr": 0.01},
        "sampling": {"steps": 2},
        "plugins": {name: options for name, options in OPTIONS.items() if name in plugins},
    }
    path = folder / "small.toml"
    path.write_text(tomli_w.dumps(tables))
    return path


def selftest(path: Path, *options: str, code: int = 0) -> Result:
    """Return what the command gives that ends with this exit code."""
    result = CliRunner().invoke(command, [str(path), "--steps", "12", *options])
    if isinstance(result.exception, Exception):  # and not SystemExit
        raise result.exception
    assert result.exit_code == code, result.output
    return result


@pytest.mark.wide
def test_all_plugins_together_resume_exactly(folder: Path) -> None:
    result = selftest(config(folder, *ALL, "tests.faulty:Saved", workers=2))
    verdict, compared, *more = result.stdout.splitlines()
    assert verdict.startswith("the resumed run equals the run that was never stopped, bit for bit: saved at step ")
    assert verdict.endswith("resumed with 0 workers after 2")
    tensors, values, numbers, files = (int(word) for word in compared.split() if word.isdigit())
    assert min(tensors, values) > 50
    assert numbers > 100
    assert files >= 5  # pictures and snapshots
    assert more == []  # nothing was left untried
    assert "training 12 steps without a stop" in result.stderr


@pytest.mark.cuda
def test_a_run_with_cuda_graphs_resumes_exactly(folder: Path) -> None:
    path = config(folder, "ema", "cuda_graphs", "checkpoint", source="digits")
    selftest(path, "--set", "run.device=cuda", "--set", "run.micro_batch=10")


@pytest.mark.parametrize(
    ("name", "others", "lost"),
    [
        # It changes weights after the step, and this changes the values of all other plugins.
        pytest.param("Scales", ["checkpoint"], "the field scales/updates (5 and 0)", marks=pytest.mark.slow),
        pytest.param("Scales", ["ema", "lr", "nan", "checkpoint"], "the field scales/updates", marks=pytest.mark.slow),
        pytest.param("Scales", ALL, "the field scales/updates (5 and 0)", marks=pytest.mark.slow),
        # These show only in the weights and the losses.
        pytest.param("Forgets", ["ema", "checkpoint"], "the field forgets/left/0", marks=pytest.mark.slow),
        pytest.param("Mirrors", ALL, "the field mirrors/luck", marks=pytest.mark.slow),
        pytest.param("Mirrors", ["ema", "checkpoint"], "the field mirrors/luck", marks=pytest.mark.slow),
    ],
)
def test_a_plugin_that_forgets_a_field_is_named(name: str, others: list[str], lost: str, folder: Path) -> None:
    # By its config the run ends after 3 steps, sooner than the selftest; in the next test it ends later.
    path = config(folder, *others, f"tests.faulty:{name}")
    result = selftest(path, "--set", "run.epochs=1", code=1)
    verdict, field, advice, counts = result.stdout.splitlines()
    assert verdict.startswith(f"not resumed exactly because of the plugin {name.lower()!r}; first seen: ")
    assert lost in field
    assert "state_dict" in advice
    assert len(others) == 1 or " of ema" in counts
    assert all(len(line) < 400 for line in result.stdout.splitlines())


UNLIKE = "two runs without a stop are not the same, perhaps because of the plugin"


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("Counts", "because of the plugin 'counts'; first seen: the logged number updates after step 6 is 6.0 in "),
        pytest.param("Mangles", "the saved value plugins/mangles/steps (5 and 0)", marks=slow),
        pytest.param("Draws", "not resumed exactly, perhaps because of the plugin 'draws'", marks=slow),
        pytest.param("Draws", "it draws from a global generator in before_step", marks=slow),
        pytest.param("Wild", f"{UNLIKE} 'wild'", marks=slow),
        pytest.param("Noisy", f"{UNLIKE} 'noisy'", marks=slow),
        pytest.param("Appends", "not resumed exactly; first seen: the file mine.bin is 24 bytes ", marks=slow),
        pytest.param("Breaks", "the checkpoint's state of 'breaks' cannot be loaded: KeyError: 'momentum'", marks=slow),
    ],
)
def test_a_plugin_that_does_not_resume_is_named(name: str, fact: str, folder: Path) -> None:
    # Of digits, which are held in memory: items that are read when they are due seed the global generators.
    result = selftest(config(folder, "loss", "checkpoint", f"tests.faulty:{name}", source="digits"), code=1)
    assert fact in result.stdout
    if name not in ("Appends", "Breaks"):
        assert f"because of the plugin {name.lower()!r}" in result.stdout.splitlines()[0]


@pytest.mark.slow
def test_an_unseeded_draw_is_blamed_on_no_other_plugin(folder: Path) -> None:
    result = selftest(config(folder, "lr", "ema", "checkpoint", "tests.faulty:Secret"), code=1)
    assert "plugin 'lr'" not in result.stdout
    assert "plugin 'ema'" not in result.stdout


@pytest.mark.slow
def test_what_a_tracker_keeps_is_not_compared(folder: Path) -> None:
    selftest(config(folder, "checkpoint", "tests.faulty:Sessions", source="digits"))


@pytest.mark.slow
def test_a_table_with_doubled_rows_fails_also_beside_a_tracker(folder: Path) -> None:
    path = config(folder, "checkpoint", "tests.faulty:Rows", "tests.faulty:Sessions", source="digits")
    result = selftest(path, code=1)
    check_facts(result.stdout.splitlines()[0], "mine.csv")
    assert "because of the plugin" not in result.stdout


@pytest.mark.parametrize(
    ("name", "one", "other", "facts"),
    [
        ("x.csv", "step,loss\n1,0.5\n", "step,loss\n1,0.5\n1,0.5\n", ["2", "3"]),
        ("x.csv", "1,0.5\n2,0.25\n", "1,0.5\n2,0.125\n", ["line 2", "0.25", "0.125"]),
        ("x.csv", "step,time/s,elapsed_seconds\n1,0.5,2\n", "step,time/s,elapsed_seconds\n1,0.7,3\n", None),
        ("x.jsonl", '{"a": {"b": 1.0}}\n', '{"a": {"b": 2.0}}\n', ["a/b", "line 1", "1.0", "2.0"]),
        ("x.jsonl", '{"step": 1, "time": 7, "name": "x"}\n', '{"step": 1, "time": 8, "name": "y"}\n', None),
        ("x.json", '{"a": [1,\n2]}', '{"a": [1,\n3]}', ["a/1", "2", "3"]),
        ("x.txt", "step 5: loss 0.5\n", "step 5: loss 0.25\n", ["line 1", "0.5", "0.25"]),
        ("x.txt", "2026-01-01 10:00:01 step 5, 3.5 s, 7 it/s\n", "2026-01-02 11:00:01 step 5, 4 s, 9 it/s\n", None),
        ("x.log", "one\n", "one\ntwo\n", ["1 lines", "2 lines"]),
    ],
)
def test_texts_are_compared_by_their_numbers(name: str, one: str, other: str, facts: list[str] | None) -> None:
    assert number_difference(name, one, one) is None
    found = number_difference(name, one, other)
    assert (found is None) == (facts is None)
    if found:
        check_facts(found.describe("the first", "the second"), "the file x.", *facts or ())


def test_a_field_is_put_back_in_place_where_it_can_be_shared() -> None:
    tensor, items, table = torch.zeros(2), [1], {"a": torch.zeros(1), "gone": 1}
    inner = table["a"]
    assert put_back(tensor, torch.ones(2)) is tensor
    assert tensor.tolist() == [1.0, 1.0]
    assert put_back(items, [2, 3]) is items
    assert items == [2, 3]
    assert put_back(table, {"a": torch.ones(1), "b": 2}) is table
    assert table == {"a": inner, "b": 2}
    assert inner.item() == 1.0
    assert put_back(None, torch.ones(1)).item() == 1.0
    assert put_back(5, 7) == 7
    generator = torch.Generator().manual_seed(1)
    assert put_back(generator, torch.Generator().manual_seed(2)) is generator
    assert generator.initial_seed() == 2


@pytest.mark.slow
def test_a_run_that_completes_no_checkpoint_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint of 'mute' was complete"):
        selftest(config(folder, "tests.faulty:Mute"))


@pytest.mark.slow
def test_a_network_that_takes_its_shape_from_the_data_resumes_exactly(folder: Path) -> None:
    for index in range(40):
        Image.new("RGB", (16, 16), (6 * index, 0, 0)).save(folder / f"{index}.png")
    path = config(folder, "checkpoint")
    tables = tomllib.loads(path.read_text())
    tables["data"] = {"source": "folder", "path": str(folder)}
    tables["model"] = {"use": "dit", "hidden_size": 32, "depth": 1, "num_heads": 4, "patch_size": 4}
    path.write_text(tomli_w.dumps(tables))
    assert "bit for bit" in selftest(path).stdout


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("before", [0, 2])
def test_the_number_of_workers_may_change(before: int, workers: str, folder: Path) -> None:
    # Of 8 steps the resumed run saves at the last only, when the recorder has had its turn.
    selftest(config(folder, "checkpoint", "nan", workers=before), "--workers", workers, "--steps", "8")


@pytest.mark.parametrize("name", [pytest.param(name, marks=slow if name != "ema" else ()) for name in KINDS])
def test_every_plugin_alone_resumes_exactly(name: str, folder: Path) -> None:
    if name == "aim":
        pytest.importorskip("aim")
    names = dict.fromkeys([name, "checkpoint"])
    result = selftest(config(folder, *names, source="digits"))
    if name == "aim":
        assert "texts that differ, as names or times may: the saved value plugins/aim/run" in result.stdout


def test_a_run_without_a_plugin_that_saves_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"none of its plugins saves the run .* add one with --plugins NAME"):
        selftest(config(folder, "ema"))


@pytest.mark.slow
def test_a_run_that_fails_on_its_own_is_reported_with_its_output(folder: Path) -> None:
    with pytest.raises(UserError, match=r"(?s)the run that is never stopped ended with exit code 1; .*no such thing"):
        selftest(config(folder, "checkpoint", "tests.faulty:Fails"))


def plan(folder: Path, steps: int, log_every: int, batch_size: int, *plugins: str) -> Plan:
    settings = [f"run.log_every={log_every}", f"run.batch_size={batch_size}"]
    return make_plan(load_config(config(folder, "checkpoint", *plugins), (), settings), steps, 0)


def test_the_save_is_in_the_middle_of_an_epoch_and_of_a_log_window(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("plan")

    @given(steps=st.integers(20, 100), log_every=st.integers(2, 200), batch_size=st.integers(1, 16))
    def check(steps: int, log_every: int, batch_size: int) -> None:
        made = plan(folder, steps, log_every, batch_size)
        assert made.num_batches == 32 // batch_size
        assert made.log_every <= steps // 6
        assert steps // 3 <= made.save_at < steps - steps // 3
        assert made.save_at % made.log_every
        assert made.save_at % made.num_batches

    check()


def test_an_event_that_is_due_too_late_is_reported(folder: Path) -> None:
    assert plan(folder, 12, 3, 10, "fid").untried == ()
    made = make_plan(load_config(config(folder, "checkpoint", "fid"), (), ["plugins.fid.every=13"]), 12, 0)
    assert made.untried == ("plugins.fid.every = 13",)
    made = make_plan(load_config(config(folder, "checkpoint", "fid"), (), ["plugins.fid.every=5 epochs"]), 12, 0)
    assert made.untried == ("plugins.fid.every = 5 epochs",)  # of 3 batches
    assert str(made) == "step 5 of 12, in the middle of an epoch and of a log window"


def test_numbers_that_depend_on_the_machine_are_not_compared(tmp_path: Path) -> None:
    def written(*records: dict[str, Any]) -> dict[ValueKey, Any]:
        path = tmp_path / "metrics"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return logged(path)

    one = written({"step": 3, "time": 1.0, "loss": 0.5, "memory/peak": 7}, {"step": 4, "time": 2, "time/step": 1})
    assert one == {ValueKey("logged number", "loss", 3): 0.5}
    assert logged(tmp_path / "none") == {}
    record = {"step": 3, "time": 9.0, "loss": 0.5, "memory/peak": 8}
    assert all_differences(one, written(record)) == []
    (twice,) = all_differences(one, written(record, record))
    assert twice.describe("A", "B") == "the logged number loss again after step 3 is only in B"
    (gone,) = all_differences(one, {})
    assert gone.describe("A", "B") == "the logged number loss after step 3 is only in A"
    late, early = {"step": 9, "loss": 1.0}, {"step": 6, "ema/x": None}
    found = all_differences(written(late, early), written({**late, "loss": 2.0}, {**early, "ema/x": 1.0}))
    assert not any(each.is_text for each in found)
    assert [each.key for each in found] == [ValueKey("logged number", "ema/x", 6), ValueKey("logged number", "loss", 9)]


def test_files_are_compared_with_their_bytes(tmp_path: Path) -> None:
    contents = {
        "one": {"t": b"one", "p": b"\xff\x00", "same": b"one", ".hidden": b"1", "config": b"1"},
        "other": {"t": b"two", "p": b"\xff\x01", "q": b"one", "same": b"one", ".hidden": b"2"},
    }
    found = []
    for folder, names in contents.items():
        (tmp_path / folder / "in").mkdir(parents=True)
        for name, data in names.items():
            (tmp_path / folder / "in" / name).write_bytes(data)
        (tmp_path / folder / "config").write_text(folder)
        found.append(files(tmp_path / folder, {"config"}))
    unequal = all_differences(*found)
    assert [each.key for each in unequal] == [ValueKey("file", f"in/{name}") for name in ("config", "p", "t", "q")]
    # Of a text, only numbers count.
    inner = [inside(each, tmp_path / "one", tmp_path / "other") for each in unequal]
    assert inner == [unequal[0], unequal[1], None, unequal[3]]


class Keeper:
    """Holds values as plugins do, and an object that is not a value."""

    def __init__(self, seed: int) -> None:
        self.count, self.name, self.pair = 1, "x", (1.5, None)
        self.kept = {"a": torch.arange(4), 3: torch.tensor(2.0)}
        self.generator = torch.Generator().manual_seed(seed)
        self.thing = object()

    def state_dict(self) -> dict[str, Tensor]:
        return {"kept": self.kept["a"]}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.kept["a"] = state["kept"]


def test_a_snapshot_has_the_state_and_the_plain_fields_of_all_plugins() -> None:
    def taken(seed: int) -> dict[ValueKey, Any]:
        with toy_loop({"mine": Keeper(seed)}) as loop:
            return snapshot(loop)

    one, other = taken(0), taken(1)
    assert ValueKey("saved value", "model/0.weight") in one
    fields = {key.name.removeprefix("mine/"): value for key, value in one.items() if key.kind == "field"}
    plain = {name: value for name, value in fields.items() if "tensor" not in str(value)}
    assert plain == {"count": 1, "name": "x", "pair/0": 1.5, "pair/1": None}
    assert fields["kept/3"] == "tensor float32 [] 2.0"
    assert fields["kept/a"].startswith("tensor int64 [4] ")
    assert [each.key for each in all_differences(one, other)] == [ValueKey("field", "mine/generator")]
