import pytest
import tomli
import tomli_w
import torch

from hookdiff import ConfigError, Feed, InMemory, UserError, build_loop, hookimpl, load_config
from hookdiff.builtin.directory import RunDir
from hookdiff.experiment import LeftOut, Part, try_config
from hookdiff.experiment.build import fit_to_data, pick_device
from hookdiff.images import Folder, feed_of
from hookdiff.run_dir.config_toml import CONFIG
from hookdiff.testing import assert_same, toy_loop, weights
from tests.conftest import check_facts, ran, refused

USER = """
import torch
from torch import nn
from hookdiff import hookimpl

class Net(nn.Module):
    def __init__(self, in_channels: int, image_size: int = 0, num_classes: int | None = None):
        super().__init__()
        self.facts = in_channels, image_size, num_classes
        self.layer = nn.Conv2d(in_channels, in_channels, 1)

    def forward(self, x, timesteps):
        return self.layer(x)

class Needy(Net):
    def __init__(self, in_channels: int, must: int):
        super().__init__(in_channels)

class Theirs(Net):
    def __init__(self, in_channels: int, num_classes: int, out_channels: int = 3, sample_size: tuple | int = 32):
        super().__init__(in_channels, sample_size, (num_classes, out_channels))

class Looks(Net):
    def __init__(self, in_channels: int, width: int = 3):
        super().__init__(in_channels)
        if width < 0:
            raise ValueError("width must not be negative")
        self.rates = [x.item() for x in torch.linspace(0, 1, width)]

class Empty(nn.Module):
    pass

def three() -> nn.Module:
    return 3

def four() -> torch.Tensor:
    return 4

class metrics:
    @hookimpl
    def on_start(self): ...
"""


@pytest.fixture
def config(user_module, load_small):
    """Return a function that loads a small config with settings, plugins and a model of the user's module."""
    user_module("hd_user", USER)

    def loaded(*settings, plugins=(), model=None):
        own = {"model": {"use": f"hd_user:{model}"}} if model else {}
        return load_small(*settings, plugins=plugins, run={"steps": 3, "log_every": 1}, **own)

    return loaded


def test_a_loop_is_built_from_the_config(config, tmp_path):
    loop = build_loop(config("optimizer.lr=0.5", "run.seed=4", plugins=["ema"]), tmp_path / "run")
    core = ["run_dir", "metrics", "texts", "distributions", "images", "events"]
    assert list(loop.plugins) == [*core, "ema"]
    assert (loop.config.seed, loop.feed.shape) == (4, (1, 8, 8))
    assert (loop.objective.process.timesteps, loop.sampler.steps) == (20, 2)
    assert not (tmp_path / "run").exists()  # only a run that starts makes it
    with loop:
        assert [type(one).__name__ for one in loop.optimizers] == ["Muon", "AdamW"]
        assert {group["lr"] for one in loop.optimizers for group in one.param_groups} == {0.5}


VECTORS = """
import torch
from torch import nn
from hookdiff import InMemory

def points() -> InMemory:
    return InMemory(torch.linspace(-1, 1, 40).reshape(8, 5))

class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x, timesteps):
        return self.layer(x)
"""


@pytest.mark.parametrize("side", [None, 8])
def test_a_side_of_the_shift_is_refused_for_vectors(user_module, load_small, tmp_path, side):
    user_module("hd_vectors", VECTORS)
    process = {"use": "flow", **({"shift_side": side} if side else {})}
    tables = {"data": {"source": "hd_vectors:points"}, "model": {"use": "hd_vectors:Line"}}
    config = load_small(run={"batch_size": 4}, diffusion={"process": process}, **tables)
    if side is None:
        assert build_loop(config, tmp_path / "run").feed.shape == (5,)
    else:
        with refused(ConfigError, "diffusion:", "'process.shift_side'", "(5,)", "remove"):
            build_loop(config, tmp_path / "run")


def test_the_model_depends_only_on_the_seed_of_the_run(config, tmp_path):
    torch.manual_seed(1)
    loop = build_loop(config("run.seed=4"), tmp_path / "a")
    torch.manual_seed(2)
    assert_same(weights(loop), weights(build_loop(config("run.seed=4"), tmp_path / "b")))
    with pytest.raises(AssertionError):
        assert_same(weights(loop), weights(build_loop(config("run.seed=5"), tmp_path / "c")))


