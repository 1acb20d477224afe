"""Fashion-MNIST, from its four files in the idx format of MNIST."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy
import torch
from torch import Tensor

from hookdiff.data.memory import InMemory

CLASSES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


def fashion_mnist(root: str, train: bool = True, download: bool = False) -> InMemory:
    """70,000 articles of clothing, 1 x 28 x 28, in ten classes (Xiao, Rasul & Vollgraf 2017, arXiv 1708.07747).

    root: a folder with the idx files, gzipped or not, or the one that torchvision keeps them in. train: the 60,000 to
    train on, or the 10,000 to test with. download: let torchvision fetch them into `root` where they are missing.

    Raises ValueError when a file is missing or broken.
    """
    part = "train" if train else "t10k"
    names = f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"
    folder = Path(root).expanduser()
    if download and not all(_places(folder, name) for name in names):
        from torchvision.datasets import FashionMNIST

        FashionMNIST(str(folder), train=train, download=True)
    images, labels = (_read(folder, name, dimensions) for name, dimensions in zip(names, (3, 1), strict=True))
    if len(images) != len(labels):
        raise ValueError(f"{folder}: {len(images)} images, but {len(labels)} labels")
    return InMemory(images.unsqueeze(1), labels.long(), CLASSES)


def _places(folder: Path, name: str) -> list[Path]:
    below = (folder, folder / "FashionMNIST" / "raw")
    return [path for place in below for path in (place / name, place / f"{name}.gz") if path.is_file()]


def _read(folder: Path, name: str, dimensions: int) -> Tensor:
    """Return the bytes of an idx file: two zeros, the type (8: uint8), the number of sizes, the sizes, the rest."""
    places = _places(folder, name)
    if not places:
        raise ValueError(f"{folder}: has no {name}, gzipped or not, nor has FashionMNIST/raw in it; download = true?")
    path = places[0]
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    start = 4 + 4 * dimensions
    if len(data) < start or data[:4] != bytes((0, 0, 8, dimensions)):
        raise ValueError(f"{path}: is no idx file of bytes in {dimensions} dimensions")
    sizes = [int.from_bytes(data[at : at + 4], "big") for at in range(4, start, 4)]
    if len(data) - start != numpy.prod(sizes, dtype=object):
        told = " x ".join(map(str, sizes))
        raise ValueError(f"{path}: torn: its header says {told} bytes, there are {len(data) - start}")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=start).reshape(sizes)
