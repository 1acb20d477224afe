"""A run stands on its own: moved to another place, without its data, it samples, exports, replays and loads."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import tomli_w
import torch
from torch import Tensor

import hookdiff
from hookdiff import ConfigError, SampleRequest, UserError, build_loop, builtin_plugins, load_config, load_run
from hookdiff.data import Facts, FeedWithoutData, InMemory
from hookdiff.images import feed_of
from hookdiff.log.pixels import to_uint8
from hookdiff.testing import assert_same, toy_loop
from hookdiff_samples.between import between_noises, noise_between
from tests.conftest import SMALL, check_facts, finish, output, records, refused
from tests.forked import python

DATA = """
import torch
from hookdiff import InMemory

def shapes(classes: int) -> InMemory:
    images = torch.randint(0, 256, (40, 1, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    return InMemory(images, torch.arange(40) % classes, ["ant", "bee", "cat", "dog"][:classes])

def captioned() -> InMemory:
    images = torch.zeros(40, 1, 8, 8)
    return InMemory(images, conditions={"level": torch.arange(40.0).view(-1, 1, 1, 1).expand(-1, 1, 8, 8) / 40})
"""
NET = """
from torch import nn

class Levelled(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x, times, level):
        return self.net(x) + level
"""
RUN = {"steps": None, "epochs": 2, "log_every": 1, "plugins": ["ema", "lr", "checkpoint", "spectral"]}


def train(folder: Path, out: Path, **tables: Any) -> Path:
    """Train in `folder`, with modules of its own, and return the run, moved to `out`; `folder` is gone then."""
    folder.mkdir()
    (folder / "drawings.py").write_text(DATA)
    (folder / "levelled.py").write_text(NET)
    run = {key: value for key, value in {**SMALL["run"], **RUN, **tables.pop("run", {})}.items() if value is not None}
    (folder / "c.toml").write_text(tomli_w.dumps({**SMALL, "run": run, **tables}))
    output(python("from hookdiff.cli import main; main()", "run", "c.toml", "--out", "run", folder=folder))
    shutil.move(folder / "run", out)
    shutil.rmtree(folder)
    return out


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A conditional run in another folder than that of its training, which is gone."""
    folder = tmp_path_factory.mktemp("trained")
    tables = {
        "data": {"source": "drawings:shapes", "classes": 3},
        "model": {**SMALL["model"], "num_classes": 3},
        "plugins": {"ema": {"std": [0.05, 0.1], "snapshot_every": 2}},
    }
    return train(folder / "there", folder / "moved", **tables)


@pytest.fixture
def moved(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "moved")


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.wide
def test_the_commands_need_only_the_run_directory(
    moved: Path, tmp_path: Path, start: Any, hookdiff: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    assert finish(start(here, "sample", moved, "--num", 6, "--out", "grid.png"))[0] == 0
    assert (here / "grid.png").is_file()
    for command, file in (
        (["sample", moved, "--num", 6, "--labels", "bee,2", "--out", "x.npz"], "x.npz"),
        (["export", moved, "x.safetensors"], "x.safetensors"),
        (["ema", moved, "--std", "0.07", "--out", "wide.safetensors"], "wide.safetensors"),
        (["sample", moved, "--num", 2, "--weights", "wide.safetensors", "--out", "wide.png"], "wide.png"),
        (["lr", moved, "--out", "lr.png"], "lr.png"),
    ):
        code, out, err = hookdiff(*command)
        assert (code, err) == (0, ""), command
        check_facts(out, file)
        assert (here / file).is_file()
    with numpy.load(here / "x.npz") as made:
        assert (made["arr_0"].shape, made["arr_0"].dtype) == ((6, 8, 8, 1), numpy.uint8)
        assert made["arr_1"].tolist() == [1, 2, 1, 2, 1, 2]


def test_the_images_are_those_that_the_run_makes_with_its_data(tmp_path: Path, user_module: Any) -> None:
    user_module("drawings", DATA)
    data = {"source": "drawings:shapes", "classes": 3}
    tables = {**SMALL, "data": data, "model": {**SMALL["model"], "num_classes": 3}}
    path = tmp_path / "c.toml"
    path.write_text(tomli_w.dumps({**tables, "run": {**SMALL["run"], "plugins": ["ema", "checkpoint", "spectral"]}}))
    with build_loop(load_config(path), tmp_path / "run") as loop:
        for _ in loop.steps():
            pass
        expected = loop.sample(SampleRequest(4, labels=(0, 1, 2, 0))).images
        held = {name: value.clone() for name, value in loop.model.state_dict().items()}
    before = snapshot(tmp_path / "run")
    with load_run(tmp_path / "run") as run:
        torch.testing.assert_close(run.sample(4), expected, rtol=0, atol=1e-5)
        assert (run.classes, run.step, run.loop.optimizers) == (["ant", "bee", "cat"], 6, ())
        assert_same(dict(run.model("model").state_dict()), held)
        assert not run.model().training
        with refused(UserError, "data"):
            next(run.loop.feed.batches(0))
    with load_run(tmp_path / "run", ["sampling.clipping=none"]) as run:
        raw = run.sample(4, raw=True)
        assert raw.abs().max() > 1.2  # after so few steps
        assert torch.equal(run.sample(4), raw.clamp(-1, 1))
        assert torch.equal(to_uint8(run.sample(4)), to_uint8(raw))  # no picture has changed
    assert snapshot(tmp_path / "run") == before


def test_a_notebook_has_model_images_metrics_and_config(moved: Path) -> None:
    run = load_run(str(moved))
    assert repr(run) == f"<Run {moved}: done at step {run.metrics()[-1]['step']:,}>"
    assert "loop" not in vars(run)  # no weights are loaded for that
    assert run.config["run"]["epochs"] == 2
    assert [line["step"] for line in run.metrics()] == sorted({line["step"] for line in records(moved)})
    assert all("loss" in line for line in run.metrics())
    images = run.sample(5, labels=["cat", 0], guidance_scale=3, steps=3, seed=1)
    assert (images.shape, images.dtype, images.device.type) == ((5, 1, 8, 8), torch.float32, "cpu")
    assert images.abs().max() <= 1
    assert not torch.equal(images, run.sample(5, labels=["cat", 0], steps=3, seed=1))
    assert not torch.equal(run.sample(2), run.sample(2, sampler="ddpm"))
    noise = torch.stack([torch.randn(1, 8, 8, generator=one) for one in SampleRequest(3, 7).generators()])
    assert torch.equal(run.sample(3, noise=noise, labels=["bee"]), run.sample(3, seed=7, labels=["bee"]))
    own, average = run.model("model").state_dict(), run.model(weights="ema/std=0.1").state_dict()
    assert any(not torch.equal(own[name], average[name]) for name in own)
    assert_same(dict(run.model("model").state_dict()), dict(own))
    for name, weights in (("model", own), ("ema/std=0.1", average)):
        usual = load_run(moved, [f"sampling.weights={name}"])
        assert_same(dict(usual.model().state_dict()), dict(weights))
        assert torch.equal(usual.sample(2), run.sample(2, weights=name))
    checkpoint = next(iter(sorted((moved / "checkpoints").iterdir())))
    assert load_run(checkpoint).step == int(checkpoint.name.removeprefix("step-"))
    for wrong, facts in (
        ({"labels": ["bea"]}, ("bea", "0 ant", "1 bee", "2 cat", "'bee'")),
        ({"labels": [3]}, (3, "2 cat")),
        ({"steps": 0}, ("sampling.steps", 0)),
        ({"sampler": "dim"}, ("sampling.sampler", "'ddim'")),
        ({"noise": noise}, ("noise", "(3, 1, 8, 8)", "(2, 1, 8, 8)")),
        ({"mask": torch.ones(1, 1, 8, 8, dtype=torch.bool)}, ("mask", "images")),
    ):
        with refused((UserError, ValueError), *facts):  # type: ignore[arg-type]
            run.sample(2, **wrong)
    with refused(hookdiff.UnknownWeights, "emma", "ema"):
        run.model("emma")
    with run.sampling(steps=1, sampler="ddim"):
        images = run.sample(2)
    assert torch.equal(images, run.sample(2, steps=1, sampler="ddim"))
    assert not torch.equal(images, run.sample(2))


def test_what_cannot_be_loaded_gives_one_message(tmp_path: Path, moved: Path) -> None:
    with refused(UserError, tmp_path / "nothing"):
        load_run(tmp_path / "nothing")
    shutil.rmtree(moved / "checkpoints")
    run = load_run(moved)
    assert run.metrics()  # they need no checkpoint
    with refused(UserError, moved, "checkpoint"):
        run.sample(1)
    (moved / "metrics.jsonl").unlink()
    with refused(UserError, moved / "metrics.jsonl"):
        run.metrics()


def test_a_device_that_is_not_here_is_replaced(moved: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = (moved / "config.toml").read_text()
    assert 'device = "cpu"' in config
    (moved / "config.toml").write_text(config.replace('device = "cpu"', 'device = "cuda:77"'))
    assert load_run(moved).sample(1).shape == (1, 1, 8, 8)
    check_facts(caplog.text, "run.device", "cuda:77")
    with refused(ConfigError, "cuda:78"):
        load_run(moved, device="cuda:78").sample(1)


@pytest.mark.wide
def test_a_model_with_conditions_samples_with_the_examples_that_are_kept(
    tmp_path: Path, start: Any, user_module: Any
) -> None:
    user_module("levelled", NET)  # a model of one's own has to be importable
    tables = {
        "run": {"plugins": ["checkpoint"]},
        "data": {"source": "drawings:captioned"},
        "model": {"use": "levelled:Levelled"},
        "diffusion": {**SMALL["diffusion"], "conditions": ["level"]},
    }
    moved = train(tmp_path / "there", tmp_path / "moved", **tables)
    with refused(UserError, "levelled"):
        load_run(moved).sample(1)
    run = load_run(moved, trust=True)
    levels = run.loop.feed.facts.conditions["level"]
    assert torch.equal(levels[:, 0, 0, 0], torch.arange(16) / 40)
    assert torch.equal(run.sample(18), run.sample(18, conditions={"level": levels[[k % 16 for k in range(18)]]}))
    with refused(ValueError, "level", 2):
        run.sample(3, conditions={"level": levels[:2]})
    strips = torch.cat(list(between_noises(run, None, {}, seed=0, rows=2, num=3)))
    noise = noise_between((1, 8, 8), 0, rows=2, num=3)
    assert torch.equal(strips, run.sample(6, noise=noise, conditions={"level": levels[[0, 0, 0, 1, 1, 1]]}))


@pytest.mark.parametrize("options", [{"drop_last": False}, {"limit": 2}])
def test_a_feed_without_data_answers_as_the_one_with_data(options: dict[str, Any]) -> None:
    data = InMemory(torch.zeros(10, 1, 4, 4), torch.arange(10) % 3, ["a", "b", "c"], {"mask": torch.rand(10, 4, 4)})
    feed = feed_of(data, held_out=2, **options).bind(3)
    again = FeedWithoutData(Facts.of(json_and_tensors(feed.state_dict()["facts"]))).bind(3)
    for name in ("shape", "shapes", "num_classes"):
        assert getattr(again, name) == getattr(feed, name)
    assert again.num_batches(3) == feed.num_batches(3)
    assert list(again.classes or ()) == list(feed.classes or ())
    for one, other in (
        (feed.blank(2), again.blank(2)),
        (feed.examples(lambda _: [1, 0]), again.examples(lambda _: [1, 0])),
    ):
        assert one.inputs.shape == other.inputs.shape
        assert_same(dict(one.conditions), dict(other.conditions))
    with refused(UserError, "data"):
        next(again.unaugmented(torch.tensor([0])))


def json_and_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """Return `state` after a way through the files of a checkpoint."""
    tensors, tree = hookdiff.disk.flatten(state)
    return hookdiff.disk.unflatten(tensors, json.loads(json.dumps(tree)))


def test_a_batch_that_is_too_large_is_halved(moved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, sizes = load_run(moved), []
    expected = run.sample(11)
    net = run.loop.model
    whole: Callable[..., Tensor] = net.forward

    def small(x: Tensor, *rest: Any, **more: Any) -> Tensor:
        sizes.append(len(x))
        if len(x) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(x, *rest, **more)

    monkeypatch.setattr(net, "forward", small)
    torch.testing.assert_close(run.sample(11), expected, rtol=0, atol=1e-4)
    assert sizes[:3] == [11, 5, 2]
    monkeypatch.setattr(net, "forward", lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError("out of memory")))
    with refused(UserError, "image", "memory"):
        run.sample(2)


@pytest.mark.wide
@pytest.mark.parametrize("hparams", [None, {"model": {"channels": 32}, "data": {"name": "mine"}}])
def test_a_run_of_a_script_is_refused_with_the_way_to_make_its_images(
    hparams: dict[str, Any] | None, tmp_path: Path, hookdiff: Any
) -> None:
    run = tmp_path / "run"
    toy_loop(builtin_plugins(), run_dir=run, hparams=hparams, steps=1).run()
    code, _, err = hookdiff("sample", run)
    assert code == 2
    check_facts(err, run / "config.toml", "data.source", "model.use", "script", f"run_dir='{run}'", "resume=True")
    check_facts(err, "loop.sample(SampleRequest(16))")
