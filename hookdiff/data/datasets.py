"""Data sets that are known by name."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import numpy
import torch

from hookdiff.data.memory import InMemory
from hookdiff.options.fields import Writes


def digits() -> InMemory:
    """1,797 handwritten digits, 1 x 8 x 8, labels 0 to 9 (Alpaydin & Kaynak 1998, UCI optdigits, the test half).

    scikit-learn stores counts of dark pixels from 0 to 16; they become uint8 from 0 to 255. Only this file is read,
    because importing scikit-learn takes as long as importing torch.
    """
    package = find_spec("sklearn")
    assert package is not None  # hookdiff requires it
    assert package.origin is not None
    table = numpy.loadtxt(Path(package.origin).parent / "datasets/data/digits.csv.gz", numpy.int64, delimiter=",")
    rows = torch.from_numpy(table)
    images = (rows[:, :64] * (255 / 16)).round().to(torch.uint8)
    return InMemory(images.reshape(-1, 1, 8, 8), rows[:, 64].clone())


def fashion_mnist(root: Annotated[str, Writes("download")], train: bool = True, download: bool = False) -> InMemory:
    """70,000 articles of clothing, 1 x 28 x 28, in ten classes (Xiao, Rasul & Vollgraf 2017, arXiv 1708.07747).

    Args:
        root: folder with the four idx files, not gzipped, in FashionMNIST/raw
        train: true: the 60,000 training images; false: the 10,000 test images
        download: let torchvision download the files if they are missing

    Raises:
        ValueError: if a file is missing or broken.
    """
    from torchvision.datasets import FashionMNIST

    try:
        data = FashionMNIST(str(Path(root).expanduser()), train, download=download)
        return InMemory(data.data.unsqueeze(1), data.targets, data.classes)
    except Exception as error:  # torchvision checks a broken file by assert, or not at all
        raise ValueError(f"{root}: Fashion-MNIST cannot be read: {error or type(error).__name__}") from error
