"""The plugin measures without an effect on the training, says what it costs, and keeps the features of the data."""

import gzip
import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from attrs import define
from torch import Generator, Tensor, nn
from torch.utils.data import TensorDataset

from hookdiff import Feed, InMemory, Loop, LoopConfig, SampleRequest, UserError, hookimpl
from hookdiff.data import digits
from hookdiff.features import Collected, Gaussian, Moments, frechet_distance
from hookdiff.log.pixels import to_uint8
from hookdiff.loop.saved import restore_state, state_of
from hookdiff.testing import ToySampler
from hookdiff_diversity import Diversity
from hookdiff_ema import EMA
from hookdiff_features import Digits
from hookdiff_fid import FID
from hookdiff_fid.compare import floor_of
from hookdiff_fid.statistics import write_statistics
from tests.conftest import Logged, acting, check_facts, records, refused, two_ranks, wide

SPACE = Digits().open(torch.device("cpu"))
FASHION = Path("/usr/share/datasets/fashion-mnist")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which features of the data are kept, a new one for each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hookdiff" / "features"


@define
class Painter(ToySampler):
    """Makes images from the noise of the net and the generators, or of the value `fill` if it is given."""

    fill: float | None = None

    def sample(self, *arguments: Any, **wanted: Any) -> Tensor:
        images = super().sample(*arguments, **wanted)
        return images if self.fill is None else torch.full_like(images, self.fill)


class Recorder(Logged):
    @property
    def distances(self) -> dict[int, float]:
        return self.of("fd/digits")


def tiny() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 64)
    return nn.Sequential(nn.Flatten(), *layers, nn.Unflatten(1, (1, 8, 8)))


def make_loop(*plugins: object, data: Any = None, sampler: Any = None, **config: Any) -> tuple[Loop, Recorder]:
    model, recorder = tiny(), Recorder()
    named = {"recorder": recorder, **{f"p{i}": plugin for i, plugin in enumerate(plugins)}}
    loss = lambda net, batch: F.mse_loss(net(batch.inputs), batch.inputs)  # noqa: E731
    adamw, limits = torch.optim.AdamW(model.parameters()), LoopConfig(**{"batch_size": 32, "log_every": 7, **config})
    data = digits() if data is None else data
    return Loop(model, adamw, loss, data, limits, named, sampler=sampler or Painter()), recorder


def trained(*plugins: object, **options: Any) -> tuple[Loop, Recorder]:
    """Return a loop that has run, and what it logged."""
    loop, recorder = make_loop(*plugins, **options)
    assert (loop.run(), loop.model.training) == ("done", True)
    return loop, recorder


@pytest.mark.parametrize(("every", "expected"), [(10, [10, 20, 25]), (5, [5, 10, 15, 20, 25])])
def test_logs_at_the_due_steps_and_once_at_the_end(every: int, expected: list[int]) -> None:
    _, recorder = trained(FID(every=every, num_samples=40), steps=25)
    assert list(recorder.distances) == expected
    assert all(value > 1 for value in recorder.distances.values())


def drawn(loop: Loop, num: int, **request: Any) -> Collected:
    """Return the features of the images that a measurement makes."""
    return Collected.of(SPACE, [to_uint8(loop.sample(SampleRequest(num, stream="evaluate", **request)).images)])


def real() -> Collected:
    return Collected.of(SPACE, [digits().images])


def test_the_logged_distance_is_that_of_the_images() -> None:
    fid = FID(every=0, num_samples=300, seed=5)
    loop, recorder = trained(fid, steps=4)
    expected = frechet_distance(drawn(loop, 300, seed=5).moments, real().moments)
    assert recorder.distances == pytest.approx({4: expected}, rel=1e-4)
    assert recorder.of("fd/digits/num") == {4: 300}
    assert fid.target.num == 1797


