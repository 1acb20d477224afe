"""Number, mean and covariance of a set of features, collected chunk by chunk in float64."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce

import numpy
import torch
from attrs import define, field
from torch import Tensor

_PENDING = 8192  # rows that wait before they are added to the scatter: small chunks then need few d x d matrices


@define(frozen=True, eq=False)
class Gaussian:
    """A mean and a covariance. The covariance is a matrix, or x^T x for the centred rows x of a few samples.

    `num` is the number of samples that were fitted; None if that is unknown, as for published statistics.

    Raises:
        ValueError: for shapes that do not fit, numbers that are not finite, and a matrix that is no covariance.
    """

    mean: Tensor  # d, float64
    covariance: Tensor | None = None  # d d, float64
    rows: Tensor | None = None  # n d, float64, n <= d: centred samples divided by sqrt(n - 1)
    num: int | None = None

    def __attrs_post_init__(self) -> None:
        mean, covariance = self.mean, self.covariance
        if mean.dim() != 1 or not len(mean):
            raise ValueError(f"a mean of shape {tuple(mean.shape)}, expected one number for each feature")
        if covariance is not None and covariance.shape != (*mean.shape, *mean.shape):
            raise ValueError(f"a mean of shape {tuple(mean.shape)} and a covariance of {tuple(covariance.shape)}")
        spread = self.rows if covariance is None else covariance
        size = torch.tensor(torch.nan) if spread is None else spread.abs().max()
        if not (mean.isfinite().all() and size.isfinite()):
            raise ValueError("the statistics are not finite, or their squares exceed the range of float64")
        if covariance is None:
            return
        if bool((covariance - covariance.T).abs_().max() > 1e-6 * size) or bool((covariance.diagonal() < 0).any()):
            raise ValueError("the matrix is no covariance: it is not symmetric, or its diagonal has negative numbers")

    @property
    def variance(self) -> Tensor:
        """The trace of the covariance: the mean squared distance from the mean."""
        if self.covariance is not None:
            return self.covariance.trace()
        assert self.rows is not None
        return self.rows.square().sum()


@define(eq=False)
class Moments:
    """Collects the number, mean and scatter of a set of features; `Moments()` is empty.

    Chunks are merged by the formula of Chan, Golub & LeVeque ("Updating formulae and a pairwise algorithm for computing
    sample variances", 1979), so that neither their order nor their sizes matter. A running sum of products would lose
    every digit when the mean is far larger than the spread.

    All tensors are float64 on the CPU: the square root of small eigenvalues turns an error of 1e-7 into 3e-4,
    some accelerators have no float64, and decompositions of such small matrices are no faster there.
    """

    num: int = field(default=0, init=False)  # samples
    _settled: int = field(default=0, init=False)  # samples in mean and scatter
    _mean: Tensor | None = field(default=None, init=False)  # d
    _scatter: Tensor | None = field(default=None, init=False)  # d d: sum of (x - mean) (x - mean)^T
    _pending: list[Tensor] = field(factory=list, init=False)  # the other samples, n d each

    @classmethod
    def of(cls, chunks: Tensor | Iterable[Tensor]) -> Moments:
        """Return the moments of `chunks`, features n d each; one chunk at a time is in memory. See `add`."""
        moments = cls()
        for chunk in (chunks,) if isinstance(chunks, Tensor) else chunks:
            moments.add(chunk)
        return moments

    @classmethod
    def merged(cls, parts: Iterable[Moments]) -> Moments:
        """Return the moments of all `parts`, such as of several ranks."""
        return reduce(cls.merge, parts, cls())

    @property
    def dim(self) -> int | None:
        """The number of dimensions; None as long as there are no samples."""
        return self._pending[0].shape[1] if self._pending else None if self._mean is None else len(self._mean)

    def add(self, features: Tensor) -> None:
        """Add `features`, n d, of any float type and device; n may be 0. `features` stay unchanged.

        Raises:
            ValueError: for another shape or dimension, for values that are no floats, and for rows that are not
                finite; the message has the number of such rows.
        """
        if features.dim() != 2 or not features.shape[1] or not features.is_floating_point():
            raise ValueError(f"expected float features n d, got {tuple(features.shape)} of {features.dtype}")
        if self.dim not in (None, features.shape[1]):
            raise ValueError(f"features of {self.dim} and of {features.shape[1]} dimensions differ; use one space")
        if not len(features):
            return
        rows = features.detach().to("cpu", torch.float64, copy=True)
        # Rows are looked at only if the sum is not finite, which takes a tenth of the time.
        if not rows.sum().isfinite() and (bad := int((~rows.isfinite().all(dim=1)).sum())):
            raise ValueError(f"{bad} of {len(rows)} rows of features are not finite")
        self.num += len(rows)
        self._pending.append(rows)
        self._settle_many()

    def merge(self, other: Moments) -> Moments:
        """Return the moments of both sets together.

        Raises:
            ValueError: if the two sets differ in dimension.
        """
        if None not in (self.dim, other.dim) and self.dim != other.dim:
            raise ValueError(f"features of {self.dim} and of {other.dim} dimensions differ; use one space")
        both = Moments()
        for part in (self, other):
            if part._scatter is not None:
                assert part._mean is not None
                both._join(part._settled, part._mean, part._scatter)
            both._pending += [rows.clone() for rows in part._pending]  # `_settle` changes pending rows in place
        both.num = self.num + other.num
        both._settle_many()
        return both

    def fit(self) -> Gaussian:
        """Return the Gaussian of this mean and unbiased covariance.

        Raises:
            ValueError: for fewer than 2 samples.
        """
        if self.num < 2:
            raise ValueError(f"a covariance needs at least 2 samples, got {self.num}")
        dim = self.dim
        assert dim is not None
        if self._scatter is None and self.num <= dim:
            rows = torch.cat(self._pending)
            mean = rows.mean(dim=0)
            return Gaussian(mean, rows=(rows - mean) / (self.num - 1) ** 0.5, num=self.num)
        self._settle()
        assert self._mean is not None
        assert self._scatter is not None
        return Gaussian(self._mean, self._scatter / (self.num - 1), num=self.num)

    def tensors(self) -> dict[str, Tensor]:
        """Return the moments by name, for a file: the samples if they are few, otherwise mean and scatter."""
        if self._scatter is None and self.num <= (self.dim or 0):
            return {"few": torch.cat(self._pending)}
        self._settle()
        assert self._mean is not None
        assert self._scatter is not None
        return {"num": torch.tensor(self.num), "mean": self._mean, "scatter": self._scatter}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Moments:
        """Return the moments from the result of `tensors`.

        Raises:
            KeyError or ValueError: for tensors that are not complete.
        """
        moments = cls()
        if "few" in tensors:
            moments.add(tensors["few"])
            return moments
        Gaussian(tensors["mean"], tensors["scatter"])  # raises ValueError for tensors that are no moments
        moments.num = moments._settled = int(tensors["num"])
        moments._mean, moments._scatter = tensors["mean"].clone(), tensors["scatter"].clone()
        return moments

    def _settle_many(self) -> None:
        # Only once there are more rows than dimensions: fewer rows hold more digits than their covariance.
        if self.num - self._settled > max(_PENDING, self.dim or 0):
            self._settle()

    def _settle(self) -> None:
        """Add the pending rows to mean and scatter."""
        if not self._pending:
            return
        rows = self._pending[0] if len(self._pending) == 1 else torch.cat(self._pending)
        self._pending = []
        mean = rows.mean(dim=0)
        centred = rows.sub_(mean).numpy()
        # numpy computes one half of a product with its own transpose; torch would compute both.
        with numpy.errstate(over="ignore"):  # `fit` refuses moments that are not finite
            scatter = torch.from_numpy(centred.T @ centred)
        self._join(len(rows), mean, scatter)

    def _join(self, num: int, mean: Tensor, scatter: Tensor) -> None:
        if self._mean is None or self._scatter is None:
            self._settled, self._mean, self._scatter = num, mean, scatter.clone()
            return
        together = self._settled + num
        shift = mean - self._mean
        self._scatter += scatter
        self._scatter.addr_(shift, shift, alpha=self._settled * num / together)
        self._mean = self._mean + shift * (num / together)
        self._settled = together
