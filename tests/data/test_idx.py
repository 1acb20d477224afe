import gzip
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from hookdiff.data import fashion_mnist
from tests.conftest import refused


def idx(values: Any) -> bytes:
    data = torch.as_tensor(values, dtype=torch.uint8)
    return bytes((0, 0, 8, data.dim())) + struct.pack(f">{data.dim()}I", *data.shape) + data.numpy().tobytes()


IMAGES, LABELS = torch.arange(5 * 28 * 28).view(5, 28, 28) % 251, [3, 1, 9, 0, 3]


@pytest.fixture(params=["plain", "gzip", "torchvision"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "FashionMNIST" / "raw" if request.param == "torchvision" else tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    for part, rows in (("train", slice(0, 5)), ("t10k", slice(3, 5))):
        for name, values in (("images-idx3", IMAGES[rows]), ("labels-idx1", LABELS[rows])):
            if request.param == "gzip":
                (folder / f"{part}-{name}-ubyte.gz").write_bytes(gzip.compress(idx(values)))
            else:
                (folder / f"{part}-{name}-ubyte").write_bytes(idx(values))
    return tmp_path


def test_both_parts_are_read(root: Path) -> None:
    train, test = fashion_mnist(str(root)), fashion_mnist(str(root), train=False)
    assert torch.equal(train.images, IMAGES.unsqueeze(1).to(torch.uint8))
    assert train.labels is not None
    assert train.labels.tolist() == LABELS
    assert torch.equal(test.images, train.images[3:])
    assert (train.num_classes, train.classes[9] if train.classes else None) == (10, "Ankle boot")


def test_what_is_downloaded_is_not_asked_for_again(root: Path) -> None:
    assert len(fashion_mnist(str(root), download=True)) == 5


@pytest.mark.parametrize(
    ("name", "content", "facts"),
    [
        ("train-images-idx3-ubyte", None, ("download",)),
        ("train-images-idx3-ubyte", idx(IMAGES)[:-1], ("5 x 28 x 28", 3919)),
        ("train-images-idx3-ubyte", b"\0\0", (3,)),
        ("train-labels-idx1-ubyte", idx(IMAGES), (1,)),
        ("train-labels-idx1-ubyte", idx(LABELS[:4]), (5, 4)),
    ],
)
def test_a_broken_file_is_told(tmp_path: Path, name: str, content: bytes | None, facts: Any) -> None:
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(IMAGES))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(LABELS))
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with refused(ValueError, name if content != idx(LABELS[:4]) else tmp_path, *facts):
        fashion_mnist(str(tmp_path))


def test_a_torn_gzip_is_told(tmp_path: Path) -> None:
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(IMAGES))[:50])
    with refused(ValueError, "train-images-idx3-ubyte.gz"):
        fashion_mnist(str(tmp_path))
