import torch
from sklearn.datasets import load_digits

from hookdiff.data import digits


def test_the_digits_match_scikit_learn() -> None:
    data, theirs = digits(), load_digits()
    assert (data.images.shape, data.images.dtype) == ((1797, 1, 8, 8), torch.uint8)
    # Their values are whole numbers from 0 to 16.
    assert torch.equal(data.images[:, 0].double(), torch.from_numpy(theirs.images).mul(255 / 16).round())
    assert torch.equal(data.labels, torch.from_numpy(theirs.target).long())
    assert (int(data.images.min()), int(data.images.max())) == (0, 255)
    assert data.labels is not None
    assert (len(data), data.labels.dtype) == (1797, torch.int64)
    assert torch.bincount(data.labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
