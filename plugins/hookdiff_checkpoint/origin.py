"""What made a checkpoint: versions, and the revision of the code it was run in."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from importlib.metadata import entry_points, version
from typing import Any

import torch

from hookdiff import Loop


def origin(loop: Loop) -> dict[str, Any]:
    """Return the versions of all that takes part in the run, and the git revision of the working directory."""
    plugins = [e.dist for e in entry_points(group="hookdiff.plugins") if e.name in loop.plugins and e.dist]
    versions = {dist.name: dist.version for dist in plugins}
    ours = {"hookdiff": version("hookdiff"), "python": platform.python_version(), "torch": str(torch.__version__)}
    return {"versions": {**ours, **versions}, "git": _revision()}


@cache
def _revision() -> dict[str, Any] | None:
    """Return the commit and whether files differ from it; None outside of a repository, or without git."""
    try:
        commit = _git("rev-parse", "HEAD")
        return {"commit": commit, "changed": bool(_git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, check=True, text=True, timeout=10)
    return done.stdout.strip()
