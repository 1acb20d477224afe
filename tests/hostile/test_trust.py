"""A config of a stranger calls nothing of the wrong kind, and that of a run imports nothing but what is installed."""

import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given, strategies as st

from hookdiff import ConfigError, load_config
from tests.conftest import SMALL, check_facts, check_refused, finish, mostly_wide, output, refused, write_small
from tests.hostile.mutations import CANARY, HERE, Bomb

# Whatever is called in this module, and the import of `hd_sneaky`, makes the file CANARY.
STRANGER = """
import shelve
import sys
from pathlib import Path
from typing import Any
from torch import nn
from torch.fx.graph_module import reduce_graph_module
from torch.optim import Optimizer

def sing(*args, **kwargs):
    Path({canary!r}).touch()

def as_any(*args, **kwargs) -> Any:
    sing()

def as_int(**kwargs) -> int:
    sing()

def as_unknown(**kwargs) -> "NotThere":
    sing()

def as_maybe(**kwargs) -> nn.Module | Optimizer | None:
    sing()

class Unfit:
    def __init__(self, *args, **kwargs):
        sing()

class Singing:
    def __call__(self, *args, **kwargs):
        sing()

    @property
    def song(self):
        sing()

class Meta(type):
    def __call__(cls, *args, **kwargs):
        sing()

class Made(metaclass=Meta):
    pass

class Length:
    def __new__(cls, *args, **kwargs):
        sing()

    def __len__(self):
        return 1

instance = Singing()
inside = [sing]
"""


@pytest.fixture
def canary(here: Path) -> Iterator[Path]:
    """Return a path; a file there means that code of a stranger has run."""
    path = here / CANARY
    (here / "hd_stranger.py").write_text(STRANGER.format(canary=str(path)))
    (here / "hd_sneaky.py").write_text(f"open({str(path)!r}, 'w')\nclass Net: pass\n")
    (here / "evil.pkl").write_bytes(pickle.dumps(Bomb()))
    before = list(sys.path)
    yield path
    sys.path[:] = before
    for name in ("hd_stranger", "hd_sneaky"):
        sys.modules.pop(name, None)


def targets(canary: Path) -> dict[str, dict[str, Any]]:
    """Return what no place takes, with the arguments with which a call makes the canary."""
    touch = {"args": ["touch", str(canary)]}
    code = f"open({str(canary)!r}, 'w')"
    evil = str(canary.parent / "evil.pkl")
    return {
        "subprocess:Popen": touch,
        "subprocess:run": {"popenargs": touch["args"]},
        "os:system": {"command": f"touch {canary}"},
        "os:mkdir": {"path": str(canary)},
        "pathlib:Path.touch": {},
        "builtins:eval": {"source": code},
        "builtins:exec": {"source": code},
        "builtins:open": {"file": str(canary), "mode": "w"},
        "functools:partial": {"func": "hd_stranger:sing"},
        "pickle:load": {"file": evil},
        "shelve:open": {"filename": str(canary)},
        "shelve:DbfilenameShelf": {"filename": str(canary)},
        "mailbox:mbox": {"path": str(canary)},
        "hd_stranger:shelve.DbfilenameShelf": {"filename": str(canary)},
        "numpy:load": {"file": evil, "allow_pickle": True},
        "numpy:save": {"file": str(canary), "arr": [1]},
        "numpy:memmap": {"filename": str(canary), "mode": "w+", "shape": [4]},
        "pandas:read_pickle": {"filepath_or_buffer": evil},
        "torch:load": {"f": evil, "weights_only": False},
        "torch.serialization:load": {"f": evil, "weights_only": False},
        "torch:hub.load": {"repo_or_dir": str(canary.parent), "model": "sing", "source": "local"},
        "torch.hub:load": {"repo_or_dir": str(canary.parent), "model": "sing", "source": "local"},
        "torch.utils.cpp_extension:load": {"name": "x", "sources": [str(canary)]},
        "torch.nn:Module.load_state_dict": {"state_dict": {}},
        "torch.nn:Module.get_submodule": {"target": ""},
        "torch.nn.modules.module:sys.modules": {},
        "torch.fx.graph_module:reduce_graph_module": {"body": {"_code": code}, "import_block": code},
        "hd_stranger:reduce_graph_module": {"body": {"_code": code}, "import_block": code},
        "torchvision.datasets:LSUN": {"root": str(canary.parent)},
        "torchvision:LSUN": {"root": str(canary.parent)},
        **{f"hd_stranger:{name}": {} for name in ("sing", "as_any", "as_int", "as_unknown", "as_maybe", "Unfit")},
        **{f"hd_stranger:{name}": {} for name in ("Singing", "instance", "instance.song", "Made", "Length", "inside")},
        **{f"hd_stranger:{name}": {} for name in ("Path", "sys.exit", "__builtins__", "sing.__globals__", "nowhere")},
    }


