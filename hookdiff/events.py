"""What happens in a run and is no number: findings, steps without an update, checkpoints, the end of the run."""

from collections.abc import Mapping
from typing import Any

from attrs import define, field

from hookdiff.findings import Finding, Severity


@define(frozen=True)
class Event:
    """Something that happened in a run at one step."""

    kind: str  # start, resume, rollback, finding, void, skipped, held, nan, checkpoint, stop; plugins may have others
    text: str  # for people, one line or several
    severity: Severity = "info"
    details: Mapping[str, Any] = field(factory=dict)  # by name, values of JSON

    @classmethod
    def of(cls, finding: Finding) -> "Event":
        """Return the event that `finding` was found."""
        return cls("finding", str(finding), finding.severity)
