"""The origin of a checkpoint: the git revision of the code."""

import subprocess
from functools import cache
from typing import Any


@cache
def revision() -> dict[str, Any] | None:
    """Return the commit of the working directory, and whether files differ from it; None without one or git."""
    try:
        commit, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "changed": bool(changes)}


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, check=True, text=True, timeout=300).stdout.strip()
