"""`hookdiff selftest resume`: every plugin of hookdiff passes, and a plugin that does not resume is named."""

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from click.testing import CliRunner, Result
from hypothesis import given, strategies as st
from torch import Tensor

from hookdiff import UserError, load_config
from hookdiff.imports import installed
from hookdiff.testing import toy_loop
from hookdiff_selftest.cli import resume as command
from hookdiff_selftest.compare import Item, compare, files, numbers, state
from hookdiff_selftest.resume import Plan, make_plan
from hookdiff_selftest.texts import number_difference
from hookdiff_selftest.witness import digests, put_back, snapshot
from tests.conftest import check_facts

# With these each plugin does something in the half of 12 steps, before the save and after it.
OPTIONS: dict[str, dict[str, Any]] = {
    "amp": {"precision": "fp16", "init_scale": 2.0**22, "growth_interval": 4},
    "clip": {"rule": {"use": "adaptive", "warmup": 2, "factor": 0.9}},
    "compile": {"backend": "eager"},
    "debug": {"every": 3},
    "ema": {"decay": 0.9, "std": [0.05, 0.1], "snapshot_every": 4},
    "diversity": {"every": 4, "num_samples": 20, "modes": 2},
    "fid": {"every": 4, "num_samples": 8},
    "loss": {"window": 20, "plateau": 0, "every": 3},
    "lr": {"warmup": 3},
    "memory": {"empty_cache_every": 4},
    "samples": {"every": 4, "num": 4, "scale": 1},
}
KINDS = [n for n, (entry, *_) in installed().items() if entry.dist is not None and entry.dist.name == "hookdiff"]
DEAR = {"aim", "compile", "report", "wandb"}  # plugins that cost seconds in each run
ALL = [name for name in KINDS if name not in DEAR and name != "fsdp"]  # ddp is there, and excludes it

