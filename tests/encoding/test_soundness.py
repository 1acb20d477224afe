"""Test that noise, constant channels and losses in float16 are reported before an encoder encodes all samples."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import define
from torch import Tensor
from torch.nn import functional

from hookdiff import InMemory, UserError, load_config
from hookdiff.encoding import Encoded, EncodedTexts, PictureEncoder, TextEncoder
from hookdiff.experiment.build import build_feed, build_loop
from hookdiff.testing import on_ranks
from tests.conftest import check_facts, refused, warnings, wide, write_small

NUM = 100
CALLS: list[int] = []  # pictures or texts


def pictures() -> InMemory:
    return InMemory(torch.rand(NUM, 3, 16, 16, generator=torch.Generator().manual_seed(1)) * 2 - 1)


def one_picture() -> InMemory:
    return InMemory(pictures().images[:1].expand(8, -1, -1, -1).clone())


def latents(scale: float = 1.0, offset: float = 0.0, constant: bool = False) -> InMemory:
    """Means that another program has made, in float32."""
    means = functional.avg_pool2d(pictures().images, 2) * scale + offset
    means[:, 1] = offset if constant else means[:, 1]
    return InMemory(means)


@define(frozen=True)
class Odd(PictureEncoder):
    """Makes what `how` says of means of 2 x 2 pixels."""

    how: str = "sound"
    path: str = "some/folder"

    @property
    def draws(self) -> bool:
        return not self.how.startswith("mean of ")

    def digest(self) -> str:
        return self.how.removeprefix("mean of ")

    def open(self, device: torch.device) -> Encoded:
        return _Odd(self.digest())


@define
class _Odd:
    how: str

    def encode(self, pictures: Tensor) -> tuple[Tensor, Tensor | None]:
        CALLS.append(len(pictures))
        x = functional.avg_pool2d(pictures, 2)
        ones, zeros = torch.ones_like(x), torch.zeros_like(x)
        places, second = torch.arange(8.0).expand_as(x), torch.tensor([0.0, 1, 0]).view(3, 1, 1)
        made: dict[str, tuple[Tensor, Tensor | None]] = {
            "sound": (x, 0.1 * ones),
            "bfloat16": (x.bfloat16(), None),
            "vector": (x.mean((2, 3)), None),
            "no picture": (zeros, ones),
            "no picture but places": (places, ones),
            "one channel": (x * (1 - second), ones),
            "weak": (0.01 * x, ones),
            "clamped": (zeros, torch.exp(torch.full_like(x, -15))),
            "clamped far off": (zeros + 2000, torch.exp(torch.full_like(x, -15))),
            "constant": (x * (1 - second) + 0.3 * second, None),
            "rounded": (x * (1 - second) + (x * 1e-4 + 900) * second, None),
            "small": (1e-7 * x, None),
            "far": (2048 + x, None),
            "lost posterior": (zeros, 1e-9 * ones),
            "nan": (x * torch.where(ones.amax((1, 2, 3), True) > 0, torch.nan, 1), None),
            "large": (x * 1e6, None),
        }
        return made[self.how]

    def decode(self, latents: Tensor) -> Tensor:
        if latents.dim() == 2:
            return latents[:, :, None, None].expand(-1, -1, 16, 16).float()
        return functional.interpolate(latents.float(), scale_factor=2)


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def config(how: str, source: str = "pictures", name: str = "image", store: str = "disk", **data: Any) -> Path:
        CALLS.clear()
        kind = OddTexts if name == "text" else Odd
        encoders = {name: {"use": f"{__name__}:{kind.__name__}", "how": how, "store": store}}
        data |= {"source": f"{__name__}:{source}", "cache_dir": str(tmp_path / "cache"), "encode": encoders}
        return write_small(tmp_path / "odd.toml", run={"batch_size": 4}, data=data)

    return config


# The facts in the warning, or in the error, about each encoder. The numbers come from plain torch, below.
WARNED = [
    ("sound", ()),
    ("bfloat16", ()),
    ("mean of sound", ()),
    ("no picture", ("channels 0, 1, 2", "noise", "0.00%")),
    ("no picture but places", ("channels 0, 1, 2", "noise", "0.00%")),
    ("one channel", ("channel 1 of", "noise", "0.00%")),
    ("weak", ("channels 0, 1, 2", "noise", "{over:.2%}")),
    ("clamped", ("noise", "3.06e-07")),
    ("small", ("float16", "{small:.1%}", "deviation of their channel")),
    ("far", ("float16", "{far:.1%}")),
]
REFUSED = [
    ("constant", ("channel 1 of", "constant")),
    ("rounded", ("channel 1 of", "constant", "float16")),
    ("mean of no picture", ("channels 0, 1, 2", "constant")),
    ("clamped far off", ("channels 0, 1, 2", "constant")),
    ("lost posterior", ("channels 0, 1, 2", "constant")),
    ("nan", ("sample 0", "not finite")),
    ("large", ("sample 0", "not finite")),
]


def numbers() -> dict[str, float]:
    """Return what plain torch says of 64 of the pictures, evenly spread."""
    x = functional.avg_pool2d(pictures().images[[k * NUM // 64 for k in range(64)]], 2).double()
    over = (0.01 * x).var(0, correction=0).mean((1, 2)).sqrt()

    def changed(values: Tensor) -> float:
        values = values.float()
        width = values.double().std((0, 2, 3), correction=0).view(-1, 1, 1)
        return float(((values.half().double() - values.double()).abs() > 0.1 * width).double().mean())

    return {"over": float(over.min()), "small": changed(1e-7 * x), "far": changed(2048 + x)}


@pytest.mark.parametrize("store", ["disk", *wide("none")])
@pytest.mark.parametrize(("how", "facts"), REFUSED)
def test_inputs_that_cannot_be_trained_on_are_refused_before_all_are_encoded(
    write: Any, tmp_path: Path, how: str, facts: tuple[str, ...], store: str
) -> None:
    path = write(how, store=store)
    where = ("some/folder",) if "constant" in facts else ()
    with refused(UserError, "data.encode.image", *where, *facts):
        build_feed(load_config(path))
    assert set(CALLS) <= {1, 16}
    assert not [*tmp_path.rglob("about.json")]


def test_a_constant_channel_is_refused_of_a_condition_only_if_it_becomes_the_inputs(write: Any) -> None:
    build_feed(load_config(write("mean of no picture", name="small")))
    with refused(UserError, "data.encode.image", "channels 0, 1, 2", "constant"):
        build_feed(load_config(write("mean of no picture")))  # of the same table
    assert CALLS == []


def test_a_channel_that_is_constant_on_the_training_samples_is_named(write: Any, tmp_path: Path) -> None:
    path = write("constant", "one_picture")  # 64 equal pictures do not show that a channel is constant
    with refused(UserError, "data.encode.image", "channel 1 of", "some/folder", "all 8 samples"):
        build_loop(load_config(path), tmp_path / "run")
    build_feed(load_config(write("vector", name="small")))


def test_ranks_look_once_and_warn_once(write: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write("weak")
    build_feed(load_config(path))
    (about,) = tmp_path.rglob("about.json")
    alone = about.read_bytes()
    about.unlink()
    caplog.clear()
    on_ranks(2, lambda rank: build_feed(load_config(path)))
    assert (about.read_bytes(), len([one for one in warnings(caplog) if "noise" in one])) == (alone, 1)


@pytest.mark.parametrize(
    ("settings", "facts", "is_refused"),
    [
        ([], (), False),
        (["data.scale=1e-7"], ("float16", "{small:.1%}"), False),
        (["data.offset=2048.0"], ("float16", "{far:.1%}"), False),
        (["data.constant=true"], ("channel 1 of", "constant"), True),
        (["data.scale=1e6"], ("sample 0", "not finite in float16"), True),
    ],
)
def test_latents_of_another_program_are_looked_at_too(
    write: Any, caplog: pytest.LogCaptureFixture, settings: list[str], facts: tuple[str, ...], is_refused: bool
) -> None:
    for store in ("memory", "none"):
        caplog.clear()
        config = load_config(write("sound", "latents", encoded=True, store=store), settings=settings)
        said = ["data.encode.image", *(one.format(**numbers()) for one in facts)]
        if is_refused:
            with refused(UserError, *said):
                build_feed(config)
            continue
        build_feed(config)
        assert len(warnings(caplog)) == bool(facts)
        if facts:
            check_facts(warnings(caplog)[0], *said)


TEXTS = [f"{word} {number}" for number in range(10) for word in ("a", "be", "see")]


def captioned() -> InMemory:
    return InMemory(torch.zeros(len(TEXTS), 3, 8, 8), texts={"text": [[text] for text in TEXTS]})


@define(frozen=True)
class OddTexts(TextEncoder):
    """Makes what `how` says of texts."""

    how: str = "sound"
    path: str = "some/folder"

    @property
    def limit(self) -> int:
        return 2 if self.how == "cut" else 99

    def digest(self) -> str:
        return self.how

    def open(self, device: torch.device) -> EncodedTexts:
        return _OddTexts(self.how)


@define
class _OddTexts:
    how: str

    def encode(self, texts: Sequence[str]) -> Mapping[str, Tensor]:
        CALLS.append(len(texts))
        tokens = torch.tensor([[*text.encode().ljust(6)[:6]] for text in texts]) / 128
        here = torch.tensor([[place < len(text) for place in range(6)] for text in texts])
        lengths = torch.tensor([[float(len(text))] * 6 for text in texts])
        made = {
            "sound": tokens,
            "unknown words": lengths,
            "cut": lengths * 0 + 1,
            "small": 1e-7 * tokens,
            "all the same": lengths * 0,
            "masked": torch.where(here, tokens, 2048 + tokens),
            "lost in the mask": torch.where(here, 512 + tokens, 1e4 * tokens),
        }[self.how]
        pooled = made if self.how in ("unknown words", "cut", "all the same") else tokens
        return {"": made[..., None], "_pooled": pooled} | ({"_mask": here} if "mask" in self.how else {})

    def lengths(self, texts: Sequence[str]) -> Sequence[int]:
        return [len(text) for text in texts]


OF_TEXTS = [
    ("sound", ()),
    ("masked", ()),
    ("cut", ()),  # said by another warning
    ("small", ("float16", "deviation of all")),
    ("lost in the mask", ("float16", "%")),
    ("unknown words", ("31 texts", "30 become the same", "'a 0'", "'a 1'")),
    ("all the same", ("31 texts", "31 become the same", "''", "'a 0'")),
]


@pytest.mark.parametrize(
    ("name", "source", "how", "facts"),
    [*(("image", "pictures", *row) for row in WARNED), *(("text", "captioned", *row) for row in OF_TEXTS)],
)
def test_an_encoder_that_is_not_sound_is_reported_in_each_start(
    write: Any, caplog: pytest.LogCaptureFixture, name: str, source: str, how: str, facts: tuple[str, ...]
) -> None:
    for store in ("disk", "disk", "none"):
        caplog.clear()
        build_feed(load_config(write(how, source, name, store)))
        found = [one for one in warnings(caplog) if "tokens" not in one]
        assert len(found) == bool(facts)
        if facts:
            check_facts(found[0], f"data.encode.{name}", "some/folder", *(one.format(**numbers()) for one in facts))
    build_feed(load_config(write(how, source, name)))
    assert CALLS == []  # the second start reads its warnings from the table