def test_all_metrics_of_the_space_are_logged_beside_it() -> None:
    loop, recorder = trained(FID(every=0, num_samples=300), steps=4)
    (values,) = (values for _, values in recorder.calls if "fd/digits" in values)
    names = {"kid/digits", "kid/digits/error", "precision/digits", "recall/digits", "density/digits", "coverage/digits"}
    names |= {"is/digits", "is/digits/deviation", "fd/digits", "fd/digits/num", "fd/digits/floor"}
    assert names <= set(values)
    samples, data = drawn(loop, 300), real()
    a, b = samples.rows.double(), data.rows.double()
    within, other, across = ((x @ y.T / 64 + 1) ** 3 for x, y in ((a, a), (b, b), (a, b)))
    kid = (within.sum() - within.trace()) / (300 * 299) + (other.sum() - other.trace()) / (1797 * 1796)
    assert values["kid/digits"] == pytest.approx(float(kid - 2 * across.mean()), rel=1e-4)
    probabilities = samples.logits.double().softmax(1) if samples.logits is not None else torch.empty(0)
    scores = []
    for part in torch.split(probabilities[numpy.random.RandomState(2020).permutation(300)], 30):
        scores.append((part * (part / part.mean(0)).log()).sum(1).mean().exp())
    assert values["is/digits"] == pytest.approx(float(torch.stack(scores).mean()), rel=1e-4)
    assert 1 < values["is/digits"] < 10

    loop, recorder = trained(FID(every=0, num_samples=300, metrics=()), steps=4)
    (values,) = (values for _, values in recorder.calls if "fd/digits" in values)
    assert not names - {"fd/digits", "fd/digits/num", "fd/digits/floor"} & set(values)


def test_the_floor_is_what_a_perfect_model_would_have() -> None:
    draw = Generator().manual_seed(0)
    data = torch.randn(1797, 32, generator=draw)
    target = Collected.of(lambda rows: (rows, None), [data])
    for num in (100, 300, 1000, 1797, 5000):
        perfect = [Moments.of(torch.randn(num, 32, generator=draw)) for _ in range(9)]
        expected = sum(frechet_distance(moments, target.moments) for moments in perfect) / 9
        assert floor_of(target, num) == pytest.approx(expected, rel=0.1)
    assert floor_of(Collected.of(lambda rows: (rows, None), [data[:3]]), 100) is None

    loop, recorder = trained(FID(every=0, num_samples=300), steps=1)
    assert recorder.of("fd/digits/floor") == {1: pytest.approx(floor_of(loop.plugins["p0"].target, 300))}


def test_measuring_again_gives_the_same_number_for_any_part_of_the_images() -> None:
    distances, sampler = [], Painter()
    for sampler.batch_size in (256, 100, 1000):
        fid = FID(every=0, num_samples=300, metrics=())
        loop, _ = trained(fid, sampler=sampler, steps=3)
        assert fid.measure(loop) == fid.measure(loop)
        distances.append(fid.measure(loop)["fd/digits"])
    assert distances == pytest.approx([distances[0]] * 3, rel=1e-4)


def test_the_default_generator_is_left_alone() -> None:
    fid = FID(num_samples=40)
    loop, recorder = make_loop(fid, steps=2)
    loop.progress.step = 2  # nothing left to train
    before = torch.get_rng_state()
    loop.run()
    assert list(recorder.distances) == [2]
    assert torch.equal(torch.get_rng_state(), before)


def test_the_training_images_are_the_reference() -> None:
    references = []
    for data in (digits(), TensorDataset(digits().images, digits().labels)):
        fid = FID(every=0, num_samples=40)
        trained(fid, data=data, steps=1)  # drops the last 5 of 1797 in training
        assert isinstance(fid.target, Collected)
        references.append(fid.target.moments)
    assert references[0].num == references[1].num == 1797
    assert frechet_distance(*references) < 1e-9
    fid = FID(every=0, num_samples=40)
    trained(fid, data=Feed(digits(), held_out=97), steps=1)
    assert fid.target.num == 1700


def test_other_data_is_refused_before_training() -> None:
    for shape, shown in (((1, 16, 16), "1 x 16 x 16"), ((3, 8, 8), "3 x 8 x 8")):
        with refused(UserError, "1 x 8 x 8", shown):
            trained(FID(features="digits"), data=torch.zeros(64, *shape), steps=1)


