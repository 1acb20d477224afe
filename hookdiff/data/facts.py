"""What a checkpoint keeps of the data, so that its run makes images without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import Attribute, Factory, define, field, fields
from attrs.validators import deep_iterable, ge, instance_of, optional
from torch import Tensor

from hookdiff.errors import UserError
from hookdiff.structure import Problems, arguments, missing

MOST, LIMIT = 16, 1 << 22  # examples, and bytes of all of them together; there is always one


def _are_rows(facts: Any, _: Attribute[Any], conditions: Mapping[str, Any]) -> None:
    columns = [*conditions.values()] + ([] if facts.labels is None else [facts.labels])
    if not all(isinstance(column, Tensor) and column.dim() for column in columns):
        raise ValueError("expected tensors")
    if len({len(column) for column in columns}) > 1:
        raise ValueError("the tensors have different numbers of rows")


@define(frozen=True, eq=False, kw_only=True)
class Facts:
    """The facts about the data that a run needs after its training.

    If the samples have conditions, the first few training samples are kept as examples, without their images.
    """

    shape: tuple[int, ...] = field(validator=deep_iterable(ge(1)))  # of one sample, c h w
    num_samples: int = field(validator=ge(0))  # to train on
    drop_last: bool  # an epoch leaves out its last, smaller batch
    num_classes: int | None = field(default=None, validator=optional(ge(0)))  # None: no labels
    classes: tuple[str, ...] | None = None  # their names
    labels: Any = field(default=None, validator=optional(instance_of(Tensor)))  # of the examples: n, int64
    conditions: dict[str, Any] = field(default=Factory(dict), validator=_are_rows)  # of the examples: n rows each

    @classmethod
    def of(cls, state: Any) -> Facts:
        """Read the facts in the state of a checkpoint. Raises UserError for a state that holds none."""
        problems, table = Problems(), state if isinstance(state, dict) else {}
        given = arguments(cls, table, "data.facts", problems)
        if lacking := missing(cls, table):
            problems.add("data.facts", f"lacks {', '.join(lacking)}")
        if problems.found:
            raise UserError(f"the checkpoint's state of 'data' cannot be loaded: {problems}")
        return cls(**given)

    def state_dict(self) -> dict[str, Any]:
        """Return the facts as a part of a state, without those that are None."""
        values = {one.name: getattr(self, one.name) for one in fields(Facts)}
        return {name: value for name, value in values.items() if value is not None}
