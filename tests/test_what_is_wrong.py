"""docs/how-to/what-is-wrong.md: each symptom is provoked, and the lines that the page quotes are printed."""

import math
import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import define
from PIL import Image
from torch import Tensor, nn

from hookdiff import Batch, InMemory, Loop, hookimpl, load_config
from hookdiff.cli.command_line import group
from hookdiff.data import digits
from hookdiff.diffusion import Solver
from tests.conftest import pixels, warnings, write_small

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "how-to" / "what-is-wrong.md").read_text("utf-8")
DIGITS = digits()
IMAGES, LABELS = DIGITS.images, DIGITS.labels


# Data with a fault


def with_nan() -> Tensor:
    images = IMAGES[:64].float() / 127.5 - 1
    images[40, 0, 3, 3] = math.nan
    return images


def without_threes() -> InMemory:
    return InMemory(IMAGES[LABELS != 3], LABELS[LABELS != 3])


def mostly_ones() -> InMemory:
    kept = (LABELS == 1) | (torch.arange(len(LABELS)) % 30 == 0)
    return InMemory(IMAGES[kept], LABELS[kept])


def dark() -> Tensor:
    return IMAGES[:64].float() / 255 / 16 * 2 - 1


def few() -> InMemory:
    return InMemory(IMAGES[:48])


class Slow:
    """Takes two milliseconds for an image."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(2e-3)
        return IMAGES[index].float() / 127.5 - 1


class Odd:
    """Spoils one batch."""

    @hookimpl
    def before_step(self, loop: Loop, batch: Batch) -> None:
        if loop.progress.step == 30:
            batch.inputs.mul_(20)


class Tide:
    """Makes batches brighter and darker in turn."""

    @hookimpl
    def before_step(self, loop: Loop, batch: Batch) -> None:
        batch.inputs.mul_(1 + 0.8 * math.sin(loop.progress.step * math.tau / 5))


# Networks with a fault


class Net(nn.Module):
    """A small network that sees all pixels, and not the time."""

    def __init__(self, *middle: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), *middle, nn.Linear(128, 64))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.layers(x.flatten(1)).view_as(x)


class Calls(nn.Module):
    """Calls a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Full(Net):
    """Needs more memory in training than there is."""

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        if self.training:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(x, time)