TARGETS = list(targets(Path("canary")))
SECTIONS = ("model.use", "data.source", "optimizer.use")
PARTS = (
    *("diffusion.process", "diffusion.prediction", "diffusion.weighting", "diffusion.times", "diffusion.loss"),
    *("diffusion.process.schedule", "sampling.sampler", "sampling.spacing", "sampling.clipping", "sampling.guidance"),
    *("plugins.lr.schedule", "plugins.clip.rule", "plugins.ema.warmup"),
)
PLUGINS = {"lr": {}, "clip": {}, "ema": {}}


def config(place: str, target: str, arguments: Mapping[str, Any], in_table: bool) -> dict[str, Any]:
    """Return a config that names `target` in `place`."""
    tables: dict[str, Any] = {**SMALL, "run": {**SMALL["run"], "plugins": list(PLUGINS)}}
    if place == "run.plugins":
        tables["run"] = {**tables["run"], "plugins": [*PLUGINS, target]}
        return {**tables, "plugins": {target.rpartition(":")[2].lower(): dict(arguments)}}
    *path, last = place.split(".")
    if place in SECTIONS:
        return {**tables, path[0]: {**arguments, last: target}}
    value: Any = {last: {"use": target, **arguments} if in_table else target}
    if path[-1] == "process":
        value["use"] = "vp"  # which has a schedule
    for name in reversed(path[1:]):
        value = {name: value}
    return {**tables, path[0]: value}


@HERE
@given(
    place=st.sampled_from((*SECTIONS, *PARTS, "run.plugins")),
    target=st.sampled_from(TARGETS),
    how=st.sampled_from(["file", "table", "option"]),
    trust=st.booleans(),
)
def test_nothing_of_the_wrong_kind_is_called(canary: Path, place: str, target: str, how: str, trust: bool) -> None:
    path = canary.parent / "hostile.toml"
    written = config(place, target, targets(canary)[target], in_table=how == "table")
    plugins, options = [], []
    if how == "option":
        written = {**SMALL, "run": {**SMALL["run"], "plugins": list(PLUGINS)}}
        plugins, options = ([target], []) if place == "run.plugins" else ([], [f"{place}={target}"])
    path.write_text(tomli_w.dumps(written))
    with refused(ConfigError, target.partition(":")[0]):
        load_config(path, plugins, options, trust=trust)
    assert not canary.exists()


@pytest.mark.parametrize("place", ["run.plugins", *mostly_wide(2, SECTIONS), *mostly_wide(1, PARTS)])
def test_the_config_of_a_run_imports_only_what_is_installed(canary: Path, place: str) -> None:
    path = canary.parent / "config.toml"
    for in_table in (True, False):
        path.write_text(tomli_w.dumps(config(place, "hd_sneaky:Net", {}, in_table)))
        with refused(ConfigError, "hd_sneaky:Net", "hd_sneaky", place.partition(".use")[0], "--trust", "trust=True"):
            load_config(path, trust=False)
    assert not canary.exists()
    assert "hd_sneaky" not in sys.modules