@pytest.mark.parametrize("every", [0, 1])
def test_a_single_image_is_refused_before_training_and_two_are_measured(every: int) -> None:
    for num in (1, 2):
        loop, recorder = make_loop(FID(every=every, num_samples=4), data=digits().images[:num], steps=1, batch_size=1)
        with refused(UserError, "fid", 2, 1) if num == 1 else nullcontext():
            loop.run()
        assert (loop.progress.step, len(recorder.distances)) == (num - 1, num - 1)


@pytest.mark.parametrize("plugin", [FID, Diversity])
@pytest.mark.parametrize("features", [None, "inception", "inception-torchvision", "dinov2"])
@pytest.mark.parametrize("shape", [(1, 64), (32, 3), (4, 8, 8)])
def test_samples_that_are_no_images_are_refused_before_weights_are_fetched(
    plugin: Any, features: str | None, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetched(*_: object) -> None:
        raise AssertionError("weights are asked for")

    monkeypatch.setattr("hookdiff_features.spaces.read_weights", fetched)
    monkeypatch.setattr("hookdiff_features.dinov2._builder", fetched)
    with refused(UserError, features or "inception", "1 or 3", " x ".join(map(str, shape))):
        trained(plugin(features=features), data=torch.zeros(64, *shape), steps=1)


@pytest.mark.parametrize("fill", [float("nan"), float("inf")])
def test_images_that_are_not_finite_are_an_error(fill: float) -> None:
    loop, recorder = make_loop(FID(every=2, num_samples=40), sampler=Painter(fill), steps=4)
    with refused(ValueError, "fid", "1 of 1"):
        loop.run()
    assert recorder.distances == {}


def test_data_that_is_not_finite_and_weights_that_no_plugin_offers_are_errors() -> None:
    with refused(ValueError, "data", "64 of 64"):
        trained(FID(), data=torch.full((64, 1, 8, 8), torch.nan), steps=1)
    with refused(UserError, "ema"):
        trained(FID(num_samples=40, weights="ema"), steps=1)


def test_images_are_clipped_as_when_saved() -> None:
    samplers = Painter(1.0), Painter(50.0)
    one, other = (trained(FID(every=0, num_samples=4), sampler=each, steps=1)[1].distances[1] for each in samplers)
    assert one == other


@pytest.mark.parametrize(
    ("every", "facts"), [(500, ("500", "steps")), ("15 min", ("900 s",)), *wide(("2 epochs", ("2 epochs",)), (0, ()))]
)
def test_the_cost_is_logged_first(every: int | str, facts: tuple[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hookdiff")
    trained(FID(every=every, num_samples=1200), steps=1)
    check_facts(caplog.messages[0], "1,200", "digits", "about 1 s", *facts)


@pytest.mark.parametrize("is_below", [False, True])
def test_golden_line_of_a_distance(is_below: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hookdiff")
    sets = acting(before_step=lambda: setattr(measured, "floor", 1e9 if is_below else None))
    _, recorder = trained(measured := FID(num_samples=40), sets, steps=3)
    value, floor = f"{recorder.distances[3]:.4g}", f"{recorder.of('fd/digits/floor')[3]:.4g}"
    floor += " for a perfect model" + " (slightly less is within the noise of 40 images)" * is_below
    expected = f"fd/digits {value} at step 3: 40 images of model against 1,797 of the data, about {floor}, "
    assert caplog.messages[1].startswith(expected)


def test_an_average_of_the_weights_makes_the_images_if_there_is_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hookdiff")
    loop, recorder = trained(FID(every=0, num_samples=300), EMA(decay=0.95), steps=60)
    check_facts(caplog.messages[-1], "300 images of ema")
    ema, model = (frechet_distance(drawn(loop, 300, weights=w).moments, real().moments) for w in ("ema", "model"))
    assert recorder.distances[60] == pytest.approx(ema, rel=1e-4)
    assert recorder.distances[60] != pytest.approx(model, rel=1e-2)


class Slow(Painter):
    """Takes ten seconds for an image, by the clock that it replaces."""

    now = 0.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        monkeypatch.setattr("time.monotonic", lambda: self.now)

    def sample(self, *arguments: Any, **wanted: Any) -> Tensor:
        self.now += 10 * len(arguments[3])
        return super().sample(*arguments, **wanted)


class Guides:
    """Makes an image take twenty seconds from the first step on, as a plugin that calls a second network."""

    @hookimpl(wrapper=True)
    def sample(self, loop: Loop, request: SampleRequest) -> Any:
        loop.sampler.now += 10 * request.num * (loop.progress.step > 0)  # type: ignore[union-attr]
        return (yield)


def test_a_slowing_plugin_is_reckoned_with(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hookdiff"):
        for budget, expected, cost, took in (
            (0, 200, "at least 33 min", "1:06:40"),
            ("3000 s", 150, "about 50 min", "50:00"),
        ):
            fid = FID(every=0, num_samples=200, metrics=(), time_budget=budget)
            _, recorder = trained(fid, Guides(), sampler=Slow(monkeypatch), steps=1)
            assert recorder.of("fd/digits/num") == {1: expected}
            announced, measured = caplog.messages
            check_facts(announced, 200, cost)
            assert measured.endswith(f", {took}")
            caplog.clear()


def test_a_budget_sets_the_number_of_samples(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hookdiff"):
        for budget, most, expected in (("1500 s", 1000, 150), ("1 h", 200, 200), ("60 s", 1000, 100)):
            fid = FID(every=0, num_samples=most, time_budget=budget, metrics=())
            _, recorder = trained(fid, sampler=Slow(monkeypatch), steps=1)
            assert recorder.of("fd/digits/num") == {1: expected}
            check_facts(caplog.text, expected)
    check_facts(caplog.text, "fewer than 100", "60 s")  # so few take longer than was asked


def test_a_resumed_run_keeps_the_number_that_the_budget_set(monkeypatch: pytest.MonkeyPatch) -> None:
    first = FID(num_samples=1000, time_budget="1500 s")
    restore_state(first, {"num": 123, "measured_at": 7})
    trained(first, sampler=Slow(monkeypatch), steps=1)
    assert state_of(first) == {"num": 123, "measured_at": 1}


def test_a_new_number_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    fid = FID(num_samples=40)
    restore_state(fid, {"num": 30, "measured_at": 7})
    caplog.set_level(logging.WARNING, "hookdiff")
    trained(fid, steps=1)
    check_facts(caplog.text, 40, 30)


# What is kept on disk


def test_the_features_of_the_data_are_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(data: Any = None) -> FID:
        fid = FID(every=0, num_samples=40, metrics=())
        trained(fid, data=data, steps=1)
        return fid

    first = run()
    (kept,) = cache.iterdir()
    again = run()
    assert isinstance(first.target, Collected)
    assert isinstance(again.target, Collected)
    assert torch.equal(again.target.rows, first.target.rows)
    assert frechet_distance(again.target.moments, first.target.moments) == 0
    assert list(cache.iterdir()) == [kept]
    others = [InMemory(digits().images.flip(2)), Feed(digits(), held_out=97), digits().images.float() / 128 - 1]
    for number, other in enumerate(others, 2):
        run(other)
        assert len(list(cache.iterdir())) == number  # another key is never mixed
    before = kept.read_bytes()
    for place in (len(before) // 2, len(before) - 1, 20):
        kept.write_bytes(before[:place] + bytes([before[place] ^ 1]) + before[place + 1 :])
        assert frechet_distance(run().target.moments, first.target.moments) == 0  # type: ignore[union-attr]
        assert kept.read_bytes() == before
    kept.write_bytes(before[: len(before) // 3])
    run()
    assert kept.read_bytes() == before


def test_published_statistics_take_the_place_of_the_data(tmp_path: Path, cache: Path) -> None:
    moments = real().moments
    write_statistics(tmp_path / "stats.npz", moments)
    values = []
    for reference in (None, str(tmp_path / "stats.npz")):
        fid = FID(every=0, num_samples=300, reference=reference)
        _, recorder = trained(fid, steps=1)
        values.append(recorder.distances[1])
    assert isinstance(fid.target, Gaussian)
    assert values[1] == pytest.approx(values[0], rel=1e-6)  # the network rounds by the size of a batch
    assert recorder.of("kid/digits") == recorder.of("fd/digits/floor") == {}

    numpy.savez(tmp_path / "other.npz", mu=numpy.zeros(3), sigma=numpy.eye(3))
    numpy.savez(tmp_path / "half.npz", mu=numpy.zeros(64))
    numpy.savez(tmp_path / "pickled.npz", mu=numpy.array([{}], dtype=object), sigma=numpy.eye(3))
    for name, *facts in (("other", 3, 64), ("half", "sigma"), ("pickled", "mu"), ("absent", "absent.npz")):
        with refused(UserError, *facts):
            trained(FID(every=0, num_samples=40, reference=str(tmp_path / f"{name}.npz")), steps=1)


RANKS = """
import logging
from hookdiff_fid import FID
from tests.on_ranks import measured

lines = []
logging.getLogger("hookdiff").setLevel(logging.INFO)
logging.getLogger("hookdiff").addFilter(lambda record: lines.append(record.getMessage()) or True)
fid = FID(every=0, num_samples=301, time_budget="1 h")
result = measured(fid), fid.num, fid.target.num, len(lines)
"""


def test_ranks_share_the_images_and_agree_on_all_values(tmp_path: Path) -> None:
    ranks = two_ranks(RANKS, tmp_path)
    first, other = (result[0] for result in ranks)
    assert first.keys() > {"fd/digits", "fd/digits/floor", "kid/digits", "recall/digits", "is/digits"}
    assert other == {}  # the first rank has the log
    assert [result[1:3] for result in ranks] == [(301, 1797)] * 2
    assert [result[3] for result in ranks] == [2, 0]  # lines of the log: the main rank has them
    single: dict[str, Any] = {}
    exec(RANKS, single)
    assert first == pytest.approx(single["result"][0], rel=1e-4, abs=1e-6)


BAD = """
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from hookdiff import Loop, LoopConfig
from hookdiff.data import digits
from hookdiff.authors.generation import Generated

class Bad:
    def sample(self, net, objective, shape, generators, device, /):
        made = net(torch.stack([torch.randn(*shape, generator=generator) for generator in generators]))
        return made * (torch.nan if rank else 1)

model = torch.nn.Conv2d(1, 1, 1)
fully_shard(model, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=True)
loop = Loop(model, torch.optim.SGD(model.parameters(), 1e-9), lambda net, batch: net(batch.inputs).square().mean(),
            digits(), LoopConfig(steps=1, batch_size=8), sampler=Bad())
try:
    with loop:
        Generated(loop, None, 0, None).features(600, "fid: images")
except ValueError as error:
    result = [str(error)]
"""


@pytest.mark.wide
def test_a_bad_image_of_one_rank_ends_all_that_share_a_model(tmp_path: Path) -> None:
    for (error,) in two_ranks(BAD, tmp_path):
        check_facts(error, "fid: images", "not finite")


# With other plugins, from the command line


@pytest.mark.slow
@pytest.mark.skipif(not FASHION.is_dir(), reason="Debian's package dataset-fashion-mnist is not installed")
def test_the_distance_falls_while_the_example_trains(tmp_path: Path, succeed: Callable[..., str]) -> None:
    raw = tmp_path / "data" / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for path in FASHION.glob("*.gz"):
        (raw / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    settings = {"data.root": tmp_path / "data", "run.steps": 150, "sampling.steps": 20}
    settings |= {"plugins.fid.every": 50, "plugins.fid.num_samples": 200}
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    config = Path(__file__).parents[2] / "examples" / "fashion-unet.toml"
    succeed("run", config, "--plugins", "ema,fid", "--out", tmp_path / "run", *words)
    lines = [line for line in records(tmp_path / "run") if "fd/fashion-mnist" in line]
    first, second, third = (line["fd/fashion-mnist"] for line in lines)
    assert first > second > third > lines[0]["fd/fashion-mnist/floor"]
    assert third < 0.7 * first