class TooSteep(torch.autograd.Function):
    """The identity, with a derivative that float16 cannot hold."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return (gradient * 1e10).to(gradient.dtype) / 1e10


def net() -> nn.Module:
    return Net(nn.SiLU())


def deep() -> nn.Module:
    return Net(*(part for _ in range(14) for part in (nn.Linear(128, 128), nn.Sigmoid())))


def dead() -> nn.Module:
    layer = nn.Linear(128, 128)
    nn.init.constant_(layer.bias, -100)
    return Net(layer, nn.ReLU())


def rooted() -> nn.Module:
    return Net(Calls(lambda x: x + 0 * (x - x).sqrt()))


def steep() -> nn.Module:
    return Net(Calls(TooSteep.apply))


# Samples with a fault


@define(frozen=True)
class Paints(Solver):
    """Makes pictures of its own from the noise, without the network."""

    what: str

    def step(self, chain: Any, x: Tensor, start: Any, end: Any) -> Tensor:
        if self.what == "noise":
            return x
        pictures = IMAGES.float() / 127.5 - 1
        chosen = (x.sum((1, 2, 3)).sin() * 1e4).long() % len(pictures)
        if self.what == "zeros":
            return pictures[LABELS == 0][chosen % 100]
        if self.what == "blurred":
            means = torch.stack([pictures[label == LABELS].mean(0) for label in range(10)])
            return (pictures[chosen] + 2 * means[LABELS[chosen]]) / 3
        return pictures[chosen]


HERE = f"tests.{Path(__file__).stem}"
LOSS = "run --set plugins.loss.window=20 --set plugins.loss.plateau=200 --plugins loss"
GRADIENTS = "run --set plugins.gradients.window=20 --set run.log_every=1 --plugins gradients"
SAMPLES = (
    "run --set run.steps=1 --set plugins.diversity.num_samples=300 --set sampling.steps=1 --plugins diversity "
    f"--set sampling.sampler.use={HERE}:Paints --set sampling.sampler.what="
)
DOCTOR = "doctor --steps 8"
CLASSES = f"{DOCTOR} --set model.use=unet --set model.num_classes=10 --set model.channels=8 --set model.head_dim=8"
WARMS_UP = "--set optimizer.use={} --set optimizer.lr={} --set plugins.lr.warmup={}"

# The commands that provoke each symptom of the page, on digits with the network `net`
CASES = {
    "The loss spikes": [f"{LOSS},{HERE}:Odd"],
    "The loss is NaN": [f"run --plugins nan --set data.source={HERE}:with_nan"],
    "The loss falls, but stays high": [f"{LOSS} --set optimizer.lr=1e-5 --set plugins.loss.patience=20"],
    "The loss is flat early": [f"{LOSS} --set run.steps=200 --set run.batch_size=128 --set optimizer.lr=1e-9"],
    "The loss oscillates": [f"{LOSS},{HERE}:Tide"],
    "The loss rises slowly": [f"{LOSS},lr {WARMS_UP.format('adamw', 0.1, 200)} --set run.steps=180"],
    "The loss does not fall at all": [f"{DOCTOR} --set optimizer.lr=1e-9"],
    "Gradients explode": [f"{GRADIENTS},lr {WARMS_UP.format('sgd', 20, 60)}"],
    "Gradients vanish": [f"{GRADIENTS} --set model.use={HERE}:deep"],
    "Many gradients are zero": [f"{GRADIENTS} --set model.use={HERE}:dead"],
    "Gradients are NaN": [f"run --plugins nan --set model.use={HERE}:rooted"],
    "The average is far from the weights": [
        "run --plugins ema --set plugins.ema.decay=0.9999 --set plugins.ema.warmup=none --set optimizer.lr=0.02"
    ],
    "Samples are blurry": [f"{SAMPLES}blurred"],
    "Samples are all black, or of one colour": [f"{DOCTOR} --set data.source={HERE}:dark"],
    "Samples are noisy": [f"{SAMPLES}noise"],
    "All samples look alike": [f"{SAMPLES}zeros"],
    "Classes are missing": [f"{CLASSES} --set data.source={HERE}:without_threes"],
    "Some classes come too often": [f"{CLASSES} --set data.source={HERE}:mostly_ones"],
    "Only the average makes good samples": [
        "run --out runs/mine --plugins ema,checkpoint --set optimizer.lr=0.03",
        "doctor runs/mine --trust --steps 2",
    ],
    "Memory runs out": [
        "run --plugins memory --set plugins.memory.warn_above=1e-6",
        f"run --set run.micro_batch=auto --set model.use={HERE}:Full --out runs/full",
    ],
    "Training is slow": [f"{DOCTOR} --set data.store=none --set data.source={HERE}:Slow"],
    "fp16 becomes unstable after a long time": [
        f"run --plugins amp,nan --set model.use={HERE}:steep --set plugins.amp.precision=fp16 "
        "--set plugins.amp.init_scale=4"
    ],
    "The held-out loss rises": [
        f"{LOSS} --set data.source={HERE}:few --set data.held_out=32 --set plugins.loss.every=20 --set run.steps=300 "
        "--set run.batch_size=8 --set optimizer.lr=4e-3"
    ],
    "Samples are copies of training images": [
        f"{SAMPLES}copies",
        f"{DOCTOR} --set data.source={HERE}:few --set run.batch_size=8 --set run.steps=100_000",
    ],
}


def quoted(text: str) -> list[str]:
    """Return the lines of the blocks in a text of the page that are in no language."""
    return "".join(re.findall(r"^```\n(.*?)^```$", text, re.M | re.S)).splitlines()


SYMPTOMS = dict(re.findall(r"^### (.+?)\n(.+?)(?=^##|\Z)", PAGE, re.M | re.S))
REPORTED = [symptom for symptom, text in SYMPTOMS.items() if quoted(text)]
NUMBER = r"-?\d[\d.,]*(?:e[+-]?\d+)?(?: [KMG]iB)?"


def pattern(line: str) -> str:
    """Return a pattern for a line, with any numbers; three dots stand for any words."""
    words, *rest = re.split(rf"({NUMBER}|\.\.\.)", line)
    return re.escape(words) + "".join(
        (".+" if number == "..." else NUMBER) + re.escape(words)
        for number, words in zip(rest[::2], rest[1::2], strict=True)
    )


def test_each_symptom_has_a_cause_a_remedy_and_what_reports_it_or_where_to_look() -> None:
    for symptom, text in SYMPTOMS.items():
        assert re.search(r"^\* \*\*Cause:\*\* .+^\* \*\*Remedy:\*\* ", text, re.M | re.S), symptom
        assert quoted(text) or "Nothing reports" in text, symptom
    assert sorted(REPORTED) == sorted(CASES)


@pytest.mark.wide
@pytest.mark.parametrize("symptom", REPORTED)
def test_what_is_said_to_report_a_symptom_prints_the_lines(
    symptom: str, here: Path, hookdiff: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = {"steps": 60, "log_every": 10}
    config, printed = write_small(here / "mine.toml", run=run, model={"use": f"{HERE}:net"}, diffusion={}), ""
    for line in CASES[symptom]:
        command, *words = shlex.split(line)
        _, out, err = hookdiff(command, *([] if words[0] == "runs/mine" else [config]), *words)
        printed = "\n".join([printed, out, err])
    printed = "\n".join([*caplog.messages, printed])
    for line in quoted(SYMPTOMS[symptom]):
        assert re.search(pattern(line), printed), f"{line}\nis not in\n{printed}"
    before = SYMPTOMS[symptom].rpartition("\n```")[0]
    reporters = ",".join(re.findall(r"`(?:--plugins|hookdiff) ([\w,]+)", before)).split(",")
    assert set(reporters) <= set(re.split("[ ,]", " ".join(CASES[symptom])))


def test_each_remedy_is_an_option_or_a_command_that_exists() -> None:
    code = re.findall(r"`((?:--|hookdiff )[^`]+)`", PAGE)
    for words in map(shlex.split, code):
        if words[0] == "hookdiff":
            known = [option for each in group.get_command(None, words[1]).params for option in each.opts]
            assert {word for word in words if word.startswith("--")} <= set(known), words
        else:
            option, value = words
            given = {"--plugins": {"plugins": value.split(",")}, "--set": {"settings": [value]}}[option]
            load_config(ROOT / "examples" / "basic.toml", **given)


@pytest.mark.wide
def test_the_config_for_small_data_trains(here: Path, succeed: Any, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(40):
        path = here / "drawings" / ("ant", "bee")[number % 4 == 3] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(number, 40)).save(path)
    (block,) = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.M | re.S)
    (here / "mine.toml").write_text(block)
    short = "--set run.epochs=5 --set run.device=cpu --set sampling.steps=1 --set plugins.samples.num=4"
    succeed("run", "mine.toml", *short.split())
    assert warnings(caplog) == []  # such as that nothing has logged the value of stop_early
    assert len([*(here / "runs" / "mine" / "checkpoints").iterdir()]) == 1
