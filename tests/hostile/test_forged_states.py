"""Forged checkpoints and kept steps with right digests: the run goes on as it should, or one message refuses them."""

import hashlib
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import tomli
import tomli_w
import torch
from attrs import define
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save_file

from hookdiff import Loop, UserError, build_loop, builtin_plugins, hookimpl, load_config
from hookdiff.disk.stamped_json import stamped
from hookdiff.testing import assert_same, toy_loop, toy_model, weights
from hookdiff_amp import AMP
from hookdiff_checkpoint import Checkpoint
from hookdiff_clip import Clip
from hookdiff_debug import Debug
from hookdiff_ema import EMA
from hookdiff_gradients import GradientMonitor
from hookdiff_loss import LossMonitor
from hookdiff_nan import NaN
from hookdiff_nan.replay import replay, retrain
from hookdiff_stop_early import StopEarly
from tests.conftest import check_facts, contents, mostly_wide, toy_run, wide, write_small
from tests.hostile.mutations import CANARY, TENSORS, Bomb, forge_tensors, forge_value, scalars
from tests.on_ranks import done
from tests.saved_on_ranks import run, spec_of

STEP, RANKS_STEP = 6, 2  # of the checkpoints
KEPT = "nan/step-00000003-position-00000003"
PARTS = [f"{name}.safetensors" for name in ("batch", "buffers", "data", "model", "plugins")]
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, amsgrad=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-3),
}
Forge = Callable[[Path, dict[str, Any]], object]  # changes a folder, and what its manifest or step.json has
needs_gloo = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch was built without gloo")
fewer = settings(max_examples=settings().max_examples // 2)  # each builds a run


# One process


def build(run_dir: Path, optimizer: str, steps: int, resume: bool = True, seed: int = 0) -> Loop:
    plugins = {
        **builtin_plugins(signals=False),
        "amp": AMP("fp16", init_scale=4.0),
        "clip": Clip("adaptive"),
        "debug": Debug(),
        "ema": EMA(decay=[0.9, 0.99]),
        "gradients": GradientMonitor(),
        "loss": LossMonitor(every=2),
        "nan": NaN(),
        "stop_early": StopEarly(metric="loss", patience=1000),
        "checkpoint": Checkpoint(every=STEP, keep_last=1),
    }
    options: dict[str, Any] = {"run_dir": run_dir, "resume": resume, "steps": steps, "micro_batch": 4, "log_every": 2}
    return toy_loop(plugins, model=toy_model(seed), optimizers=OPTIMIZERS[optimizer], **options)


def resume(run_dir: Path, optimizer: str) -> str | None:
    """Return the refusal, which loads nothing and changes no file, or None if the run goes on with finite weights."""
    loop = build(run_dir, optimizer, STEP + 2, seed=1)
    before, files = {name: value.clone() for name, value in weights(loop).items()}, contents(run_dir)
    try:
        assert loop.run() in ("done", "on_nan")
    except UserError as error:
        assert_same(weights(loop), before)
        assert contents(run_dir) == files
        return str(error)
    assert all(value.isfinite().all() for value in weights(loop).values())
    return None


# Two ranks, on one process


def resume_ranks(run_dir: Path) -> str | None:
    result = run(spec_of(run_dir, RANKS_STEP + 1, resume=True))
    (only,) = result["ranks"]
    if only["error"]:
        assert not result["begun"]
        return str(only["error"][1])
    ended = {name: value for name, value in result["ended"]["tensors"].items() if name.startswith("model/")}
    assert all(value.isfinite().all() for name, value in ended.items() if name != "model/mask")
    return None


# Kept steps

seen: list[dict[str, torch.Tensor]] = []  # the weights that the replayed steps began with


@define(eq=False)
class Seen:
    """Notes the weights before each step."""

    @hookimpl
    def before_step(self, loop: Loop) -> None:
        seen.append({name: value.detach().clone() for name, value in loop.model.named_parameters()})


def make_kept(folder: Path) -> None:
    """Make a run that diverged at its third step, with a checkpoint of each step."""
    tables: dict[str, Any] = {
        "run": {"plugins": ["amp", "clip", "ema", "nan", "checkpoint"], "seed": 5},
        "model": {"use": "unet", "channels": 8, "num_res_blocks": 1, "head_dim": 8, "num_classes": 10},
        "diffusion": {"process": "ddpm"},  # epsilon gets to NaN at this rate
        "optimizer": {"use": "sgd", "lr": 1e4},
        "plugins": {"checkpoint": {"every": 1}, "clip": {"rule": "adaptive"}, "amp": {"precision": "off"}},
    }
    assert build_loop(load_config(write_small(folder / "config.toml", **tables)), folder / "run").run() == "on_nan"
    assert [path.name for path in (folder / "run" / "nan").iterdir()] == [Path(KEPT).name]


def repeat(run_dir: Path, watched: bool = True, lr: float | None = None) -> str | None:
    """Replay the step: return the refusal, or None if it ran, with the weights in its file. No file changes."""
    seen.clear()
    step, before, said = run_dir / KEPT, contents(run_dir), list[str]()
    try:
        if lr is None:
            replay(step, [f"{__name__}:Seen"] if watched else [], [], False, True, said.append)
        else:
            retrain(step, lr, [], [], True, said.append)
    except UserError as error:
        return str(error)
    finally:
        assert contents(run_dir) == before
    assert said
    for name, value in seen[0].items() if seen else ():
        kept = load_file(step / "model.safetensors")[name]
        assert torch.equal(value.nan_to_num(7), kept.nan_to_num(7)), name
        assert value.dtype == kept.dtype
    return None


@pytest.fixture(autouse=True)
def settings_of_torch() -> Iterator[None]:
    """Give back the settings that a replay makes."""
    yield
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")


# Forging


MAKE: dict[str, Callable[[Path], object]] = {
    **{
        name: partial(lambda name, path: build(path / "run", name, STEP, resume=False).run(), name)
        for name in OPTIMIZERS
    },
    "ranks": lambda path: done(path, 2, run, spec_of(path / "run", RANKS_STEP)),
    "kept": make_kept,
}
CHECK: dict[str, Callable[[Path], str | None]] = {
    **{name: partial(resume, optimizer=name) for name in OPTIMIZERS},
    "ranks": resume_ranks,
    "kept": repeat,
}
Forged = Callable[..., str | None]


@pytest.fixture(scope="module")
def forged(tmp_path_factory: pytest.TempPathFactory) -> Forged:
    """Return a function that forges a copy of a state, and returns the refusal of the run, or None if it goes on."""

    @cache
    def made(state: str) -> Path:
        folder = tmp_path_factory.mktemp("made")
        MAKE[state](folder)
        return folder / "run"

    def call(state: str, forge: Forge, check: Callable[[Path], str | None] | None = None) -> str | None:
        run_dir = shutil.copytree(made(state), tmp_path_factory.mktemp("forged") / "run")
        folder = run_dir / (
            KEPT if state == "kept" else f"checkpoints/step-{RANKS_STEP if state == 'ranks' else STEP:08d}"
        )
        before = contents(folder)
        name = Path("step.json" if state == "kept" else "manifest.json")
        facts = json.loads(before[name])
        forge(folder, facts)
        for path, data in contents(folder).items():
            if path.name in (facts.get("files") or ()) and data != before.get(path):
                digest = hashlib.sha256(data).hexdigest()
                facts["files"][path.name] = digest if state == "kept" else {"bytes": len(data), "sha256": digest}
        if contents(folder).get(name) == before[name]:
            (folder / name).write_bytes(stamped({key: value for key, value in facts.items() if key != "sha256"}))
        try:
            return (check or CHECK[state])(run_dir)
        finally:
            shutil.rmtree(run_dir.parent)

    return call


def tensors(file: str, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Forge:
    """Return a function that changes the tensors in a file."""
    return lambda folder, facts: save_file(change(load_file(folder / file)), folder / file)


def content(file: str, data: bytes) -> Forge:
    return lambda folder, facts: (folder / file).write_bytes(data)


def put(*path: Any, to: Any) -> Forge:
    """Return a function that sets a value of the manifest or of step.json."""

    def forge(folder: Path, facts: Any) -> None:
        for key in path[:-1]:
            facts = facts[key]
        facts[path[-1]] = to

    return forge


def drop(table: str, key: str) -> Forge:
    return lambda folder, facts: facts[table].pop(key)


def rename(new: str) -> Forge:
    """Return a function that gives the file of the weights the name `new`."""

    def forge(folder: Path, facts: dict[str, Any]) -> None:
        facts["files"][new] = facts["files"].pop(MODEL)
        facts["parts"]["model"]["file"] = new

    return forge


ranks = pytest.param("ranks", marks=[needs_gloo, pytest.mark.wide])


@pytest.mark.parametrize("state", ["adamw", "kept", *wide("sgd", "adafactor"), ranks])
def test_an_untouched_state_goes_on(state: str, forged: Forged) -> None:
    assert forged(state, lambda folder, facts: None) is None


states = pytest.mark.parametrize("state", ["checkpoint", pytest.param("ranks", marks=needs_gloo), "kept"])


def drawn(state: str, data: st.DataObject) -> str:
    return data.draw(st.sampled_from(sorted(OPTIMIZERS))) if state == "checkpoint" else state


@pytest.mark.wide
@states
@given(data=st.data())
@fewer
def test_any_tensors(state: str, data: st.DataObject, forged: Forged) -> None:
    def forge(folder: Path, facts: dict[str, Any]) -> None:
        file = folder / data.draw(st.sampled_from(sorted(name for name in facts["files"] if "safetensors" in name)))
        save_file(forge_tensors(data, load_file(file)), file)

    forged(drawn(state, data), forge)


@pytest.mark.wide
@states
@given(data=st.data())
@fewer
def test_any_values(state: str, data: st.DataObject, forged: Forged) -> None:
    def forge(folder: Path, facts: dict[str, Any]) -> None:
        if state == "kept":
            roots = [{key: facts} for key in ("progress", "machine", "files")]
        else:
            roots = [{"sharded": part} for part in facts["parts"].values() if "sharded" in part]
            roots += [{name: facts["parts"]} for name in facts["parts"]] if state == "checkpoint" else []
        root = data.draw(st.sampled_from([facts, *(facts for _ in roots), *roots]))
        ((key, inside),) = root.items() if root is not facts else [("", facts)]
        forge_value(data, inside[key] if root is not facts else facts)

    lr = data.draw(st.sampled_from([None, None, None, 1e-3]))
    check = partial(repeat, watched=data.draw(st.booleans()), lr=lr) if state == "kept" else None
    forged(drawn(state, data), forge, check)


small = st.integers(-8, 64) | scalars.filter(lambda value: type(value) is not int) | st.sampled_from(["unet", "", "0"])


@pytest.mark.wide
@given(data=st.data())
@fewer
def test_any_config_of_a_kept_step(data: st.DataObject, forged: Forged) -> None:
    def forge(folder: Path, facts: dict[str, Any]) -> None:
        config = tomli.loads((folder / "config.toml").read_text())
        forge_value(data, config, small.filter(lambda value: value is not None))
        (folder / "config.toml").write_bytes(tomli_w.dumps(config).encode("utf-8", "replace"))

    forged("kept", forge, partial(repeat, watched=data.draw(st.booleans())))


@pytest.mark.wide
@given(data=st.data())
@fewer
def test_any_bytes_of_a_kept_step(data: st.DataObject, forged: Forged) -> None:
    def forge(folder: Path, facts: dict[str, Any]) -> None:
        file = folder / data.draw(st.sampled_from([*PARTS, "config.toml"]))
        whole = file.read_bytes()
        begin = data.draw(st.integers(0, len(whole)))
        end = data.draw(st.integers(begin, min(len(whole), begin + 9)))
        file.write_bytes(whole[:begin] + data.draw(st.binary(max_size=9)) + whole[end:])

    forged("kept", forge)


def of_other_sizes(given: object) -> dict[str, torch.Tensor]:
    return dict(torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.SiLU(), torch.nn.Linear(9, 4)).state_dict())


def moment(name: str, kind: str) -> Forge:
    def change(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        key = next(key for key in given if key.endswith(f"3.weight/{name}"))
        forged = TENSORS[kind](given.pop(key))
        return given if forged is None else {**given, key: forged}

    return tensors("optimizers.safetensors", change)


def pieces(**to: Any) -> Forge:
    return lambda folder, facts: facts["parts"]["model"]["sharded"]["blocks.0.0.weight"].update(to)


def outside(folder: Path, facts: dict[str, Any]) -> None:
    shutil.copy(folder / FIRST, folder.parents[2] / FIRST)
    facts["files"][f"../../../{FIRST}"] = facts["files"].pop(FIRST)


MODEL, NAME = "model.safetensors", "step-00000006"
FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
UNFIT = ("shorter", "one number", "double", "nan", "removed")
COUNTS = [-1, 1.5, None, "6", float("inf"), [], {}]
OUTSIDE = ["../model.safetensors", "/etc/passwd", "a/../../x.safetensors", "..", "", ".safetensors", "a\\b.safetensors"]
CHECKPOINT: list[tuple[Forge, tuple[object, ...]]] = [
    (put("format", to=1), (NAME, "hookdiff", 1, 3)),
    (drop("files", MODEL), (NAME, MODEL)),
    (drop("parts", "model"), (NAME, "manifest.json", "'model'")),
    (content(MODEL, pickle.dumps(Bomb())), (NAME, MODEL)),
    (lambda folder, facts: torch.save(toy_model().state_dict(), folder / MODEL), (NAME, MODEL)),
    (tensors(MODEL, of_other_sizes), ("3.weight", "3.bias", "0.weight", (9, 4), (8, 4))),
    (content(MODEL, b"\x02" + bytes(7) + b"{}"), ("0.weight",)),  # no tensors
    *((content(MODEL, data), (NAME, MODEL)) for data in (b"", bytes(8), bytes(100), b"\xff" * 100)),
    *((put("parts", "progress", "values", "position", to=count), (NAME, "manifest.json")) for count in COUNTS),
    *((put("parts", "progress", "values", "step", to=count), (NAME, "manifest.json")) for count in COUNTS),
    *((rename(path), (NAME, "manifest.json", repr(path))) for path in OUTSIDE),
    *((moment("exp_avg", kind), ("exp_avg", "3.weight")) for kind in UNFIT),
    *((moment("exp_avg_sq", kind), ("exp_avg_sq", "3.weight")) for kind in (*UNFIT, "negative")),
]
RANKS: list[tuple[Forge, tuple[object, ...]]] = [
    (pieces(pieces={FIRST: [0, 0], SECOND: [3, 0]}), ()),  # they overlap
    (pieces(shape=[2**40, 4]), ()),
    (pieces(pieces={"gone.safetensors": [0, 0], SECOND: [4, 0]}), ()),
    (pieces(pieces={"../../../other.safetensors": [0, 0], SECOND: [4, 0]}), ()),
    (pieces(pieces={"keeps-00001-of-00002.safetensors": [0, 0], SECOND: [4, 0]}), ()),
    (outside, (f"../../../{FIRST}",)),
    (put("parts", "model", "file", to=FIRST), (FIRST,)),  # whole, and in pieces
]
KEPT_STEP: list[tuple[Forge, tuple[object, ...]]] = [
    *(
        (put("files", name, to="0" * 64), ("files",))
        for name in ("../../config.toml", "/etc/hostname", f"nested/{MODEL}")
    ),
    (put("files", MODEL, to="0"), ("files",)),
    *(
        (put(part, key, to=value), (f"{part}.{key}",))
        for part, key, value in [
            ("machine", "threads", 0),
            ("machine", "threads", 10**6),
            ("machine", "threads", True),
            ("machine", "matmul_precision", "low"),
            ("machine", "deterministic", "yes"),
            ("progress", "position", -1),
            ("progress", "epoch", 0.5),
            ("results", "per_sample", [None]),
        ]
    ),
]


@pytest.mark.parametrize(
    ("state", "forge", "facts"),
    [
        *(("adamw", forge, facts) for forge, facts in CHECKPOINT),
        *mostly_wide(1, [(name, tensors("optimizers.safetensors", lambda given: {}), ()) for name in OPTIMIZERS]),
        *(
            pytest.param("ranks", forge, ("manifest.json", *facts), marks=[needs_gloo, pytest.mark.wide])
            for forge, facts in RANKS
        ),
        *(("kept", forge, ("step.json", *facts)) for forge, facts in KEPT_STEP),
    ],
)
def test_a_forged_state_is_refused(state: str, forge: Forge, facts: Any, forged: Forged, here: Path) -> None:
    check_facts(forged(state, forge), *facts)
    assert not Path(CANARY).exists()
    assert torch.get_num_threads() == 1


def test_a_checkpoint_of_a_newer_version_is_not_skipped(forged: Forged) -> None:
    """Resuming from an older one would undo the work of that version."""

    def newer(folder: Path, facts: dict[str, Any]) -> None:
        shutil.copytree(folder, folder.with_name("step-00000005"))
        facts.update(format=7, versions={"hookdiff": "9.1"})

    check_facts(forged("adamw", newer), "step-00000006", "9.1", 7, 4)


def test_a_negative_mean_of_gradients_may_be_right(forged: Forged) -> None:
    assert forged("adamw", moment("exp_avg", "negative")) is None


def test_momentum_may_be_added_on_resume(tmp_path: Path) -> None:
    def run(momentum: float, steps: int, resume: bool) -> Loop:
        optimizers = partial(lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum))
        options: dict[str, Any] = {"run_dir": tmp_path, "resume": resume, "steps": steps}
        return toy_run({"checkpoint": Checkpoint()}, optimizers=optimizers, **options)

    run(0.0, 4, resume=False)
    assert run(0.9, 6, resume=True).progress.step == 6


@needs_gloo
@pytest.mark.wide
@pytest.mark.parametrize("part", ["model", "optimizers"])
def test_values_that_are_not_finite_in_the_part_of_one_rank_are_refused_by_all(part: str, forged: Forged) -> None:
    def spoil(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        given[next(name for name in given if "blocks.0.0.weight" in name)][-1] = torch.nan
        return given

    def on_two(run_dir: Path) -> str:
        result = done(run_dir.parent, 2, run, spec_of(run_dir, RANKS_STEP + 1, resume=True))
        first, second = result["ranks"]
        assert first["error"] == second["error"]
        assert not result["begun"]
        return str(first["error"][1])

    check_facts(forged("ranks", tensors(f"{part}-00002-of-00002.safetensors", spoil), on_two), "blocks.0.0.weight")


def test_a_link_out_of_the_run_directory_is_no_checkpoint(forged: Forged, tmp_path: Path) -> None:
    def link(folder: Path, facts: dict[str, Any]) -> None:
        checkpoints = folder.parents[1] / "checkpoints"
        shutil.move(checkpoints, tmp_path / "moved")
        checkpoints.symlink_to(tmp_path / "moved")

    def check(run_dir: Path) -> str:
        said: list[str] = []
        retrain(run_dir / KEPT, 1e-3, [], [], False, said.append)
        return said[0]

    assert "(step 0)" in str(forged("kept", link, check))
