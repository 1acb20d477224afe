"""The digits features tell bad digits from good ones, and the plugin measures without an effect on the training."""

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Generator, Tensor, nn

from hookdiff import Batch, InMemory, Loop, LoopConfig, SampleRequest, UserError
from hookdiff.data import digits
from hookdiff.data.memory import to_unit_range
from hookdiff_fid import FID, Moments, frechet_distance, train_digits
from hookdiff_fid.digits import WEIGHTS, DigitsNet, load_digits_net
from tests.conftest import Logged, check_facts, refused

# The features of the digits


@pytest.fixture(scope="module")
def real() -> tuple[Tensor, Tensor]:
    data = digits()
    images, labels, _ = data.rows(torch.arange(len(data)))
    assert labels is not None
    return to_unit_range(images), labels


@pytest.fixture(scope="module")
def net() -> DigitsNet:
    return load_digits_net()


@pytest.fixture(scope="module")
def moments(net: DigitsNet) -> Callable[[Tensor], Moments]:
    return lambda images: Moments.from_features(net(images.clamp(-1, 1)))


@pytest.fixture(scope="module")
def away(moments: Callable[[Tensor], Moments], real: tuple[Tensor, Tensor]) -> Callable[[Tensor], float]:
    """Return the function from images to their distance from the real digits."""
    reference = moments(real[0])
    return lambda images: frechet_distance(moments(images), reference)


def shuffled(num: int, seed: int = 0) -> Tensor:
    return torch.randperm(num, generator=Generator().manual_seed(seed))


def blurred(images: Tensor, sigma: float) -> Tensor:
    kernel = torch.exp(-torch.arange(-3.0, 4.0).square() / (2 * sigma**2))
    kernel = kernel / kernel.sum()
    padded = F.pad(images, (3, 3, 3, 3), value=-1.0)
    return F.conv2d(F.conv2d(padded, kernel.view(1, 1, 1, 7)), kernel.view(1, 1, 7, 1))


def made() -> dict[str, Any]:
    with safe_open(WEIGHTS, framework="pt") as file:
        described: dict[str, Any] = json.loads(file.metadata()["made"])
    return described


def test_the_shipped_weights_know_digits_they_never_saw(net: DigitsNet, real: tuple[Tensor, Tensor]) -> None:
    options = train_digits.TrainingOptions()
    assert made()["recipe"] == attrs.asdict(options)  # else: run train_digits again
    held_out = shuffled(len(real[0]), options.seed)[: options.held_out]
    accuracy = float((net.classify(real[0][held_out]).argmax(1) == real[1][held_out]).float().mean())
    assert accuracy >= 0.97
    assert accuracy == pytest.approx(made()["accuracy"], abs=0.004)  # one image, should rounding decide it
    assert WEIGHTS.stat().st_size < 200_000


def test_features_are_standardised(net: DigitsNet, real: tuple[Tensor, Tensor]) -> None:
    features = net(real[0])
    assert features.shape == (1797, 64)
    assert features.dtype == torch.float32
    assert float(features.mean(0).abs().max()) < 0.1
    assert float((features.var(0) - 1).abs().max()) < 0.1


def test_the_script_makes_such_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    train_digits.main(["--out", str(tmp_path / "weights")])
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    accuracy = float(capsys.readouterr().out.rsplit(maxsplit=1)[1].rstrip("%")) / 100
    assert accuracy >= 0.97
    ours, shipped = load_file(tmp_path / "weights"), load_file(WEIGHTS)
    assert {name: tensor.shape for name, tensor in ours.items()} == {n: t.shape for n, t in shipped.items()}
    DigitsNet().load_state_dict(ours)


