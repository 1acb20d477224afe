"""The features of a set of images: their moments, and rows for metrics of pairs of images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

import torch
from attrs import define, field
from torch import Tensor

from hookdiff.errors import UserError
from hookdiff.features.moments import Moments
from hookdiff.features.space import Space

ROWS = 10_000  # rows that are kept, since the time of metrics of all pairs grows with their square


@define(eq=False)
class Collected:
    """Features of images, collected in parts: the moments of all images, and the rows of the first `most`."""

    moments: Moments = field(factory=Moments)
    _rows: list[Tensor] = field(factory=list)  # n d, float32
    _logits: list[Tensor] = field(factory=list)  # n k, float32
    numbers: Tensor | None = None  # positions in the data of the samples of `rows`: n, int64
    most: int = ROWS
    _kept: int = field(default=0, init=False)

    @classmethod
    def of(cls, space: Space, images: Iterable[Tensor], most: int = ROWS, *, logits: bool = True) -> Collected:
        """Return the features of all parts of `images`, each n c h w, uint8; `logits` keeps logits, too, if any."""
        collected = cls(most=most)
        for part in images:
            features, classes = space(part)
            collected.add(features, classes if logits else None)
        return collected

    def add(self, features: Tensor, logits: Tensor | None = None) -> None:
        """Add features, n d, and the logits of the same images, n k.

        Raises:
            UserError: for features of another dimension than those before.
        """
        check_dim(features.shape[1], self.moments.dim)
        self.moments.add(features)
        if room := max(0, self.most - self._kept):
            # A copy: a view would keep all of the features in memory.
            self._rows.append(features[:room].to(torch.float32, copy=True))
            self._kept += len(self._rows[-1])
        if logits is not None:
            self._logits.append(logits.float())

    @property
    def num(self) -> int:
        return self.moments.num

    @property
    def rows(self) -> Tensor:
        """The features of the first `most` images: n d, float32."""
        return torch.cat(self._rows)

    @property
    def logits(self) -> Tensor | None:
        """The logits of all images, n k, float32; None if the network is no classifier."""
        return torch.cat(self._logits) if self._logits else None

    @classmethod
    def merged(cls, parts: Iterable[Collected]) -> Collected:
        """Return the features of all `parts`, such as of several ranks, in this order."""
        parts = list(parts)
        for first, other in pairwise(part.moments.dim for part in parts if part.moments.dim is not None):
            check_dim(other, first)
        most = max((part.most for part in parts), default=ROWS)
        both = cls(Moments.merged(part.moments for part in parts), most=most)
        both._rows = [torch.cat([rows for part in parts for rows in part._rows])[:most].clone()]
        both._kept = len(both._rows[0])
        both._logits = [logits for part in parts for logits in part._logits]
        return both

    def tensors(self) -> dict[str, Tensor]:
        """Return rows, logits and moments by name, for a file."""
        logits = {} if self.logits is None else {"logits": self.logits}
        return {"rows": self.rows, **logits, **self.moments.tensors()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Collected:
        """Return the features from the result of `tensors`.

        Raises:
            KeyError or ValueError: for tensors that are not complete.
        """
        rows = tensors["rows"]
        collected = cls(Moments.from_tensors(tensors), [rows], most=max(ROWS, len(rows)))
        collected._kept = len(rows)
        collected._logits = [tensors["logits"]] if "logits" in tensors else []
        return collected


def check_dim(dim: int, expected: int | None) -> None:
    """Raise UserError unless features of `dim` dimensions have the `expected` number; None: any."""
    if expected is not None and dim != expected:
        raise UserError(
            f"the features have {expected:,} dimensions for some images, {dim:,} for others; choose features with one "
            "dimension for images of all sizes"
        )
