"""outcome.json: why, and at which step, a run has ended.

{"reason": "done", "message": "", "step": 1000, "epoch": 3}
"""

import json
from pathlib import Path

from attrs import asdict, frozen

from hookdiff.disk.files import new_file, write_file
from hookdiff.disk.reading import read_file
from hookdiff.run_dir.lines import MOST_STEPS

OUTCOME = "outcome.json"


@frozen
class RunOutcome:
    """Why and at which step a run has ended; the reason is None before the end, or if it is unknown."""

    reason: str | None = None  # one of Reason
    message: str = ""  # for people
    step: int = 0
    epoch: int = 0


def write_outcome(run_dir: Path, outcome: RunOutcome) -> None:
    """Write the file, whole or not at all; raise OSError or StorageError if that fails."""
    with new_file(run_dir / OUTCOME) as partial:
        write_file(partial, f"{json.dumps(asdict(outcome))}\n".encode())


def read_outcome(run_dir: Path) -> RunOutcome:
    """Return the content of the file, without the values that are damaged."""
    try:
        outcome = json.loads(read_file(run_dir / OUTCOME))
    except (OSError, ValueError, RecursionError):
        return RunOutcome()
    kinds = {"reason": str, "message": str, "step": int, "epoch": int}
    values = outcome if isinstance(outcome, dict) else {}
    good = {name: values[name] for name, kind in kinds.items() if isinstance(values.get(name), kind)}
    if not 0 <= good.get("step", 0) < MOST_STEPS:
        del good["step"]
    return RunOutcome(**good)
