"""The origin of a checkpoint: versions, and the git revision of the code."""

import platform
import subprocess
from functools import cache
from importlib.metadata import entry_points, version
from typing import Any

import torch

from hookdiff import Loop


def origin(loop: Loop) -> dict[str, Any]:
    """Return the versions of hookdiff, python, torch and all plugins, and the revision of the working directory."""
    plugins = [e.dist for e in entry_points(group="hookdiff.plugins") if e.name in loop.plugins and e.dist]
    versions = {"hookdiff": version("hookdiff"), "python": platform.python_version(), "torch": str(torch.__version__)}
    return {"versions": {**versions, **{dist.name: dist.version for dist in plugins}}, "git": _revision()}


@cache
def _revision() -> dict[str, Any] | None:
    """Return the commit, and whether files differ from it; None outside of a repository, or without git."""
    try:
        commit, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "changed": bool(changes)}


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, check=True, text=True, timeout=300).stdout.strip()
