"""What happens in a run and is no number: findings, steps without an update, checkpoints, the end of the run."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from attrs import define, field

from hookdiff.findings import Finding, Severity


def _escaped(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def as_json(value: Any, text: Callable[[str], str] = _escaped) -> Any:
    """Return `value` as strict JSON has it: NaN and infinities become null, and lone surrogates are escaped.

    `text` is what each string becomes instead.
    """
    if isinstance(value, str):
        return text(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {as_json(name, text): as_json(one, text) for name, one in value.items()}
    return [as_json(one, text) for one in value] if isinstance(value, list | tuple) else value


@define(frozen=True)
class Event:
    """Something that happened in a run at one step."""

    # start, resume, rollback, finding, void, skipped, held, nan, checkpoint or stop; plugins may have others
    kind: str = field(converter=as_json)
    text: str = field(converter=as_json)  # for people, one line or several
    severity: Severity = "info"
    details: Mapping[str, Any] = field(factory=dict, converter=as_json)  # by name, values of JSON

    @classmethod
    def of(cls, finding: Finding) -> "Event":
        """Return the event that `finding` was found."""
        return cls("finding", str(finding), finding.severity)
