"""Reads and writes statistics in the usual format of published statistics: .npz files with mu and sigma."""

from __future__ import annotations

from pathlib import Path

import numpy
import torch
from torch import Tensor

from hookdiff import UserError
from hookdiff.data import names_in, open_array
from hookdiff.disk import new_file, writing
from hookdiff.features import Gaussian, Moments

MU, SIGMA = "mu", "sigma"  # as write_statistics names them
_NUM = "num"  # number of images, which published files do not have


def has_statistics(path: Path) -> bool:
    """Return whether an .npz has mu and sigma. Raises UserError for a file that cannot be read."""
    try:
        return {MU, SIGMA} <= set(names_in(path))
    except ValueError as error:
        raise UserError(str(error)) from None


def read_statistics(path: Path) -> Gaussian:
    """Return the mean and the covariance in an .npz, as pytorch-fid, ADM, EDM and others publish them.

    Nothing is unpickled. Raises UserError for a file without mean or covariance, or with values of another kind.
    """
    try:
        mean, covariance = (_numbers(path, name) for name in (MU, SIGMA))
        return Gaussian(mean, covariance, num=_number(path))
    except ValueError as error:
        place = "" if str(error).startswith(str(path)) else f"{path}: "
        raise UserError(f"{place}{error}") from None


def write_statistics(path: Path, moments: Moments) -> None:
    """Write mean, covariance and number of images to an .npz, which the usual FID programs read.

    Raises UserError if the file cannot be written.
    """
    gaussian = moments.fit()
    rows, covariance = gaussian.rows, gaussian.covariance
    covariance = rows.T @ rows if rows is not None else covariance
    assert covariance is not None
    with writing(path), new_file(path) as partial, partial.open("xb") as file:
        numpy.savez(file, mu=gaussian.mean.numpy(), sigma=covariance.numpy(), num=moments.num)


def _numbers(path: Path, name: str) -> Tensor:
    array = numpy.asarray(open_array(path, name, whole=True))
    if array.dtype.kind != "f":
        raise ValueError(f"{path}: {name!r} has {array.dtype}, expected floats")
    return torch.from_numpy(array.astype(numpy.float64))


def _number(path: Path) -> int | None:
    """Return the number of images that `write_statistics` has written; None in other files."""
    if _NUM not in names_in(path):
        return None
    array = numpy.asarray(open_array(path, _NUM, whole=True))
    return int(array) if not array.shape and array.dtype.kind in "iu" else None
