"""The command `hookdiff runs`."""

import json
import math
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.conftest import IMPORTS, check_facts, check_refused, finish, imported, locked, output, records, write_small

Command = Callable[..., tuple[int, str, str]]
CONFIG: dict[str, Any] = {"run": {"steps": 100, "plugins": ["lr"]}, "optimizer": {"use": "adamw", "lr": 0.5}}
HOSTILE = "\x1b[2J\x1b]0;title\x07\u202e\x9b31m\r\n"
posix = pytest.mark.skipif(os.name == "nt", reason="needs POSIX")


def make(path: Path, *lines: dict[str, Any], reason: str = "", **tables: Any) -> Path:
    """Make a run directory; its lines have no times, so that its age is not known. Tables are added to the config."""
    path.mkdir(parents=True)
    names = dict.fromkeys((*CONFIG, *tables))  # no set: its order changes from process to process
    (path / "config.toml").write_text(tomli_w.dumps({n: {**CONFIG.get(n, {}), **tables.get(n, {})} for n in names}))
    if lines:
        (path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    if reason:
        (path / "outcome.json").write_text(json.dumps({"reason": reason, "step": 100}))
    return path


def rows(hookdiff: Command, folder: Path, *options: object) -> dict[str, dict[str, Any]]:
    """Return the rows of the JSON output by name, in their order."""
    code, out, err = hookdiff("runs", folder, "--json", *options)
    assert (code, err) == (0, "")
    found: list[dict[str, Any]] = json.loads(out, parse_constant=pytest.fail)  # JSON has no NaN
    return {row.pop("name"): row for row in found}


GOLDEN = """\
run     state    step     smooth loss  fd/digits  age  differs
b       done     100/100  0.25         2.5 @60    -    optimizer.lr=0.5
c       stopped  100/100  nan          -          -    optimizer.lr=0.125
deep/a  crashed  30/100   0.3333       -          -    with ema  optimizer.lr=0.5
torn    damaged  0        -            -          -    runs/torn/config.toml: cannot be read: No such file or directory
"""


def test_the_table_in_a_pipe(here: Path, hookdiff: Command) -> None:
    runs = here / "runs"
    make(runs / "deep" / "a", {"step": 30, "loss": 1 / 3}, run={"name": "a", "plugins": ["lr", "ema"]})
    values = {30: 3.5, 60: 2.5, 90: 4}
    distances = ({"step": step, "fd/digits": value, "fd/digits/num": 1} for step, value in values.items())
    make(runs / "b", *distances, {"step": 100, "loss": 9, "loss/smooth": 0.25}, reason="done", run={"name": "b"})
    make(runs / "c", {"step": 90, "loss": None}, reason="signal", optimizer={"lr": 0.125}, run={"import_from": "/x"})
    (runs / "torn").mkdir()
    (runs / "torn" / "metrics.jsonl").touch()
    assert hookdiff("runs") == (0, GOLDEN, "")


def test_json_has_all_that_is_known(tmp_path: Path, hookdiff: Command) -> None:
    distances = {"fd/a": 7.0, "fid/b/c": 3.0, "fd/a/floor": 0.1, "fid/b/c/num": 2}
    lines = [{"step": 5, **distances}, {"step": 6, "fd/a": None, "fid/b/c": 3.0}, {"step": 7, "time": 99.5, "loss": 2}]
    make(tmp_path / "x", *lines, reason="done", optimizer={"betas": [0.5, 0.9]})
    make(tmp_path / "y", optimizer={"betas": [0.5, 0.8]})
    found = rows(hookdiff, tmp_path)
    best = {"fd/a": {"value": 7.0, "step": 5}, "fid/b/c": {"value": 3.0, "step": 5}}
    known = {"state": "done", "problem": None, "step": 100, "steps": 100, "loss": 2}
    differs: dict[str, Any] = {"optimizer.betas": [0.5, 0.9]}
    assert found["x"] == {**known, "best": best, "time": 99.5, "differs": differs}
    unknown = dict.fromkeys(("problem", "loss", "time"))
    differs = {"optimizer.betas": [0.5, 0.8]}
    assert found["y"] == {**unknown, "state": "crashed", "step": 0, "steps": 100, "best": {}, "differs": differs}


def test_the_age_is_that_of_the_newest_line_or_event(tmp_path: Path, hookdiff: Command) -> None:
    now = time.time()
    for number, (age, event_age) in enumerate([(7300, 8000), (8000, 86400 * 3.5), (-900, 5e5), (4000, 130)]):
        path = make(tmp_path / str(number), {"step": 1, "time": now - age})
        event = {"step": 1, "time": now - event_age, "kind": "stop", "severity": "info", "text": "done"}
        (path / "events.jsonl").write_text(f"{json.dumps(event)}\n")
    out = hookdiff("runs", tmp_path)[1]
    assert [line.split()[4:6] for line in out.splitlines()[1:]] == [["2", "h"], ["2.2", "h"], ["1", "s"], ["2", "min"]]


def test_the_loss_is_smoothed(tmp_path: Path, hookdiff: Command) -> None:
    make(tmp_path / "logged", {"step": 1, "loss": 8, "loss/smooth": 9})
    make(tmp_path / "mean", *({"step": step, "loss": step} for step in range(1, 31)))
    make(tmp_path / "newer", {"step": 1, "loss": 8, "loss/smooth": 9}, {"step": 2, "loss": 0.5})
    found = {name: row["loss"] for name, row in rows(hookdiff, tmp_path).items()}
    assert found == {"logged": 9, "mean": sum(range(21, 31)) / 10, "newer": 4.25}


def test_columns_and_patterns_of_names(here: Path, hookdiff: Command) -> None:
    for k in range(3):
        tables = {"optimizer": {"lr": k / 4}, "model": {"use": "unet"}}
        make(Path("runs", "sweep", f"run-{k}"), {"step": k + 1, "loss": 1, "fd/x": 2.0}, **tables)
    make(Path("runs", "other"), model={"use": "unet"})
    every = ["other", "sweep/run-0", "sweep/run-1", "sweep/run-2"]
    patterns = {"run-[12]": every[2:], "sweep/*": every[1:], "o*": every[:1], "x*": []}
    assert {pattern: [*rows(hookdiff, Path(pattern))] for pattern in patterns} == patterns
    assert [*rows(hookdiff, Path("runs"), "*-0", "o*")] == every[:2]
    both = [*rows(hookdiff, Path("runs/sweep"), "runs/other")]  # as a shell expands runs/*
    assert both == ["runs/other", *(f"runs/{name}" for name in every[1:])]
    out = output(hookdiff("runs", "sweep/*", "--columns", "name, fd/x,model.use,optimizer.lr"))
    assert [line.split() for line in out.splitlines()] == [
        ["run", "fd/x", "model.use", "optimizer.lr"],
        *([f"sweep/run-{k}", "2", f"@{k + 1}", "unet", str(k / 4)] for k in range(3)),
    ]
    out = output(hookdiff("runs", "--diff"))
    assert [line.split() for line in out.splitlines()] == [
        ["run", "optimizer.lr"],
        *([name, lr] for name, lr in zip(every, ("0.5", "0.0", "0.25", "0.5"), strict=True)),
    ]
    for name, plugins in (("both", ["ema", "fid", "lr"]), ("one", ["ema", "lr"]), ("none", ["lr"])):
        make(Path("more", name), run={"plugins": plugins})
    out = output(hookdiff("runs", "more", "--diff"))
    cells = [["run", "run.plugins"], ["both", "ema,fid"], ["none", "-"], ["one", "ema"]]  # lr is in all
    assert [line.split() for line in out.splitlines()] == cells
    check_facts(hookdiff("runs", "run-0", "--diff")[2], "run-0")  # no pattern, and no folder
    check_facts(output(hookdiff("runs", "run-[0]", "--diff")), "The configs are equal")
    check_refused(hookdiff("runs", "--columns", "name,optimizer.rl"), "--columns", "optimizer.rl", "'optimizer.lr'")
    check_refused(hookdiff("runs", "--columns", "name", "--json"), "--json", "--columns")


def test_a_run_of_epochs_has_the_steps_that_it_expects(tmp_path: Path, hookdiff: Command) -> None:
    run = make(tmp_path / "x", {"step": 7, "loss": 8})
    (run / "config.toml").write_text("[run]\nepochs = 3\n")
    line = {"step": 0, "time": 1.0, "kind": "start", "severity": "info", "text": "", "details": {"steps": 30}}
    (run / "events.jsonl").write_text(json.dumps(line) + "\n")
    assert rows(hookdiff, tmp_path)["x"]["steps"] == 30


def test_a_run_that_is_under_way(tmp_path: Path, hookdiff: Command, start: Callable[..., Any]) -> None:
    make(tmp_path / "crashed", {"step": 1})
    path = make(tmp_path / "live", {"step": 1}, reason="done")
    with locked(path):
        out = output(finish(start(tmp_path, "runs", tmp_path, "--state", "running", "--json")))  # another process
        assert [row["name"] for row in json.loads(out)] == ["live"]
        assert rows(hookdiff, tmp_path)["live"]["state"] == "running"  # this process, which holds the lock
        assert list(rows(hookdiff, tmp_path, "--state", "crashed")) == ["crashed"]
    assert rows(hookdiff, tmp_path)["live"]["state"] == "done"


def test_only_keys_that_can_be_compared_differ(tmp_path: Path, hookdiff: Command) -> None:
    lists = {"unet": ["lr"], "wide": ["lr", "ema"], "dit": ["lr", "ema", "nan"], "ema": ["ema"]}
    models = {"unet": {"channels": 32}, "wide": {"channels": 64, "start_from": "x"}, "dit": {"depth": 4}}
    plugins: dict[str, Any] = {
        "wide": {"ema": {"decay": 0.9, "warmup": {"use": "ratio"}}},
        "dit": {"ema": {"decay": 0.99, "warmup": {"use": "power", "power": 2}}, "nan": {"policy": "stop"}},
        "ema": {"ema": {"decay": 0.9, "warmup": {"use": "ratio"}}},
    }
    for name, used in lists.items():
        kind = {"use": "dit" if name == "dit" else "unet", "size": 8, **models.get(name, {"channels": 32})}
        make(tmp_path / name, run={"name": name, "plugins": used}, model=kind, plugins=plugins.get(name, {}))
    found = {name: row["differs"] for name, row in rows(hookdiff, tmp_path).items()}
    net = ("run.plugins", "model.use", "model.channels", "model.start_from")
    average = ("plugins.ema.decay", "plugins.ema.warmup.use")
    assert found["unet"] == dict(zip(net, (["lr"], "unet", 32, None), strict=True))
    assert found["wide"] == dict(zip(net + average, (["lr", "ema"], "unet", 64, "x", 0.9, "ratio"), strict=True))
    assert found["dit"] == dict(zip(net[:2] + average, (["lr", "ema", "nan"], "dit", 0.99, "power"), strict=True))
    out = hookdiff("runs", tmp_path)[1]
    by_name = {line.split()[0]: line for line in out.splitlines()}
    check_facts(by_name["dit"], "with lr,ema,nan", "model.use=dit")
    check_facts(by_name["unet"], "with lr", "model.start_from=(not set)")


def test_many_differences_are_cut_in_the_table_alone(tmp_path: Path, hookdiff: Command) -> None:
    for value in (1, 2):
        make(tmp_path / str(value), x={f"key{k}": value for k in range(50)}, y={"text": str(value) * 500})
    out = hookdiff("runs", tmp_path)[1]
    check_facts(out, "x.key0=1", "and 39 more")
    assert max(map(len, out.splitlines())) < 1000
    assert len(rows(hookdiff, tmp_path)["1"]["differs"]) == 51


def test_sorting(tmp_path: Path, hookdiff: Command) -> None:
    make(tmp_path / "a", {"step": 9, "time": 1, "loss": 2, "fd/x": 5.0}, optimizer={"lr": 0.1})
    make(tmp_path / "b", {"step": 10, "time": 3, "loss": 1, "fd/x": 6.0}, reason="done", optimizer={"lr": 0.02})
    make(tmp_path / "c", {"step": 3, "time": 2, "loss": None, "fd/x": None}, optimizer={"lr": "auto"})
    make(tmp_path / "d", {"step": 2, "time": 0, "loss": 3, "fd/x": 7.0}, optimizer={"lr": 0.3})
    orders = {"name": "abcd", "step": "dcab", "loss": "badc", "age": "bcad", "state": "acdb", "fd/x": "abdc"}
    for key, order in {**orders, "optimizer.lr": "badc"}.items():
        assert "".join(rows(hookdiff, tmp_path, "--sort", key)) == order, key
    refusal = hookdiff("runs", tmp_path, "--sort", "optimiser.lr")
    check_refused(refusal, "optimiser.lr", "optimizer.lr", "fd/x", "age")
    assert hookdiff("runs", tmp_path, "--state", "runing")[0] == 2


ODD = {
    "types": "run = 3\noptimizer = [1]\nmodel = {use = [1]}\nplugins = 'x'",
    "plugins": "[run]\nplugins = [[1], {a = 2}, 3]\nsteps = -1",
    "huge": f"[run]\nsteps = 0x{'f' * 5000}\nlimit = [inf, nan]",
    "dates": "[run]\nsteps = 2026-01-01\nstart = 10:00:00",
    "nan": "[run]\nsteps = nan\nplugins = 'abc'",
}


def test_configs_with_other_types_are_compared(tmp_path: Path, hookdiff: Command) -> None:
    make(tmp_path / "good")
    for name, config in ODD.items():
        (make(tmp_path / name) / "config.toml").write_text(config)
    found = rows(hookdiff, tmp_path)
    assert {name: row["steps"] for name, row in found.items()} == {**dict.fromkeys(ODD), "good": 100}
    assert len(hookdiff("runs", tmp_path)[1].splitlines()) == 2 + len(ODD)


@posix
def test_what_runs_say_is_escaped(tmp_path: Path, hookdiff: Command) -> None:
    from tests.pseudo_terminal import shown

    tables = {"optimizer": {"lr": HOSTILE}, "run": {"plugins": [HOSTILE]}}
    make(tmp_path / f"a{HOSTILE}", {"step": 1, f"fd/{HOSTILE}": 1.0}, **tables)
    make(tmp_path / "b", {"step": 1}, **{HOSTILE: {HOSTILE: 1}})
    make(tmp_path / "c", {"step": 1}, **{HOSTILE: {HOSTILE: 2}})
    (make(tmp_path / os.fsdecode(b"d\xff"), {"step": 1}) / "config.toml").write_text(f"x = {HOSTILE!r}")
    hostile = r"[^\n\x20-\uffff]|[\x7f-\x9f\u202e\ud800-\udfff]"
    for options in ([], ["--json"], ["--sort", HOSTILE], ["--sort", f"fd/{HOSTILE}"]):
        _, out, err = hookdiff("runs", tmp_path, *options)
        assert not re.search(hostile, out + err)
        assert "x1b" in out + err or "u001b" in out
    _, written = shown(tmp_path, "runs", tmp_path, columns=200)
    assert not re.search(hostile, re.sub(r"\x1b\[[\d;]*m", "", written.replace("\r\n", "\n")))
    check_facts(written, "x1b")


@posix
@pytest.mark.parametrize("columns", [40, 60, 80, 120, 200])
def test_the_table_fits_on_a_terminal(tmp_path: Path, columns: int) -> None:
    from tests.pseudo_terminal import shown

    long = "a-run-with-a-very-long-name-" * 4
    lines = [{"step": 100_000, "loss": 1.234, "fd/inception": 12.5, "fd/digits": 3.25}]
    make(tmp_path / long, *lines, reason="done", optimizer={"lr": 0.25})
    make(tmp_path / "b", *lines, optimizer={"lr": 0.125})
    left, _ = shown(tmp_path, "runs", tmp_path, columns=columns)
    lines = [line for line in left.splitlines() if line.strip()]
    assert max(map(len, lines)) <= columns
    check_facts(left, "done", "crashed", "100,000/100")
    assert [line.split()[0][-9:] for line in lines[1:3]] == [long[-9:], "b"]  # one line a run; names differ at the end
    if columns >= 80:
        check_facts(left, "12.5 @100,000", "3.25 @100,000", "1.234")
    if columns >= 120:
        check_facts(left, "optimizer.lr=0.25", "optimizer.lr=0.125")
        assert "not shown" not in left
    else:
        check_facts(left, "not shown", "differs", "--columns")


def test_a_folder_without_runs(here: Path, hookdiff: Command) -> None:
    check_refused(hookdiff("runs"), "runs", here)
    (here / "rums").mkdir()
    check_facts(hookdiff("runs")[2], "'rums'")
    assert hookdiff("runs", "rums")[0] == 0
    assert rows(hookdiff, here / "rums") == {}
    (here / "file").touch()
    check_refused(hookdiff("runs", "file"), "file")


@pytest.mark.wide
def test_a_real_run_and_torch_is_not_imported(tmp_path: Path, start: Callable[..., Any]) -> None:
    config = write_small(tmp_path / "small.toml", run={"steps": 4, "log_every": 2, "plugins": ["loss"]})
    assert finish(start(tmp_path, "run", config, "--out", "runs/x"))[0] == 0
    code, out, times = finish(start(tmp_path, "runs", "--json", fresh=True, python=IMPORTS))
    assert code == 0
    assert "torch" not in imported(times)
    (row,) = json.loads(out)
    losses = [line["loss/smooth"] for line in records(tmp_path / "runs" / "x") if "loss/smooth" in line]
    assert (row["name"], row["state"], row["step"], row["steps"]) == ("x", "done", 4, 4)
    assert row["loss"] == losses[-1]
    assert math.isclose(row["time"], time.time(), abs_tol=3600)