@pytest.mark.parametrize("given", ["true", "false"])
def test_the_memory_format_is_that_of_the_config(config, tmp_path, given):
    loop = build_loop(config(f"run.channels_last={given}"), tmp_path / "run")
    weight = loop.model.down[0][0].conv1.weight
    assert weight.is_contiguous(memory_format=torch.channels_last) == (given == "true")


def test_the_written_config_gives_the_same_run_again(config, tmp_path):
    loop = ran(build_loop(config(plugins=["ema", "clip"]), tmp_path / "run"))
    again = load_config(tmp_path / "run" / CONFIG)
    assert again.resolved() == loop.hparams == tomli.loads((tmp_path / "run" / CONFIG).read_text())
    assert_same(weights(loop), weights(ran(build_loop(again, tmp_path / "again"))))


@pytest.mark.parametrize(
    ("hooks", "heard"),
    [
        (("restore", "offer_weights"), ["ema", "checkpoint"]),
        (("prepare_model", "before_step", "offer_weights"), ["ema"]),
    ],
)
def test_plugins_without_the_hooks_are_left_out(config, tmp_path, hooks, heard):
    loop = build_loop(config(plugins=["ema", "clip", "checkpoint"]), tmp_path, hooks=hooks)
    assert [name for name, plugin in loop.plugins.items() if not isinstance(plugin, LeftOut)] == heard
    assert {"clip", "checkpoint"} < set(loop.plugins)  # so that the saved state is not of an unknown plugin


def test_the_data_gives_the_arguments_that_the_config_leaves_open(config, tmp_path):
    loop = build_loop(config(model="Net"), tmp_path / "run")
    assert loop.model.facts == (1, 8, None)  # only the config gives classes to a network that does not need them
    assert loop.hparams["model"].items() >= {"use": "hd_user:Net", "in_channels": 1, "image_size": 8}.items()
    assert "num_classes" not in loop.hparams["model"]
    loop = build_loop(config("model.image_size=4", "model.num_classes=12", model="Net"), tmp_path / "run")
    assert loop.model.facts == (1, 4, 12)
    loop = build_loop(config(model="Theirs"), tmp_path / "run")
    assert loop.model.facts == (1, 8, (10, 1))


def test_only_images_give_an_image_size(config):
    given = config(model="Net")
    flat = fit_to_data(given, Feed(InMemory(torch.zeros(5, 3))))
    assert flat.model.arguments == {"in_channels": 3}
    pairs = fit_to_data(given, feed_of([(torch.zeros(3, 4, 6), 1)]))
    assert pairs.model.arguments == {"in_channels": 3, "image_size": 6}


def test_an_argument_that_neither_config_nor_data_gives_is_missing(config, tmp_path):
    with refused(ConfigError, "model", "hd_user:Needy", "must"):
        build_loop(config(model="Needy"), tmp_path / "run")
    assert build_loop(config("model.must=1", model="Needy"), tmp_path / "run").model.facts[0] == 1


@pytest.mark.parametrize(
    ("given", "model", "facts"),
    [
        ([], "three", ("model.use", "hd_user:three", "int", "torch.nn.Module")),
        ([], "Empty", ("model.use", "hd_user:Empty", "parameters")),
        (["data.source=hd_user:four"], "Net", ("data.source", "hd_user:four", "int")),
        (["model.width=-1"], "Looks", ("model", "width must not be negative")),
    ],
)
def test_a_part_that_cannot_be_trained_is_refused_with_its_table(config, tmp_path, given, model, facts):
    with refused(ConfigError, *facts):
        build_loop(config(*given, model=model), tmp_path / "run")


def test_names_of_the_core_are_refused(config, tmp_path):
    with refused(ConfigError, "run.plugins", "'metrics'"):
        build_loop(config(plugins=["hd_user:metrics"]), tmp_path / "run")


def test_a_probe_lists_all_problems(config):
    slips = ["model.image_size=7", "optimizer.lr=-1", "run.device=nowhere", "sampling.steps=21"]
    bad = config(*slips, "plugins.lr.warmup=0", "plugins.lr.start_factor=0.5", plugins=["lr"])
    with pytest.raises(ConfigError) as caught:
        try_config(bad)
    first, *lines = str(caught.value).split("\n")
    check_facts(first, bad.path, 5)
    expected = (
        ("run.device", "'nowhere'"),
        ("model", "image_size=7"),
        ("optimizer", -1.0),
        ("sampling", 21, 20),
        ("plugins.lr", "start_factor"),
    )
    for line, (place, *facts) in zip(lines, expected, strict=True):
        assert line.startswith(f"  {place}: ")
        check_facts(line, *facts)


