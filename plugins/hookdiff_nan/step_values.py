"""The values of a kept step besides its states. They are read strictly, since any file may be damaged."""

from __future__ import annotations

from typing import Any, Literal

import torch
from attrs import Attribute, define, field
from attrs.validators import and_, deep_mapping, ge, instance_of, le, matches_re
from torch import Tensor

from hookdiff import Batch, shown
from hookdiff.loop import Progress
from hookdiff.options import shaped

_MOST_THREADS = 4096
_SHA256 = matches_re(r"[0-9a-f]{64}")
_DIGESTS = deep_mapping(instance_of(str), _SHA256)


@define(frozen=True)
class Machine:
    """The settings of a machine that can change the bits of a step."""

    device: str
    name: str
    ranks: int = field(validator=ge(1))
    threads: int = field(validator=[ge(1), le(_MOST_THREADS)])
    matmul_precision: Literal["highest", "high", "medium"]
    deterministic: bool


@define(frozen=True)
class Results:
    """The results of the step; a loss that is not finite is a text."""

    loss: float | str
    per_sample: list[float | str]
    gradients: dict[str, str] = field(validator=_DIGESTS)  # SHA-256 by name


@define(frozen=True)
class StepFacts:
    """The content of step.json, without its format number."""

    progress: Progress  # before the step
    is_first: bool  # whether it is the first step of its process
    versions: dict[str, str]
    machine: Machine
    inputs: str  # digest of the batch that the network got
    results: Results
    values: dict[str, dict[str, Any]]  # by part: its values that are not tensors
    files: dict[str, str] = field(validator=_DIGESTS)  # SHA-256 by name


def _is_batch(instance: Any, attribute: Attribute[Tensor], value: Tensor) -> None:
    if value.dim() < 1 or not len(value):
        raise ValueError(f"{attribute.name} must have at least one sample")


def _has_rows(instance: Any, attribute: Attribute[Any], value: Any) -> None:
    columns = value.values() if isinstance(value, dict) else () if value is None else (value,)
    if any(len(column) != len(instance.inputs) for column in columns):
        raise ValueError(f"{attribute.name} must have a row for each of the {len(instance.inputs)} samples")


_COLUMN = and_(shaped(None, dtype=torch.int64), _has_rows)


@define(frozen=True)
class KeptBatch:
    """The samples of the step, as the data gave them."""

    inputs: Tensor = field(validator=_is_batch)
    total: int = field(validator=ge(1))
    conditions: dict[str, Tensor] = field(validator=[deep_mapping(instance_of(str), _is_batch), _has_rows])
    names: list[str]
    labels: Tensor | None = field(default=None, validator=_COLUMN)
    indices: Tensor | None = field(default=None, validator=_COLUMN)

    def on(self, device: torch.device) -> Batch:
        """Return the samples as a batch on `device`."""
        labels = None if self.labels is None else self.labels.to(device)
        conditions = {name: column.to(device) for name, column in self.conditions.items()}
        return Batch(self.inputs.to(device), labels, self.indices, total=self.total, conditions=conditions)

    @property
    def names_by_index(self) -> dict[int, str]:
        """The names of the samples by their positions in the data, with control characters escaped."""
        indices = [] if self.indices is None else self.indices.tolist()
        return dict(zip(indices, map(shown, self.names), strict=False))
