"""Events of a run: findings, steps without an update, checkpoints, the end of the run."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from attrs import define, field

STEP, TIME = "step", "time"  # keys of each line in the files of a run

Severity = Literal["ok", "info", "warning", "error"]


@define(frozen=True)
class Finding:
    """An observation about a training run. Its text has the lines `what`, `why` and "try `remedy`"."""

    severity: Severity  # ok: normal; info: a fact; warning: unusual, maybe intended; error: training cannot succeed
    what: str  # one line
    why: str = ""  # the numbers behind `what`, or its cause
    remedy: str = ""  # continues the word "try"

    def __str__(self) -> str:
        lines = (self.what, self.why, self.remedy and f"try {self.remedy}")
        return "\n  ".join(line for line in lines if line)


def _escaped(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def as_json(value: Any, text: Callable[[str], str] = _escaped) -> Any:
    """Return `value` for strict JSON: NaN and infinities become None, and lone surrogates are escaped.

    Each string is replaced by the result of `text`.
    """
    if isinstance(value, str):
        return text(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {as_json(name, text): as_json(item, text) for name, item in value.items()}
    return [as_json(item, text) for item in value] if isinstance(value, list | tuple) else value


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
        """Return the event of a finding."""
        return cls("finding", str(finding), finding.severity)
