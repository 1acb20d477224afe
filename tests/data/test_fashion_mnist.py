import gzip
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from hookdiff.data import fashion_mnist
from tests.conftest import as_list, refused


def idx(values: Any) -> bytes:
    """Return values in MNIST's format: two zeros, the type (8: uint8), the number of sizes, the sizes, the bytes."""
    data = torch.as_tensor(values, dtype=torch.uint8)
    return bytes((0, 0, 8, data.dim())) + struct.pack(f">{data.dim()}I", *data.shape) + data.numpy().tobytes()


IMAGES, LABELS = torch.arange(5 * 28 * 28).view(5, 28, 28) % 251, [3, 1, 9, 0, 3]


def write_part(root: Path, part: str, images: Any, labels: Any) -> None:
    """Write the "train" or "t10k" part of a set like Fashion-MNIST to the files that have it in the folder `root`."""
    folder = root / "FashionMNIST" / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{part}-images-idx3-ubyte").write_bytes(idx(images))
    (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for part, rows in (("train", slice(0, 5)), ("t10k", slice(3, 5))):
        write_part(tmp_path, part, IMAGES[rows], LABELS[rows])
    return tmp_path


@pytest.mark.parametrize("download", [False, True])  # files that are there are not downloaded again
def test_both_parts_are_read(root: Path, download: bool) -> None:
    train, test = (fashion_mnist(str(root), train=train, download=download) for train in (True, False))
    assert torch.equal(train.images, IMAGES.unsqueeze(1).to(torch.uint8))
    assert as_list(train.labels) == LABELS
    assert torch.equal(test.images, train.images[3:])
    classes = train.classes or ()
    assert (len(classes), classes[9]) == (10, "Ankle boot")


@pytest.mark.parametrize(
    ("name", "content", "facts"),
    [
        ("train-images-idx3-ubyte", None, ("download",)),
        ("t10k-images-idx3-ubyte", None, ("download",)),
        ("train-images-idx3-ubyte", idx(IMAGES)[:-1], (3919,)),
        ("train-images-idx3-ubyte", b"\0\0", ()),
        ("train-images-idx3-ubyte", gzip.compress(idx(IMAGES), mtime=0), ()),
        ("train-labels-idx1-ubyte", idx(IMAGES), ()),
        ("train-labels-idx1-ubyte", idx(LABELS[:4]), (5, 4)),
    ],
)
def test_a_broken_file_is_refused(root: Path, name: str, content: bytes | None, facts: Any) -> None:
    path = root / "FashionMNIST" / "raw" / name
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with refused(ValueError, root, *facts):
        fashion_mnist(str(root))
