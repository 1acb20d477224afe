"""The origin of a checkpoint: the git revision of the code.

The working directory may be in a repository of a stranger. Git runs programs that the config of a repository names
(`core.fsmonitor`, `filter.*.clean`), so git is kept from reading that config.
"""

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hookdiff.disk import check_kind, read_file

_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_REF = re.compile(r"refs/[^\0\n]+")
# The only keys of the repository's config that are read; they set how its files are compared.
_COMPARED = r"^core\.(filemode|autocrlf|eol|symlinks|ignorecase)$"
_SECONDS = 10.0  # most time for git, which would wait for ever on a pipe in the repository
_VALUES = ("true", "false", "input", "lf", "crlf", "native")


def revision(runs: Iterable[Path]) -> dict[str, Any] | None:
    """Return the commit of the working directory, and whether files differ from the commit.

    Returns None if there is no repository, no commit or no git, if git takes more than `_SECONDS`, and for a
    repository in one of the directories `runs`.
    """
    try:
        root = next((folder for folder in (Path.cwd(), *Path.cwd().parents) if os.path.lexists(folder / ".git")), None)
        if root is None or any(root.is_relative_to(run.resolve()) for run in runs):
            return None
        git = root / ".git"
        git = root / _text(git).removeprefix("gitdir: ") if git.is_file() else git
        common = git / _text(git / "commondir") if (git / "commondir").is_file() else git  # of several working trees
        if (commit := _commit(git, common)) is None:
            return None
        return {"commit": commit, "changed": _is_changed(root, git, common, commit)}
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _text(file: Path) -> str:
    return read_file(file).decode().strip()


def _commit(git: Path, common: Path) -> str | None:
    """Return the commit that HEAD names; None before the first commit."""
    name = _text(git / "HEAD")
    for _ in range(5):  # git, too, follows no more links
        if _COMMIT.fullmatch(name):
            return name
        ref = name.removeprefix("ref: ")
        if not _REF.fullmatch(ref) or ".." in ref:
            return None
        file = next((folder / ref for folder in (git, common) if (folder / ref).is_file()), None)
        if file is None:
            packed = _text(common / "packed-refs") if (common / "packed-refs").is_file() else ""
            lines = (line.partition(" ") for line in packed.splitlines())
            return next((commit for commit, _, other in lines if other == ref and _COMMIT.fullmatch(commit)), None)
        name = _text(file)
    return None


def _is_changed(root: Path, git: Path, common: Path, commit: str) -> bool:
    """Return whether tracked files differ from `commit`: compared in a git directory with a copy of the index."""
    with tempfile.TemporaryDirectory() as folder:
        ours = Path(folder)
        for name in ("objects", "refs"):
            (ours / name).mkdir()
        (ours / "HEAD").write_text(commit)
        for file in (git / "index", *git.glob("sharedindex.*")):
            check_kind(file)
            # Keep the time: git compares the content of files that are as new as the index, in whole seconds.
            shutil.copy2(file, ours / file.name)
        until = time.monotonic() + _SECONDS
        # Drop git's variables of the caller: git sets some if one of its hooks starts a run.
        around = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        around |= {"GIT_DIR": folder, "GIT_WORK_TREE": os.fspath(root), "GIT_OBJECT_DIRECTORY": f"{common / 'objects'}"}
        config = common / "config"
        config = config if config.is_file() else Path(os.devnull)  # a pipe would be read for ever
        asked = _git(around, until, "config", "--file", os.fspath(config), "--get-regexp", _COMPARED, codes=(0, 1))
        known = (line.partition(" ") for line in asked.splitlines())
        lines = [f"{key.removeprefix('core.')} = {value}" for key, _, value in known if value in _VALUES]
        if len(commit) == 64:
            lines += ["repositoryformatversion = 1", "[extensions]", "objectformat = sha256"]
        (ours / "config").write_text("\n".join(["[core]", *lines, ""]))
        return bool(_git(around, until, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all"))


def _git(around: Mapping[str, str], until: float, *words: str, codes: tuple[int, ...] = (0,)) -> str:
    """Return the output of git; raises SubprocessError if it fails, or still runs at the time `until`."""
    # In a session of its own, git and the processes that it has started can be killed together.
    options: Any = {"env": dict(around), "start_new_session": True, "text": True}
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(["git", *words], stdin=null, stdout=pipe, stderr=null, **options) as process:
        try:
            out, _ = process.communicate(timeout=max(0.0, until - time.monotonic()))
        finally:
            if process.poll() is None and os.name != "nt":
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
    if process.returncode not in codes:
        raise subprocess.CalledProcessError(process.returncode, words)
    return str(out).strip()