def test_training_is_repeatable() -> None:
    options = train_digits.TrainingOptions(epochs=1)
    first, second = (train_digits.train(options)[0].state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_real_digits_are_close_to_real_digits(
    moments: Callable[[Tensor], Moments], away: Callable[[Tensor], float], real: tuple[Tensor, Tensor]
) -> None:
    order = shuffled(len(real[0]), seed=1)
    halves = frechet_distance(moments(real[0][order[:898]]), moments(real[0][order[898:]]))
    assert halves < 1.5
    assert away(real[0][order[:1000]]) < 0.5
    assert away(real[0][order]) < 1e-6


@pytest.mark.parametrize(
    ("worse", "amounts"),
    [
        (blurred, (0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5)),  # pixels
        (lambda x, std: x + std * torch.randn(x.shape, generator=Generator().manual_seed(3)), (0.1, 0.2, 0.3, 0.5, 1)),
        (lambda x, share: share * x[shuffled(len(x), 4)] + (1 - share) * x, (0.1, 0.2, 0.3, 0.5)),  # ghosts
        (lambda x, faded: (x + 1) * (1 - faded) - 1, (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)),
        (lambda x, share: torch.cat([x, torch.zeros(int(share * len(x)), 1, 8, 8)]), (0.01, 0.05, 0.2, 0.5)),
    ],
    ids=["blur", "noise", "ghosts", "contrast", "grey images"],
)
def test_the_distance_grows_as_images_get_worse(
    away: Callable[[Tensor], float],
    real: tuple[Tensor, Tensor],
    worse: Callable[[Tensor, float], Tensor],
    amounts: Sequence[float],
) -> None:
    distances = [away(real[0]), *(away(worse(real[0], amount)) for amount in amounts)]
    assert distances == sorted(distances)
    assert distances[-1] > 10
    assert len(set(distances)) == len(distances)


def test_the_distance_grows_as_classes_are_dropped(
    away: Callable[[Tensor], float], real: tuple[Tensor, Tensor]
) -> None:
    images, labels = real
    for order in (range(10), range(9, -1, -1), [3, 1, 4, 5, 9, 2, 6, 8, 7, 0]):
        rank = torch.tensor([list(order).index(label) for label in range(10)])
        distances = [away(images[rank[labels] >= dropped]) for dropped in range(10)]
        assert distances == sorted(distances)
        assert distances[1] > 1


def test_noise_and_one_image_are_far_away(away: Callable[[Tensor], float], real: tuple[Tensor, Tensor]) -> None:
    assert away(torch.randn(1000, 1, 8, 8, generator=Generator().manual_seed(0))) > 40
    for image in (real[0][0], real[0].mean(0), torch.zeros(1, 8, 8)):
        assert away(image.expand(1000, 1, 8, 8)) > 60


def test_images_of_another_shape_are_refused(net: DigitsNet) -> None:
    with refused(ValueError, "n 1 8 8", (4, 3, 8, 8)):
        net(torch.zeros(4, 3, 8, 8))


def test_loading_the_net_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    load_digits_net()
    assert torch.equal(torch.get_rng_state(), before)


# The plugin


class Painter:
    """Makes images from the noise of the net and the generators, or of the value `fill` if it is given."""

    def __init__(self, fill: float | None = None) -> None:
        self.fill = fill

    def sample(
        self,
        net: nn.Module,
        objective: Any,
        shape: Sequence[int],
        generators: Sequence[Generator],
        device: torch.device,
        /,
    ) -> Tensor:
        noise = torch.stack([torch.randn(*shape, generator=generator) for generator in generators])
        images: Tensor = net(noise.to(device))
        return images if self.fill is None else torch.full_like(images, self.fill)


class Recorder(Logged):
    @property
    def distances(self) -> dict[int, float]:
        return self.of("fd/digits")


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.inside = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 64))

    def forward(self, images: Tensor) -> Tensor:
        inside: Tensor = self.inside(images)
        return inside.view_as(images)


def reconstruct(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch.inputs), batch.inputs)


def make_loop(
    *plugins: object, data: Any = None, sampler: Any = None, batch_size: int = 32, **config: Any
) -> tuple[Loop, Recorder]:
    model, recorder = Tiny(), Recorder()
    named = {"recorder": recorder, **{f"p{i}": plugin for i, plugin in enumerate(plugins)}}
    loop = Loop(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        reconstruct,
        digits() if data is None else data,
        LoopConfig(batch_size=batch_size, log_every=7, **config),
        named,
        sampler=sampler or Painter(),
    )
    return loop, recorder


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (10, [10, 20, 25]),
        (5, [5, 10, 15, 20, 25]),  # the last step is due, and measured once
        (0, [25]),
        ("1 h", [25]),
    ],
)
def test_logs_at_the_due_steps_and_once_at_the_end(every: int | str, expected: list[int]) -> None:
    loop, recorder = make_loop(FID(every=every, num_samples=40), steps=25)
    assert loop.run() == "done"
    assert list(recorder.distances) == expected
    assert all(value > 1 for value in recorder.distances.values())


def test_logs_at_the_end_of_epochs() -> None:
    loop, recorder = make_loop(FID(every="2 epochs", num_samples=40), batch_size=599, epochs=5)
    loop.run()
    assert list(recorder.distances) == [6, 12, 15]
    loop, recorder = make_loop(FID(every="2 epochs", num_samples=40), batch_size=599, epochs=4)
    loop.run()
    assert list(recorder.distances) == [6, 12]


def test_a_run_that_stops_early_is_not_measured() -> None:
    loop, recorder = make_loop(FID(num_samples=40), steps=25)
    with loop:
        for step in loop.steps():
            if step.step == 3:
                loop.stop("signal")
    assert recorder.distances == {}


def test_the_logged_distance_is_that_of_the_images() -> None:
    fid = FID(every=0, num_samples=300, seed=5)
    loop, recorder = make_loop(fid, steps=4)
    loop.run()
    images = loop.sample(SampleRequest(num=300, seed=5, stream="evaluate")).images.clamp(-1, 1)
    net, data = load_digits_net(), digits()
    theirs = Moments.from_features(net(to_unit_range(data.rows(torch.arange(len(data)))[0])))
    expected = frechet_distance(Moments.from_features(net(images)), theirs)
    assert recorder.distances == pytest.approx({4: expected}, rel=1e-4)
    assert fid.reference.num == 1797


