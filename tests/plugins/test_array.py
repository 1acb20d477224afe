import os
import pickle
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from hookdiff import UserError
from hookdiff.images import Store, Transforms, feed_of
from hookdiff_array import Arrays
from tests.conftest import refused

RGB = numpy.random.default_rng(0).integers(0, 256, (6, 3, 5, 7), dtype=numpy.uint8)


def saved(path: Path, array: Any) -> str:
    numpy.save(path, array)
    return str(path)


@pytest.mark.parametrize(
    ("array", "layout", "expected"),
    [
        (RGB, "n c h w", RGB),
        (RGB, None, RGB),
        (RGB.transpose(0, 2, 3, 1), "n h w c", RGB),
        (RGB.transpose(0, 2, 3, 1), None, RGB),
        (RGB[:, 0], None, RGB[:, :1]),
        (RGB[:, 0], "n h w", RGB[:, :1]),
    ],
)
def test_every_layout_is_read(tmp_path: Path, array: Any, layout: Any, expected: Any) -> None:
    data = Arrays(saved(tmp_path / "a.npy", array), layout=layout)
    assert (len(data), data.labels, data.classes) == (6, None, None)
    assert data.shape == expected.shape[1:]
    for index in range(6):
        assert torch.equal(data.load(index), torch.from_numpy(expected[index]))
    (batch,) = feed_of(data).unaugmented(torch.arange(6))
    assert torch.equal(batch.inputs, torch.from_numpy(expected).float() / 127.5 - 1)


@pytest.mark.parametrize(
    ("dtype", "low", "high"), [("float32", -1, 1), ("float64", 0, 1), ("uint16", 0, 65535), ("bool", 0, 1)]
)
def test_any_value_range_is_scaled_to_bytes(tmp_path: Path, dtype: str, low: float, high: float) -> None:
    steps = numpy.array([0, 1]) if dtype == "bool" else numpy.linspace(0, 1, 8)
    array = (low + steps * (high - low)).astype(dtype).reshape(1, 1, -1)
    data = Arrays(saved(tmp_path / "a.npy", array), value_range=(low, high))
    expected = (steps * 255).round()
    assert numpy.abs(data.load(0).numpy().ravel() - expected).max() <= 1
    assert data.load(0).flatten()[[0, -1]].tolist() == [0, 255]


def test_arrays_of_an_npz_are_found_by_name(tmp_path: Path) -> None:
    labels = numpy.array([0, 2, 1, -1, 0, 2], dtype=numpy.int32)
    path = str(tmp_path / "a.npz")
    numpy.savez(path, images=RGB, labels=labels, other=RGB[:, 0])
    data = Arrays(path)
    assert data.labels is not None
    assert data.labels.tolist() == labels.tolist()
    assert Arrays(path, images="other").shape == (1, 5, 7)
    numpy.savez(path, x=RGB, y=labels)
    with refused(ValueError, path, "images", "x, y"):
        Arrays(path)
    with refused(ValueError, path, "'z'", "x, y"):
        Arrays(path, images="z")
    assert Arrays(path, images="x", labels="y").labels is not None
    numpy.savez(path, only=RGB)
    assert (len(Arrays(path)), Arrays(path).labels) == (6, None)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs the list of open files")
def test_an_npz_that_is_refused_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    numpy.savez(path, x=RGB, y=RGB)
    with refused(ValueError, "images", "x, y") as caught:
        Arrays(str(path))
    open_files = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert str(path) not in open_files
    assert caught.tb  # the traceback would keep an open file alive


def test_labels_are_read_from_their_own_file(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.npy", RGB)
    data = Arrays(path, labels=saved(tmp_path / "y.npy", numpy.arange(6)))
    assert data.labels is not None
    assert data.labels.tolist() == list(range(6))


@pytest.mark.parametrize(
    ("array", "options", "facts"),
    [
        (RGB.astype("float32"), {}, ("float32", "value_range", float(RGB.min()), float(RGB.max()))),
        (numpy.zeros((2, 5, 9, 9), "uint8"), {"layout": "n c h w"}, (5, 1, 4)),
        (RGB, {"layout": "n h w"}, ("(6, 3, 5, 7)", "'n h w'")),
        (RGB[:, :, :3, :3], {}, ("(6, 3, 3, 3)", "layout")),
        (numpy.zeros((5, 9, 9, 9), "uint8"), {}, ("(5, 9, 9, 9)", "layout")),
        (numpy.zeros(5, "uint8"), {}, ("(5,)", "layout")),
        (numpy.array([["a"]]), {"layout": "n h w"}, ("(1, 1)", "'n h w'")),
        (numpy.array([[["a"]]]), {}, ("<U1",)),
        (RGB, {"value_range": (1.0, 1.0)}, ("value_range", "[1.0, 1.0]")),
        (RGB, {"images": "x"}, ("'x'",)),
        (RGB, {"labels": "y.npy"}, ("y.npy",)),
        (RGB, {"labels": numpy.zeros(5, "int64")}, ("y.npy", 6)),
        (RGB, {"labels": numpy.zeros(6)}, ("y.npy", 6)),
        (RGB, {"labels": numpy.full(6, -2)}, ("y.npy", 0)),
    ],
)
def test_arrays_that_are_no_images_or_labels_are_refused(tmp_path: Path, array: Any, options: Any, facts: Any) -> None:
    if isinstance(labels := options.get("labels"), numpy.ndarray):
        options = {"labels": saved(tmp_path / "y.npy", labels)}
    with refused(ValueError, *facts):
        Arrays(saved(tmp_path / "a.npy", array), **options)


def test_missing_and_other_files_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "right.npy", RGB)
    with refused(ValueError, "rihgt.npy", "'right.npy'"):
        Arrays(str(tmp_path / "rihgt.npy"))
    with refused(ValueError, ".npy", ".npz"):
        Arrays(str(tmp_path / "a.pt"))


def test_values_outside_of_the_range_are_refused(tmp_path: Path) -> None:
    array = numpy.full((3, 4, 4), 0.5, "float32")
    array[1, 0, 0], array[2, 0, 0] = 1.5, numpy.nan
    path = saved(tmp_path / "a.npy", array)
    with refused(UserError, f"{path}[1]", 0.5, 1.5, "[0, 1]", f"{path}[2]", "nan"):
        feed_of(Arrays(path, value_range=(0.0, 1.0)))


def test_a_pickle_opens_the_file_again(tmp_path: Path) -> None:
    data = Arrays(saved(tmp_path / "a.npy", RGB))
    assert len(pickle.dumps(data)) < RGB.nbytes + 1000 < 3000
    assert torch.equal(pickle.loads(pickle.dumps(data)).load(2), torch.from_numpy(RGB[2]))


@pytest.mark.parametrize("channels", [2, 4])
def test_transparent_pixels_show_the_background(tmp_path: Path, channels: int) -> None:
    array = numpy.random.default_rng(0).integers(0, 256, (4, 6, 6, channels), dtype=numpy.uint8)
    data = Arrays(saved(tmp_path / "a.npy", array), layout="n h w c")
    store: Any
    for store in ("memory", "none"):
        feed = feed_of(data, transforms=Transforms(background="black"), store=Store(store=store))
        (batch,) = feed.unaugmented(torch.arange(4))
        expected = array[..., :-1].astype("float64") * array[..., -1:] / 255 / 127.5 - 1
        assert feed.shape == (channels - 1, 6, 6)
        assert numpy.abs(batch.inputs.permute(0, 2, 3, 1).numpy() - expected).max() < 1.01 / 127.5