@pytest.mark.parametrize(
    "target",
    [
        "torch.utils.model_dump.__main__:main",
        "torch.testing._internal.common_utils:TestCase",
        "sklearn.datasets:load_digits",
        "torchmine:Net",
        "hookdiff_selftest.state_recorder:StateRecorder",
        "hookdiff_ema.plugin:EMA",
        "hd_sneaky:torch.nn.Linear",
        ".hd_sneaky:Net",
        "..torch:Net",
    ],
)
def test_what_is_near_an_installed_name_is_not_installed(canary: Path, target: str) -> None:
    path = write_small(canary.parent / "config.toml", model={"use": target})
    with refused(ConfigError, "model.use", target, "--trust"):
        load_config(path, trust=False)


@pytest.mark.parametrize(
    ("table", "value"),
    [
        ("model", {"use": "unet"}),
        ("model", {"use": "hookdiff_networks:DiT"}),
        ("model", {"use": "torch.nn:Conv2d", "kernel_size": 3}),
        ("model", {"use": "torchvision.models:resnet18"}),
        ("data", {"source": "torchvision:FakeData"}),
        ("data", {"source": "array", "path": "x.npy"}),
        ("data", {"source": "hookdiff.data:fashion_mnist", "root": "x"}),
        ("optimizer", {"use": "muon"}),
        ("optimizer", {"use": "torch.optim:AdamW"}),
        ("diffusion", {"weighting": "hookdiff.diffusion:MinSNR"}),
        ("run", {"plugins": ["hookdiff_ema:EMA", "hookdiff.testing.examples:MixUp", "clip"]}),
    ],
)
def test_what_is_installed_needs_no_trust(canary: Path, table: str, value: dict[str, Any]) -> None:
    path = write_small(canary.parent / "config.toml", **{table: value})
    for trust in (False, True):
        assert load_config(path, trust=trust).needs_trust == ()


def test_what_a_package_publishes_needs_no_trust(canary: Path, install: Callable[..., None]) -> None:
    source = "from torch import nn\nclass Net(nn.Linear): ...\nclass Other(nn.Linear): ...\n"
    install("hd-published", {"model.net": "hd_published:Net"}, group="hookdiff.parts", hd_published=source)
    for use in ("net", "hd_published:Net"):
        path = write_small(canary.parent / "config.toml", model={"use": use, "in_features": 1, "out_features": 1})
        load_config(path, trust=False)
    path = write_small(path, model={"use": "hd_published:Other", "in_features": 1, "out_features": 1})
    with refused(ConfigError, "hd_published:Other", "--trust"):
        load_config(path, trust=False)
    assert load_config(path, trust=True).needs_trust == ("hd_published:Other",)


def test_a_run_directory_is_never_on_the_import_path(canary: Path) -> None:
    (canary.parent / "metrics.jsonl").touch()
    for tables in ({}, {"run": {"import_from": "."}}, {"run": {"import_from": str(canary.parent)}}):
        path = write_small(canary.parent / "config.toml", model={"use": "hd_sneaky:Net"}, **tables)
        for trust in (False, True):
            with refused(ConfigError, "hd_sneaky"):
                load_config(path, trust=trust)
            assert str(canary.parent) not in sys.path
    assert not canary.exists()


FITTING = """
from collections.abc import Sequence
from torch import Tensor, nn, optim
from torch.utils.data import Dataset
from hookdiff import InMemory
from hookdiff.data.source import Images, Source

class Net(nn.Linear):
    class Inner(nn.Linear): ...

def net() -> nn.Module: ...
def named() -> "Net": ...
def either() -> Net | nn.Conv2d: ...
def one(params) -> optim.Optimizer: ...
def two(params) -> tuple[optim.SGD, ...]: ...
def more(params) -> list[optim.Optimizer] | optim.Optimizer: ...
def some(params) -> Sequence[optim.Optimizer]: ...
def in_memory() -> InMemory: ...
def tensor() -> Tensor: ...
def items() -> list[Tensor]: ...
def dataset() -> Dataset[Tensor]: ...
def source() -> Source: ...
def images() -> Images: ...

class Items:
    def __len__(self): ...
    def __getitem__(self, index): ...

class Pictures:
    def __len__(self): ...
    def load(self, index): ...
    def describe(self, index): ...
"""


