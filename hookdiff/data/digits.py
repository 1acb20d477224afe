"""1,797 real handwritten digits that scikit-learn ships."""

from __future__ import annotations

import torch

from hookdiff.data.memory import InMemory


def digits() -> InMemory:
    """1,797 handwritten digits, 1 x 8 x 8, labels 0 to 9 (Alpaydin & Kaynak 1998, UCI optdigits, the test half).

    scikit-learn stores counts of dark pixels from 0 to 16; they become uint8 from 0 to 255.
    """
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.from_numpy(data.images).mul(255 / 16).round().to(torch.uint8)
    return InMemory(images.unsqueeze(1), torch.from_numpy(data.target).long())
