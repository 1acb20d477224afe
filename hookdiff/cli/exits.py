"""What a command's exit code tells a script or a scheduler."""

from __future__ import annotations

FAILED = 1
WRONG_INPUT = 2
BY_REASON = {
    "done": 0,
    "plugin": 0,
    "on_nan": 3,
    "time": 75,  # EX_TEMPFAIL: go on with `hookdiff resume`
    "signal": 130,
}