def test_measuring_again_gives_the_same_number_for_any_batch_size() -> None:
    found = []
    for size in (256, 100, 1000):
        fid = FID(every=0, num_samples=300, batch_size=size)
        loop, _ = make_loop(fid, steps=3)
        loop.run()
        assert fid.measure(loop) == fid.measure(loop)
        found.append(fid.measure(loop))
    assert found == pytest.approx([found[0]] * 3, rel=1e-4)


def test_training_is_the_same_to_the_bit_with_and_without() -> None:
    def weights(*plugins: object) -> dict[str, Tensor]:
        loop, _ = make_loop(*plugins, steps=20)
        loop.run()
        assert loop.model.training
        return loop.model.state_dict()

    without, with_fid = weights(), weights(FID(every=3, num_samples=40))
    assert all(torch.equal(without[name], with_fid[name]) for name in without)


def test_the_default_generator_is_left_alone() -> None:
    fid = FID(num_samples=40)
    loop, recorder = make_loop(fid, steps=2)
    loop.progress.step = 2  # nothing left to train
    before = torch.get_rng_state()
    loop.run()
    assert list(recorder.distances) == [2]
    assert torch.equal(torch.get_rng_state(), before)


class Pairs:
    """A map-style data set of the digits."""

    def __init__(self, of: InMemory) -> None:
        self.of = of

    def __len__(self) -> int:
        return len(self.of)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        assert self.of.labels is not None
        return self.of.images[index], int(self.of.labels[index])


def test_the_whole_of_a_map_style_data_set_is_the_reference() -> None:
    references = []
    for data in (digits(), Pairs(digits())):
        fid = FID(every=0, num_samples=40)
        loop, _ = make_loop(fid, data=data, steps=1)  # drops the last 5 of 1797 in training
        loop.run()
        references.append(fid.reference)
    assert references[0].num == references[1].num == 1797
    assert frechet_distance(*references) < 1e-9


def test_other_data_is_refused_before_training() -> None:
    for shape, shown in (((1, 16, 16), "1 x 16 x 16"), ((3, 8, 8), "3 x 8 x 8")):
        loop, _ = make_loop(FID(), data=torch.zeros(64, *shape), steps=1)
        with refused(UserError, "1 x 8 x 8", shown):
            loop.run()


@pytest.mark.parametrize("fill", [float("nan"), float("inf")])
def test_images_that_are_not_finite_are_an_error(fill: float) -> None:
    loop, recorder = make_loop(FID(every=2, num_samples=40), sampler=Painter(fill), steps=4)
    with refused(ValueError, "40 of 40"):
        loop.run()
    assert recorder.distances == {}


def test_data_that_is_not_finite_is_an_error() -> None:
    loop, _ = make_loop(FID(), data=torch.full((64, 1, 8, 8), torch.nan), steps=1)
    with refused(ValueError, "data", "64 of 64"):
        loop.run()


def test_images_are_clipped_as_when_saved() -> None:
    found = []
    for fill in (1.0, 50.0):
        loop, recorder = make_loop(FID(every=0, num_samples=4), sampler=Painter(fill), steps=1)
        loop.run()
        found.append(recorder.distances[1])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("every", "facts"), [(500, ("500", "steps")), ("2 epochs", ("2 epochs",)), ("15 min", ("900 s",)), (0, ())]
)
def test_the_cost_is_logged_first(every: int | str, facts: tuple[str], caplog: pytest.LogCaptureFixture) -> None:
    loop, _ = make_loop(FID(every=every, num_samples=40), steps=1)
    with caplog.at_level(logging.INFO, logger="hookdiff"):
        loop.run()
    check_facts(caplog.messages[0], 40, *facts)


def test_golden_line_of_a_distance(caplog: pytest.LogCaptureFixture) -> None:
    loop, recorder = make_loop(FID(num_samples=40), steps=3)
    with caplog.at_level(logging.INFO, logger="hookdiff"):
        loop.run()
    value = f"{recorder.distances[3]:.4g}"
    assert caplog.messages[1].startswith(f"fd/digits {value} at step 3: 40 images of model against 1797 of the data, ")


def test_only_the_main_rank_logs(second_rank: None, caplog: pytest.LogCaptureFixture) -> None:
    loop, recorder = make_loop(FID(num_samples=40), steps=3)
    with caplog.at_level(logging.INFO, logger="hookdiff"):
        loop.run()
    assert caplog.messages == []
    assert list(recorder.distances) == [3]  # sinks decide for themselves


@pytest.mark.parametrize(
    ("key", "value"),
    [("every", "often"), ("num_samples", 1), ("features", "inception"), ("seed", -1), ("batch_size", 0)],
)
def test_a_bad_option_is_refused_by_name(key: str, value: Any) -> None:
    with refused(ValueError, "often" if key == "every" else key):
        FID(**{key: value})


def test_weights_that_no_plugin_offers_are_an_error() -> None:
    loop, _ = make_loop(FID(num_samples=40, weights="ema"), steps=1)
    with refused(UserError, "ema"):
        loop.run()
