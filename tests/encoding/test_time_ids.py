"""Test sizes and crops as a condition: read off the pixels, given to the network, kept without text, drawn."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from attrs import define
from PIL import Image
from torch import Tensor

from hookdiff import ConfigError, InMemory, load_config, load_run
from hookdiff.experiment.build import build_feed, build_loop
from hookdiff_samples.between import between_noises
from tests.conftest import as_list, check_refused, refused, warnings, wide, write_small
from tests.encoding.test_texts import Bytes

LATENTS = '[data.encode.image]\nuse = "tests.encoding.test_latent_reader:Pooled"\n\n[data.encode.text]'
SIZES = [(12, 20), (30, 12), (12, 12), (24, 46)]  # height and width; the last is twice as large as `resize`
CALLS: list[tuple[Tensor, Tensor]] = []  # texts and time ids


@define(frozen=True)
class Sized(Bytes):
    """An encoder whose network gets the sizes of pictures."""

    @property
    def time_ids(self) -> bool:
        return True


class Net(torch.nn.Module):
    """Notes the texts and the time ids of its calls."""

    def __init__(self, in_channels: int = 3) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(in_channels, in_channels, 1)

    def forward(self, x: Tensor, timesteps: Tensor, text: Tensor, added: dict[str, Tensor]) -> Tensor:
        CALLS.append((text, added["ids"]))
        out: Tensor = self.conv(x)
        return out


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Write 16 pictures, with the column as red and the row as green, and a config that trains on them."""
    (tmp_path / "pictures").mkdir()
    for k in range(16):
        height, width = SIZES[k % 4]
        rows, columns = numpy.mgrid[:height, :width].astype(numpy.uint8)
        Image.fromarray(numpy.stack([columns, rows, rows * 0], 2)).save(tmp_path / "pictures" / f"{k:02}.png")
        (tmp_path / "pictures" / f"{k:02}.txt").write_text("red")
    CALLS.clear()
    data = {"source": "folder", "path": f"{tmp_path}/pictures", "captions": "txt", "labels": "none", "image_size": 8}
    data |= {"cache_dir": f"{tmp_path}/cache", "resize": 12, "flip": 0.5}
    data["encode"] = {"text": {"use": f"{__name__}:Sized"}}
    return write_small(
        tmp_path / "sized.toml",
        run={"steps": 2, "batch_size": 8, "plugins": ["checkpoint"]},
        data=data,
        model={"use": f"{__name__}:Net"},
        diffusion={"prediction": "sample", "conditions": {"text": "text", "added.ids": "text_time_ids"}},
        sampling={"steps": 1, "guidance": {"scale": 2.0}},
    )


def with_latents(path: Path) -> Path:
    path.write_text(path.read_text().replace("[data.encode.text]", LATENTS).replace("resize = 12\n", ""))
    return path