# Data that augments by all three generators, a model with dropout and batch norm, and plugins that do not resume.
USER = '''
import random

import numpy
import torch
from attrs import define, field
from torch import nn

from hookdiff import Sink, hookimpl


class Rolled:
    """Images of noise, rolled, mirrored and brightened by chance."""

    def __init__(self):
        self.pixels = torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(0)) - 0.5

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, index):
        image = self.pixels[index].roll(random.randrange(8), 2)
        image = image.flip(1) if numpy.random.rand() < 0.5 else image
        return (image + 0.2 * torch.rand(())).clamp(-1, 1)


class Net(nn.Module):
    def __init__(self, in_channels=3):  # the data gives 1
        super().__init__()
        first = nn.Conv2d(in_channels, 8, 3, padding=1)
        self.before = nn.Sequential(first, nn.BatchNorm2d(8), nn.SiLU(), nn.Dropout(0.2))
        self.after = nn.Conv2d(8, in_channels, 3, padding=1)

    def forward(self, x, timesteps):
        return self.after(self.before(x))


@define(eq=False)
class Saved:
    """Adds to the gradients what is left of those before, and saves that."""

    left: list = field(factory=list, init=False)
    steps: int = field(default=0, init=False)

    @hookimpl(trylast=True)
    def after_backward(self, loop):
        self.steps += 1
        gradients = [weight.grad for weight in loop.model.parameters()]
        if self.left:
            torch._foreach_add_(gradients, self.left, alpha=0.5)
        self.left = [gradient.clone() for gradient in gradients]

    def state_dict(self):
        return {"steps": self.steps, "left": {str(k): left for k, left in enumerate(self.left)}}

    def load_state_dict(self, state):
        self.steps, self.left = state["steps"], list(state["left"].values())


class Forgets(Saved):
    """Saves the number of steps only."""

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


class Mangles(Saved):
    """Saves all, and loads another number of steps."""

    def load_state_dict(self, state):
        super().load_state_dict({**state, "steps": 0})


@define(eq=False)
class Scales:
    """Scales a weight by a number that it counts and does not save."""

    updates: int = field(default=0, init=False)

    @hookimpl
    def after_optimizer_step(self, loop):
        self.updates += 1
        with torch.no_grad():
            next(loop.model.parameters()).mul_(1 + 1e-4 * self.updates)


@define(eq=False)
class Mirrors:
    """Changes the batch by a generator of its own, which it seeds and does not save."""

    luck: random.Random = field(factory=lambda: random.Random(0), init=False)

    @hookimpl
    def before_step(self, batch):
        batch.inputs.mul_(1 - 0.1 * self.luck.random())


class Breaks(Saved):
    def load_state_dict(self, state):
        raise KeyError("momentum")


@define(eq=False)
class Counts:
    """Logs a number that it does not save, under a name that is not its own."""

    seen: int = field(default=0, init=False)

    @hookimpl
    def after_optimizer_step(self, loop):
        self.seen += 1
        loop.log({"updates": self.seen})


class Draws:
    """Draws before the loop has seeded anything for the step."""

    @hookimpl
    def before_step(self, loop):
        loop.log.average({"luck": torch.rand(())})


class Wild:
    """Draws from a generator that nobody seeds."""

    @hookimpl
    def after_backward(self, loop):
        for weight in loop.model.parameters():
            weight.grad.mul_(1 + 0.01 * random.random())


class Appends:
    """Writes a file of its own, in which lines appear twice after a resume."""

    @hookimpl
    def after_optimizer_step(self, loop):
        with (loop.run_dir / "mine.bin").open("ab") as file:
            file.write(b"\\xff" + bytes([loop.progress.step]))


class Rows:
    """Writes a table of its own, in which rows appear twice after a resume."""

    @hookimpl
    def after_optimizer_step(self, loop):
        with (loop.run_dir / "mine.csv").open("a") as file:
            file.write(f"{loop.progress.step},{loop.gradients.loss}\\n")


@define(eq=False)
class Sessions(Sink):
    """Writes a file for each session, with times and events, and counts the sessions."""

    file: object = field(default=None, init=False)
    sessions: int = field(default=0, init=False)

    def open(self, run):
        self.sessions += 1
        self.file = (run.run_dir / f"session {self.sessions}").open("w")

    def scalars(self, step, time, values):
        self.file.write(f"{step} {time} {values}\\n")

    def event(self, step, time, event):
        self.file.write(f"{event.kind} {time}\\n")

    def close(self):
        self.file.close()

    def state_dict(self):
        return {"sessions": self.sessions}

    def load_state_dict(self, state):
        self.sessions = state["sessions"]


class Secret:
    """Draws from a generator of its own that nobody seeds."""

    def __init__(self):
        self.luck = random.Random()

    @hookimpl
    def before_step(self, batch):
        batch.inputs.mul_(1 - 0.1 * self.luck.random())


class Mute:
    """Says that it saves, and does not."""

    @hookimpl
    def restore(self, loop):
        return {}
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the module of a user, which can be imported from here and from the processes begun here."""
    (tmp_path / "resume_user.py").write_text(USER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(folder: Path, *plugins: str, source: str = "resume_user:Rolled", workers: int = 0) -> Path:
    tables = {
        "run": {"epochs": 9, "batch_size": 10, "micro_batch": 4, "log_every": 3, "device": "cpu", "plugins": plugins},
        "data": {"source": source, "workers": workers, "held_out": 8},
        "model": {"use": "resume_user:Net"},
        "diffusion": {"process": {"use": "vp", "schedule": "cosine", "timesteps": 20}},
        "optimizer": {"lr": 0.01},
        "sampling": {"steps": 2},
        "plugins": {name: options for name, options in OPTIONS.items() if name in plugins},
    }
    path = folder / "small.toml"
    path.write_text(tomli_w.dumps(tables))
    return path


def selftest(path: Path, *options: str) -> Result:
    result = CliRunner().invoke(command, [str(path), "--steps", "12", *options])
    if isinstance(result.exception, Exception):  # and not SystemExit
        raise result.exception
    return result


def test_all_plugins_together_resume_exactly(folder: Path) -> None:
    result = selftest(config(folder, *ALL, "resume_user:Saved", workers=2))
    assert result.exit_code == 0, result.output
    verdict, compared, *more = result.stdout.splitlines()
    assert verdict.startswith("the resumed run equals the run that was never stopped, bit for bit: saved at step ")
    assert verdict.endswith("resumed with 0 workers after 2")
    tensors, values, numbers, files = (int(word) for word in compared.split() if word.isdigit())
    assert tensors > 50
    assert values > 50
    assert numbers > 100
    assert files >= 5  # pictures and snapshots
    assert more == []  # nothing was left untried
    assert "training 12 steps without a stop" in result.stderr


@pytest.mark.cuda
def test_a_run_with_cuda_graphs_resumes_exactly(folder: Path) -> None:
    path = config(folder, "ema", "cuda_graphs", "checkpoint", source="digits")
    result = selftest(path, "--set", "run.device=cuda", "--set", "run.micro_batch=10")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("name", "others", "lost"),
    [
        # It changes weights after the step, and this changes the values of all other plugins.
        pytest.param("Scales", ["checkpoint"], "the field updates of scales (5 and 0)", marks=pytest.mark.slow),
        pytest.param(
            "Scales", ["ema", "lr", "nan", "checkpoint"], "the field updates of scales", marks=pytest.mark.slow
        ),
        pytest.param("Scales", ALL, "the field updates of scales (5 and 0)", marks=pytest.mark.slow),
        # These show only in the weights and the losses.
        pytest.param("Forgets", ["ema", "checkpoint"], "the field left/0 of forgets", marks=pytest.mark.slow),
        pytest.param("Mirrors", ALL, "the field luck of mirrors", marks=pytest.mark.slow),
        pytest.param("Mirrors", ["ema", "checkpoint"], "the field luck of mirrors", marks=pytest.mark.slow),
    ],
)
def test_a_plugin_that_forgets_a_field_is_named(name: str, others: list[str], lost: str, folder: Path) -> None:
    # By its config the run ends after 3 steps, sooner than the selftest; in the next test it ends later.
    path = config(folder, *others, f"resume_user:{name}")
    result = selftest(path, "--set", "run.epochs=1")
    assert result.exit_code == 1, result.output
    verdict, field, advice, counts = result.stdout.splitlines()
    assert verdict.startswith(f"not resumed exactly because of the plugin {name.lower()!r}; first seen: ")
    assert lost in field
    assert "state_dict" in advice
    assert len(others) == 1 or " of ema" in counts
    assert all(len(line) < 400 for line in result.stdout.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("Mangles", "plugins/mangles/steps in the state (5 and 0)"),
        (
            "Counts",
            "because of the plugin 'counts'; first seen: the logged number updates at step 6: 6.0, and 1.0 when",
        ),
        ("Draws", "not resumed exactly, perhaps because of the plugin 'draws'"),
        ("Draws", "it draws from a global generator in before_step"),
        ("Wild", "two runs without a stop are not the same, perhaps because of the plugin 'wild'"),
        ("Appends", "not resumed exactly; first seen: the file mine.bin: 24 bytes "),
        ("Breaks", "the checkpoint's state of 'breaks' cannot be loaded: KeyError: 'momentum'"),
    ],
)
def test_a_plugin_that_does_not_resume_is_named(name: str, fact: str, folder: Path) -> None:
    # Of digits, which are held in memory: items that are read when they are due seed the global generators.
    result = selftest(config(folder, "loss", "checkpoint", f"resume_user:{name}", source="digits"))
    assert result.exit_code == 1, result.output
    assert fact in result.stdout
    if name not in ("Appends", "Breaks"):
        assert f"because of the plugin {name.lower()!r}" in result.stdout.splitlines()[0]


@pytest.mark.slow
def test_an_unseeded_draw_is_blamed_on_no_other_plugin(folder: Path) -> None:
    result = selftest(config(folder, "lr", "ema", "checkpoint", "resume_user:Secret"))
    assert result.exit_code == 1, result.output
    assert "plugin 'lr'" not in result.stdout
    assert "plugin 'ema'" not in result.stdout


@pytest.mark.slow
def test_what_a_tracker_keeps_is_not_compared(folder: Path) -> None:
    result = selftest(config(folder, "checkpoint", "resume_user:Sessions", source="digits"))
    assert result.exit_code == 0, result.output


@pytest.mark.slow
def test_a_table_with_doubled_rows_fails_also_beside_a_tracker(folder: Path) -> None:
    result = selftest(config(folder, "checkpoint", "resume_user:Rows", "resume_user:Sessions", source="digits"))
    assert result.exit_code == 1, result.output
    check_facts(result.stdout.splitlines()[0], "mine.csv")
    assert "because of the plugin" not in result.stdout


@pytest.mark.parametrize(
    ("kind", "one", "other", "facts"),
    [
        (".csv", "step,loss\n1,0.5\n", "step,loss\n1,0.5\n1,0.5\n", ["2", "3"]),
        (".csv", "1,0.5\n2,0.25\n", "1,0.5\n2,0.125\n", ["line 2", "0.25", "0.125"]),
        (".csv", "step,time/s,elapsed_seconds\n1,0.5,2\n", "step,time/s,elapsed_seconds\n1,0.7,3\n", None),
        (".jsonl", '{"a": {"b": 1.0}}\n', '{"a": {"b": 2.0}}\n', ["a/b", "line 1", "1.0", "2.0"]),
        (".jsonl", '{"step": 1, "time": 7, "name": "x"}\n', '{"step": 1, "time": 8, "name": "y"}\n', None),
        (".json", '{"a": [1,\n2]}', '{"a": [1,\n3]}', ["a/1", "2", "3"]),
        (".txt", "step 5: loss 0.5\n", "step 5: loss 0.25\n", ["line 1", "0.5", "0.25"]),
        (".txt", "2026-01-01 10:00:01 step 5, 3.5 s, 7 it/s\n", "2026-01-02 11:00:01 step 5, 4 s, 9 it/s\n", None),
        (".log", "one\n", "one\ntwo\n", ["1 lines", "2 lines"]),
    ],
)
def test_texts_are_compared_by_their_numbers(kind: str, one: str, other: str, facts: list[str] | None) -> None:
    assert number_difference(one, one, kind) is None
    found = number_difference(one, other, kind)
    if facts is None:
        assert found is None
    else:
        check_facts(" ".join(found or ()), *facts)


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
        selftest(config(folder, "resume_user:Mute"))


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("before", [0, 2])
def test_the_number_of_workers_may_change(before: int, workers: str, folder: Path) -> None:
    # Of 8 steps the resumed run saves at the last only, when the witness has had its turn.
    result = selftest(config(folder, "checkpoint", "nan", workers=before), "--workers", workers, "--steps", "8")
    assert result.exit_code == 0, result.output


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_every_plugin_alone_resumes_exactly(name: str, folder: Path) -> None:
    if name == "aim":
        pytest.importorskip("aim")
    names = dict.fromkeys([name, "checkpoint"])
    result = selftest(config(folder, *names, source="digits"))
    assert result.exit_code == 0, result.output
    if name == "aim":
        assert "texts that differ, as names or times may: plugins/aim/run in the state" in result.stdout


def test_a_run_without_a_plugin_that_saves_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"none of its plugins saves the run .* add one with --plugins NAME"):
        selftest(config(folder, "ema"))


@pytest.mark.slow
def test_a_run_that_fails_on_its_own_is_reported_with_its_output(folder: Path) -> None:
    source = 'raise RuntimeError("no such thing")\n'
    path = config(folder, "checkpoint", "resume_user:Saved")
    (folder / "resume_user.py").write_text(USER.replace("        self.steps += 1\n", f"        {source}"))
    with pytest.raises(UserError, match=r"(?s)the run that is never stopped ended with exit code 1; .*no such thing"):
        selftest(path)


def plan(folder: Path, steps: int, log_every: int, batch_size: int, *plugins: str) -> Plan:
    settings = [f"run.log_every={log_every}", f"run.batch_size={batch_size}"]
    return make_plan(load_config(config(folder, "checkpoint", *plugins), (), settings), steps, 0)


def test_the_save_is_in_the_middle_of_an_epoch_and_of_a_log_window(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("plan")
    (folder / "resume_user.py").write_text(USER)

    @given(steps=st.integers(20, 100), log_every=st.integers(2, 200), batch_size=st.integers(1, 16))
    def check(steps: int, log_every: int, batch_size: int) -> None:
        made = plan(folder, steps, log_every, batch_size)
        assert made.num_batches == 32 // batch_size
        assert made.log_every <= steps // 6
        assert steps // 3 <= made.save_at < steps - steps // 3
        assert made.save_at % made.log_every
        assert made.save_at % made.num_batches

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        check()


def test_an_event_that_is_due_too_late_is_reported(folder: Path) -> None:
    assert plan(folder, 12, 3, 10, "fid").untried == ()
    made = make_plan(load_config(config(folder, "checkpoint", "fid"), (), ["plugins.fid.every=13"]), 12, 0)
    assert made.untried == ("plugins.fid.every = 13",)
    made = make_plan(load_config(config(folder, "checkpoint", "fid"), (), ["plugins.fid.every=5 epochs"]), 12, 0)
    assert made.untried == ("plugins.fid.every = 5 epochs",)  # of 3 batches
    assert str(made) == "step 5 of 12, in the middle of an epoch and of a log window"


def test_long_values_are_cut_to_the_part_that_differs() -> None:
    one = {"plugins/x/last": [[1.0, 2.0]] * 300, "plugins/x/text": "a" * 500 + "b" * 500, "plugins/x/short": [1]}
    other = {
        "plugins/x/last": [[1.0, 2.0]] * 299 + [[1.0, 3.0]],
        "plugins/x/text": "a" * 999,
        "plugins/x/short": [1, 2],
    }
    last, text, short = (found.describe("when resumed") for found in compare(state(one), state(other)))
    assert last == "plugins/x/last in the state, at 299/1: 2.0, and 3.0 when resumed"
    assert short == "plugins/x/short in the state: 1 entries, and 2 entries when resumed"
    before = "..." + "a" * 20
    assert text == f"plugins/x/text in the state: {before}{'b' * 80}..., and {before}{'a' * 80}... when resumed"


def test_numbers_that_depend_on_the_machine_are_not_compared(tmp_path: Path) -> None:
    def logged(name: str, *records: dict[str, Any]) -> dict[str, Item]:
        path = tmp_path / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return numbers(path, lambda name: name[:3])

    one = logged("one", {"step": 3, "time": 1.0, "loss": 0.5, "memory/peak": 7}, {"step": 4, "time": 2, "time/step": 1})
    assert [(item.value, item.owner, item.step) for item in one.values()] == [("0.5", "los", 3)]
    assert numbers(tmp_path / "none", str) == {}
    record = {"step": 3, "time": 9.0, "loss": 0.5, "memory/peak": 8}
    assert list(compare(one, logged("same", record))) == []
    (twice,) = compare(one, logged("twice", record, record))
    assert twice.describe("when resumed") == "the logged number loss at step 3: 0.5, and 0.5, 0.5 when resumed"
    (gone,) = compare(one, {})
    assert gone.describe("when resumed") == "the logged number loss at step 3: 0.5, and not there when resumed"
    late, early = {"step": 9, "loss": 1.0}, {"step": 6, "ema/x": None}
    found = compare(logged("a", late, early), logged("b", {**late, "loss": 2.0}, {**early, "ema/x": 1.0}))
    assert [(each.name, each.owner) for each in found] == [
        ("the logged number ema/x at step 6", "ema"),
        ("the logged number loss at step 9", "los"),
    ]


@given(bit=st.integers(0, 31), entry=st.integers(0, 5))
def test_one_bit_is_a_difference(bit: int, entry: int) -> None:
    values = torch.tensor([[0.0, 1.0, float("nan")], [float("inf"), -2.5, 1e-40]])
    flipped = values.clone()
    flipped.view(torch.uint8).flatten()[entry * 4 + bit // 8] ^= 1 << bit % 8
    one, other = (digests({"plugins": {"a/b": {"x": each}}, "model": {"y": values}}) for each in (values, flipped))
    assert list(compare(state(one), state(one))) == []
    (found,) = compare(state(one), state(other))
    assert (found.name, found.owner, found.is_text) == ("plugins/a~1b/x in the state", "a/b", False)


def test_tensors_of_another_type_or_shape_or_none_are_differences() -> None:
    one = {"a": torch.zeros(2), "b": torch.tensor(1), "c": torch.ones(1, dtype=torch.bool), "d": torch.zeros(3)}
    other = {"a": torch.zeros(2, 1), "b": torch.tensor(2), "e": torch.ones(1), "d": torch.zeros(3).bfloat16()}
    found = {
        each.name: (each.here.value, each.there.value) for each in compare(state(digests(one)), state(digests(other)))
    }
    assert found["b in the state"] == ("tensor int64 [] 1", "tensor int64 [] 2")
    assert found["c in the state"] == ("tensor bool [1] True", "not there")
    assert found["e in the state"] == ("not there", "tensor float32 [1] 1.0")
    assert sorted(found) == [f"{name} in the state" for name in "abcde"]


def test_files_are_compared_and_texts_are_recognised(tmp_path: Path) -> None:
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
        found.append(files(tmp_path / folder, {"config"}, str))
    assert [(each.name, each.owner, each.is_text) for each in compare(*found)] == [
        ("the file in/config", "in/config", False),
        ("the file in/p", "in/p", False),
        ("the file in/t", "in/t", True),
        ("the file in/q", "in/q", False),
    ]


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
    def taken(seed: int) -> dict[str, Any]:
        loop = toy_loop({"mine": Keeper(seed)})
        with loop:
            return snapshot(loop)

    one, other = taken(0), taken(1)
    assert one["step"] == 0
    assert one["state"] == other["state"]
    assert "model/0.weight" in one["state"]
    fields = one["fields"]["mine"]
    assert {key: value for key, value in fields.items() if "tensor" not in str(value)} == {
        "count": 1,
        "name": "x",
        "pair/0": 1.5,
        "pair/1": None,
    }
    assert fields["kept/3"] == "tensor float32 [] 2.0"
    assert fields["kept/a"].startswith("tensor int64 [4] ")
    assert [key for key in fields if fields[key] != other["fields"]["mine"][key]] == ["generator"]