def test_a_probe_allocates_no_weights(config):
    try_config(config("model.channels=262144"))  # terabytes of weights


def test_a_probe_takes_models_that_cannot_be_made_on_the_meta_device(config):
    try_config(config("model.in_channels=1", model="Looks"))
    with refused(ConfigError, "model", "width must not be negative"):
        try_config(config("model.in_channels=1", "model.width=-1", model="Looks"))


def test_auto_picks_an_available_device():
    expected = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    assert (pick_device("auto").type, pick_device("cpu")) == (expected, torch.device("cpu"))


@pytest.mark.parametrize("name", ["", "gpu", "cpu:", "cuda:99", "hpu", "meta"])
def test_an_unusable_device_is_refused(name):
    with refused(ConfigError, "run.device", repr(name)):
        pick_device(name)


def test_a_link_to_a_run_directory_is_not_overwritten(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / CONFIG).write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with refused(UserError, tmp_path / "link"):
        toy_loop({"run_dir": RunDir(overwrite=True)}, run_dir=tmp_path / "link").run()
    assert (tmp_path / "real" / CONFIG).exists()


def test_the_run_directory_is_made_after_all_other_plugins_have_started(tmp_path):
    seen = []

    class Looks:
        @hookimpl(trylast=True)
        def on_start(self):
            seen.append((tmp_path / "run").exists())

    toy_loop({"looks": Looks(), "run_dir": RunDir()}, run_dir=tmp_path / "run", steps=1).run()
    assert seen == [False]
    assert (tmp_path / "run" / CONFIG).is_file()


def test_a_file_that_a_part_cannot_open_is_refused_with_its_table_or_key(tmp_path):
    for target, arguments, facts in [
        (open, {"file": str(tmp_path / "gone")}, ("data: ", tmp_path / "gone")),
        (Folder, {"path": str(tmp_path / "gone")}, (f"data.path: {tmp_path / 'gone'}: {tmp_path} has no 'gone'",)),
    ]:
        with refused(ConfigError, *facts):
            Part("data", "mine", target, arguments).build()


PUBLISHED = """
import torch
from torch import nn

def dots(num: int = 32) -> torch.Tensor:
    return torch.rand(num, 1, 8, 8).round()

class Net(nn.Module):
    def __init__(self, in_channels: int, width: int = 4):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(in_channels, width, 3, padding=1), nn.Conv2d(width, in_channels, 1))

    def forward(self, x, timesteps):
        return self.layers(x)

def only_kernels(params, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD([weight.parameter for weight in params if weight.role == "kernel"], lr=lr)
"""


def test_a_package_publishes_a_source_a_model_and_an_optimizer(tmp_path, install):
    entries = {"source.dots": "hd_house:dots", "model.net": "hd_house:Net"}
    entries["optimizer.kernels"] = "hd_house:only_kernels"
    install("hookdiff-house", entries, group="hookdiff.parts", hd_house=PUBLISHED)
    tables = {"data": {"source": "dots", "num": 16}, "model": {"use": "net"}, "optimizer": {"use": "kernels"}}
    path = tmp_path / "house.toml"
    path.write_text(tomli_w.dumps({"run": {"steps": 1, "batch_size": 8}, **tables}))
    config = load_config(path)
    try_config(config)
    with build_loop(config, tmp_path / "run") as loop:
        assert [tuple(p.shape) for p in loop.optimizers[0].param_groups[0]["params"]] == [(4, 1, 3, 3), (1, 4, 1, 1)]
        assert len(loop.feed) == 16
        next(loop.steps())
    table = tomli.loads((tmp_path / "run" / "config.toml").read_text())
    assert [table["data"]["source"], table["model"]["use"], table["optimizer"]["use"]] == ["dots", "net", "kernels"]
    for key, wrong, right in (("data.source", "dost", "dots"), ("model.use", "nat", "net")):
        with refused(ConfigError, key, repr(wrong), repr(right)):
            load_config(path, settings=[f"{key}={wrong}"])