@pytest.mark.parametrize("store", ["memory", *wide(*("disk", "none"))])
def test_the_numbers_are_those_of_the_pixels(path: Path, store: str) -> None:
    feed = build_feed(load_config(path, settings=[f"data.store={store}"])).bind(8, 3)
    batches = [batch for epoch in range(20) for batch in feed.batches(epoch)]
    crops, flipped = set[tuple[float, ...]](), set[bool]()
    for batch in (*batches, next(feed.unaugmented(torch.arange(16)))):
        assert batch.indices is not None
        places = ((batch.inputs + 1) * 127.5).round()
        for row, index in enumerate(batch.indices.tolist()):
            height, width = SIZES[index % 4]
            factor = min(height, width) / 12
            (left, right), top = places[row, 0, 0, [0, -1]].tolist(), float(places[row, 1, 0, 0])
            expected = [height, width, top // factor, min(left, right) // factor, 8, 8]
            assert batch.conditions["text_time_ids"][row].tolist() == expected
            crops.add((index % 4, *expected[2:4]))
            flipped.add(left > right)
    assert flipped == {False, True}
    assert len(crops) > 50  # of 100
    centres = [[12, 20, 2, 6, 8, 8], [30, 12, 11, 2, 8, 8], [12, 12, 2, 2, 8, 8], [24, 46, 2, 8, 8, 8]]
    assert as_list(next(feed.unaugmented(torch.arange(4))).conditions["text_time_ids"]) == centres
    assert batch.conditions["text_time_ids"].dtype == torch.float32


def test_pictures_that_are_encoded_have_their_own_sizes(path: Path) -> None:
    centres = [[12, 20, 0, 2, 8, 8], [30, 12, 6, 0, 8, 8], [12, 12, 0, 0, 8, 8], [24, 46, 0, 4, 8, 8]]
    config = load_config(with_latents(path))
    for _ in range(2):  # the second time the latents are in a file
        feed = build_feed(config).bind(8, 3)
        assert feed.shape == (3, 4, 4)
        assert as_list(next(feed.unaugmented(torch.arange(4))).conditions["text_time_ids"]) == centres


def in_memory() -> InMemory:
    return InMemory(torch.zeros(16, 3, 20, 12, dtype=torch.uint8), texts={"text": [["red"]] * 16})


def test_pictures_in_memory_have_the_size_that_they_were_given(path: Path) -> None:
    text = path.read_text().replace('"folder"', '"tests.encoding.test_time_ids:in_memory"')
    path.write_text("".join(line for line in text.splitlines(True) if not line.startswith(("path =", "captions ="))))
    path.write_text(path.read_text().replace('labels = "none"\n', ""))
    numbers = next(build_feed(load_config(path)).bind(8, 3).unaugmented(torch.arange(1))).conditions["text_time_ids"]
    assert as_list(numbers) == [[20, 12, 6, 2, 8, 8]]


@pytest.mark.parametrize("latents", [False, True])
def test_the_unconditional_call_has_the_same_numbers(path: Path, tmp_path: Path, latents: bool) -> None:
    config = load_config(with_latents(path) if latents else path, settings=["diffusion.label_dropout=0.5"])
    with build_loop(config, tmp_path / "run") as loop:
        nothing = loop.feed.nothing["text"]
        assert nothing is not None
        CALLS.clear()
        loop.run()
    trained, numbers = (torch.cat(column) for column in zip(*CALLS, strict=True))
    dropped = (trained == nothing).flatten(1).all(1)
    assert 0 < dropped.sum() < len(dropped)
    assert numbers[:, :2].unique().tolist() == [12, 20, 24, 30, 46]

    def given(**asked: Any) -> list[Any]:
        """Return the numbers that the network gets for two pictures, with their text as well as without it."""
        CALLS.clear()
        run.sample(2, **asked)
        found = []
        for texts, numbers in CALLS:
            (prompted, other), (first, second) = texts.chunk(2), numbers.chunk(2)
            assert not torch.equal(prompted, other)
            assert torch.equal(first, second)
            found += as_list(first)
        return found

    with load_run(tmp_path / "run", trust=True) as run:  # without the data
        assert run.loop.progress.step == 2  # built now, with a trial of the network
        assert given(prompts=["red"]) == [[8, 8, 0, 0, 8, 8]] * 2
        assert given(prompts=["red"], size="12x16") == [[16, 12, 0, 0, 16, 12]] * 2
        wanted = torch.tensor([[64.0, 64, 0, 0, 8, 8]] * 2)
        assert given(prompts=["red"], conditions={"text_time_ids": wanted}) == as_list(wanted)
        assert given() == given(negative="blue") == [[8, 8, 0, 0, 8, 8]] * 2


def test_a_dropout_of_the_numbers_is_refused(path: Path, hookdiff: Callable[..., Any]) -> None:
    dropout = "diffusion.label_dropout={text=0.1, text_time_ids=0.1}"
    check_refused(
        hookdiff("run", path, "--set", dropout, "--out", path.parent / "run"),
        "diffusion",
        "'label_dropout'",
        "'text_time_ids'",
    )
    dropout = dropout.replace("text_time_ids", "all")
    build_loop(load_config(path, settings=[dropout]), path.parent / "run").run()


def vectors() -> InMemory:
    return InMemory(torch.zeros(16, 3), texts={"text": [["red"]] * 16})


def test_samples_without_a_size_are_refused(
    path: Path, succeed: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    before, _, after = with_latents(path).read_text().partition("[data]")
    made = path.parent / "made.toml"
    settings = ["--set", "data.encode.image.version=2", "--set", "data.flip=false"]
    printed = succeed("data", path, "--to-shards", path.parent / "shards", *settings)
    made.write_text(before + printed[printed.index("[data]") :] + after[after.index("[model]") :])
    with refused(ConfigError, "'text_time_ids'", "'text'"):
        build_loop(load_config(made), path.parent / "run")
    assert any("text_time_ids" in warning for warning in warnings(caplog))
    own = made.read_text().replace('"image.std" =', 'text_time_ids = "image.std.npy"\n"image.std" =')
    made.write_text(own)  # a condition of the source may have them
    assert build_feed(load_config(made)).blank(1).conditions["text_time_ids"].shape[-2:] == (4, 4)

    text = made.read_text().partition("[data]")
    made.write_text(
        f"{text[0]}[data]\nsource = 'tests.encoding.test_time_ids:vectors'\n\n"
        "[data.encode.text]\nuse = 'tests.encoding.test_time_ids:Sized'\n\n" + after[after.index("[model]") :]
    )
    with refused(ConfigError, "encode.text", "sizes"):
        build_feed(load_config(made))


class Plain(torch.nn.Module):
    """Notes the time ids of its calls; it reads no text."""

    def __init__(self, in_channels: int = 3) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(in_channels, in_channels, 1)

    def forward(self, x: Tensor, timesteps: Tensor, ids: Tensor) -> Tensor:
        CALLS.append((x, ids))
        out: Tensor = self.conv(x)
        return out


@pytest.mark.parametrize("latents", [False, True])
def test_without_texts_and_in_several_sizes_each_picture_has_its_own_numbers(
    path: Path, tmp_path: Path, latents: bool
) -> None:
    encode = LATENTS.partition("[data.encode.text]")[0] if latents else ""
    text = path.read_text()
    for old, new in (
        ("resize = 12\n", ""),
        (f'[data.encode.text]\nuse = "{__name__}:Sized"', encode),
        ('captions = "txt"\n', ""),
        ("image_size = 8", 'image_size = 8\nbuckets = ["8x8", "12x6"]\ntime_ids = true'),
        (f"{__name__}:Net", f"{__name__}:Plain"),
        ('text = "text"\n', ""),
        ('"added.ids" = "text_time_ids"', 'ids = "time_ids"'),
    ):
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    # Height, width, top, left, of 20 x 12 to 12 x 6: the width decides, so 7.2 rows become 6.
    known = {0: [12, 20, 0, 0, 6, 12], 1: [30, 12, 6, 0, 8, 8], 2: [12, 12, 0, 0, 8, 8], 3: [24, 46, 0, 0, 6, 12]}
    with build_loop(load_config(path, settings=["data.labels='none'"]), tmp_path / "run") as loop:
        for epoch in range(2):
            for batch in loop.feed.batches(epoch):
                assert batch.indices is not None
                ids = as_list(batch.conditions["time_ids"])
                assert ids == [known[index % 4] for index in batch.indices.tolist()]
        loop.run()
    (tmp_path / "pictures").rename(tmp_path / "gone")
    with load_run(tmp_path / "run", trust=True) as run:
        CALLS.clear()
        [*between_noises(run, None, {"size": "8x8"}, 0, 1, 2)]
        assert as_list(CALLS[-1][1].unique(dim=0)) == [[8, 8, 0, 0, 8, 8]]
        CALLS.clear()
        run.sample(2)
        _, ids = CALLS[-1]
        assert {tuple(row) for row in as_list(ids)} <= {(8, 8, 0, 0, 8, 8), (6, 12, 0, 0, 6, 12)}