def test_classes_and_annotated_functions_are_taken(user_module: Callable[..., None], load_small: Any) -> None:
    user_module("hd_fitting", FITTING)
    fitting = {
        "model.use": ("Net", "Net.Inner", "net", "named", "either"),
        "optimizer.use": ("one", "two", "more", "some"),
        "data.source": ("in_memory", "tensor", "items", "dataset", "source", "images", "Items", "Pictures"),
    }
    for place, names in fitting.items():
        table, _, key = place.partition(".")
        for name in names:
            given = {"in_features": 1, "out_features": 1} if "Net" in name else {}
            assert load_small(**{table: {key: f"hd_fitting:{name}", **given}}).needs_trust == (f"hd_fitting:{name}",)


@pytest.mark.parametrize("name", ["net", "named", "one"])
def test_a_function_of_another_place_is_refused_with_the_annotation_to_write(
    user_module: Callable[..., None], load_small: Any, name: str
) -> None:
    user_module("hd_fitting", FITTING)
    with refused(ConfigError, "data.source", f"hd_fitting:{name}", "-> hookdiff.InMemory"):
        load_small(data={"source": f"hd_fitting:{name}"})
    place, annotation = ("model", "torch.nn.Module") if name == "one" else ("optimizer", "torch.optim.Optimizer")
    with refused(ConfigError, f"{place}.use", f"hd_fitting:{name}", f"-> {annotation}"):
        load_small(**{place: {"use": f"hd_fitting:{name}"}})


@pytest.mark.wide
def test_only_a_trusted_run_runs_its_own_code(
    tmp_path: Path, start: Callable[..., Any], another_user: Callable[[], None]
) -> None:
    """Another user's run with code of its own is sampled and resumed once it is trusted; a forged one is refused."""
    home, away = tmp_path / "home", tmp_path / "away"
    home.mkdir()
    away.mkdir()
    (home / "hd_own.py").write_text("from hookdiff_networks import UNet\nclass Net(UNet): ...\n")
    run, table = home / "run", {"model": {**SMALL["model"], "use": "hd_own:Net"}}
    path = write_small(home / "own.toml", run={"steps": 2, "plugins": ["checkpoint"]}, **table)
    output(finish(start(away, "run", path, "--out", run)))
    another_user()
    commands = {"sample": ["--num", "2", "--out", "x.png"], "resume": ["--steps", "3"]}
    for command, words in commands.items():
        result = finish(start(away, command, run, *words))
        check_refused(result, run / "config.toml", "model.use", "hd_own:Net", "--trust")
    for command, words in commands.items():
        output(finish(start(away, command, run, *words, "--trust")))
    out = output(finish(start(away, "resume", run)))
    check_facts(out, f"hookdiff resume {run} --steps N")
    assert "--trust" not in out


@pytest.mark.parametrize("command", mostly_wide(1, ["run", "check", "sample", "resume", "export"]))
def test_a_forged_config_runs_no_command(tmp_path: Path, start: Callable[..., Any], command: str) -> None:
    canary, run = tmp_path / "canary", tmp_path / "run"
    run.mkdir()
    model = {"use": "subprocess:Popen", "args": ["touch", str(canary)]}
    path = write_small(run / "config.toml", model=model, data={"source": "hd_forged:Data"})
    (run / "hd_forged.py").write_text(f"class Data:\n    def __init__(self): open({str(canary)!r}, 'w')\n")
    words = {"check": [path], "run": [path, "--out", "new"], "export": [run, "x.safetensors"]}.get(command, [run])
    # `sample` and `export` do not even read [data].
    others = () if command in ("sample", "export") else ("data.source", "hd_forged")
    check_refused(finish(start(run, command, *words)), "model.use", "subprocess:Popen", *others)
    assert not canary.exists()
