"""The commit in a checkpoint: read from real repositories, of which nothing is run."""

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from hookdiff_checkpoint.revision import revision
from tests.conftest import Succeed, write_small
from tests.hostile.mutations import in_time

AUTHOR = {f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


def git(folder: Path, *words: str) -> str:
    # Not the user's own config, which may sign commits.
    around = {**os.environ, **AUTHOR, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(["git", *words], cwd=folder, env=around, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a repository with two files in one commit, and return it."""
    folder = tmp_path / "repo"
    (folder / "inside").mkdir(parents=True)
    monkeypatch.chdir(folder)
    git(folder, "init", "-b", "main")
    for name in ("a.py", "inside/b.py"):
        (folder / name).write_text("1\n")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "x")
    return folder


STATES = {  # commands of git
    "branch": [],
    "slash in the name": ["switch -c one/two"],
    "detached": ["checkout --detach"],
    "packed": ["pack-refs --all"],
    "worktree": ["worktree add ../other"],
    "split index": ["update-index --split-index"],
    "file mode": ["config core.filemode false"],
    "symbolic": ["symbolic-ref refs/heads/alias refs/heads/main", "symbolic-ref HEAD refs/heads/alias"],
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("inside", ["", "inside"])
def test_it_is_what_git_says(repo: Path, monkeypatch: pytest.MonkeyPatch, state: str, inside: str) -> None:
    for command in STATES[state]:
        git(repo, *command.split())
    folder = repo.parent / "other" if state == "worktree" else repo
    if state == "file mode":
        (repo / "a.py").chmod(0o755)
    monkeypatch.chdir(folder / inside)
    commit = git(folder, "rev-parse", "HEAD")
    assert revision([]) == {"commit": commit, "changed": False}
    (folder / "untracked.py").write_text("2\n")
    assert revision([]) == {"commit": commit, "changed": False}
    (folder / "inside" / "b.py").write_text("2\n")  # of the same size, so that its content is compared
    assert revision([]) == {"commit": commit, "changed": True}
    assert git(folder, "status", "--porcelain", "--untracked-files=no") != ""


def test_a_change_in_the_second_of_the_commit_is_seen(repo: Path) -> None:
    changed = repo / "a.py"
    while True:
        changed.write_text("1\n")
        git(repo, "add", ".")
        git(repo, "update-index", "--refresh")
        changed.write_text("2\n")
        if int((repo / ".git" / "index").stat().st_mtime) == int(changed.stat().st_mtime):
            break
    time.sleep(1.1 - time.time() % 1)  # the copy of the index would be from a later second
    assert (revision([]) or {})["changed"]


def test_there_is_none(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert revision([]) is None
    git(tmp_path, "init", "empty")
    monkeypatch.chdir(tmp_path / "empty")
    assert revision([]) is None
    monkeypatch.chdir(repo)
    (repo / ".git" / "HEAD").write_text("ref: ../../etc/passwd\n")
    assert revision([]) is None


HOSTILE = """
[core]
fsmonitor = "touch {canary}; false"
hooksPath = {hooks}
[filter "x"]
clean = "touch {canary}; cat"
{process}
[alias]
status = "!touch {canary}"
config = "!touch {canary}"
[include]
path = {included}
"""


@pytest.mark.parametrize("place", ["config", "config.worktree"])
@pytest.mark.parametrize("process", ["", 'process = "touch {canary}"'])
def test_nothing_of_the_repository_is_run(repo: Path, tmp_path: Path, place: str, process: str) -> None:
    canary, hooks, included = tmp_path / "canary", tmp_path / "hooks", tmp_path / "included"
    hooks.mkdir()
    (hooks / "post-index-change").write_text(f"#!/bin/sh\ntouch {canary}\n")
    (hooks / "post-index-change").chmod(0o755)
    included.write_text(f'[core]\nfsmonitor = "touch {canary}; false"\n')
    (repo / ".gitattributes").write_text("* filter=x\n")
    git(repo, "add", ".")
    git(repo, "commit", "-m", "y")
    commit = git(repo, "rev-parse", "HEAD")
    git(repo, "config", "extensions.worktreeConfig", "true")
    text = HOSTILE.format(canary=canary, hooks=hooks, included=included, process=process.format(canary=canary))
    with (repo / ".git" / place).open("a") as file:
        file.write(text)
    (repo / "a.py").write_text("2\n")  # of the same size, so that its content is compared
    assert revision([]) == {"commit": commit, "changed": True}
    assert not canary.exists()
    subprocess.run(["git", "status"], cwd=repo, capture_output=True)
    assert canary.exists()  # which git does of itself


def test_a_submodule_is_not_asked(repo: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    git(repo, "-c", "protocol.file.allow=always", "submodule", "add", "./.git", "sub")
    git(repo, "commit", "-m", "y")
    git(repo / "sub", "config", "core.fsmonitor", f"touch {canary}; false")
    (repo / "sub" / "a.py").write_text("2\n")
    assert (revision([]) or {})["changed"] is False
    assert not canary.exists()


@pytest.mark.wide
def test_only_a_repository_around_a_run_is_noted(repo: Path, monkeypatch: pytest.MonkeyPatch, succeed: Succeed) -> None:
    """A run below the user's project keeps its commit, also when it is resumed; a run that is a repository has none."""
    write_small(repo / "small.toml", run={"steps": 1, "plugins": ["checkpoint"]})
    run = repo / "runs" / "small"

    def recorded(path: Path) -> Any:
        manifests = sorted(path.glob("checkpoints/*/manifest.json"))
        return json.loads(manifests[-1].read_text())["git"]

    commit = git(repo, "rev-parse", "HEAD")
    succeed("run", "small.toml")
    assert recorded(run) == {"commit": commit, "changed": False}
    succeed("resume", "runs/small", "--steps", "2")
    assert recorded(run) == {"commit": commit, "changed": False}
    git(run, "init")
    git(run, "add", "config.toml")
    git(run, "commit", "-m", "z")
    monkeypatch.chdir(run)
    succeed("resume", ".", "--steps", "3")
    assert recorded(run) is None
    newest = sorted(run.glob("checkpoints/*"))[-1]
    for source, out in ((".", "a"), (newest, "b")):
        succeed("resume", source, "--steps", "4", "--out", repo / out)
        assert recorded(repo / out) is None
    monkeypatch.chdir(run / "checkpoints")
    succeed("resume", "..", "--steps", "4")
    assert recorded(run) is None


# What git or we read, by whether the revision is known all the same once a pipe has its place.
PIPES = {
    "a .git that is a pipe": (".git", False),
    "HEAD": (".git/HEAD", False),
    "a branch": (".git/refs/heads/main", False),
    "packed refs": (".git/packed-refs", True),
    "index": (".git/index", False),
    "config": (".git/config", True),
    "commondir": (".git/commondir", True),
    "alternates": (".git/objects/info/alternates", False),
    "index of a pack": (".git/objects/pack/pack-1.idx", None),  # git may leave it out
    "attributes": (".gitattributes", False),
}


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
@pytest.mark.parametrize(("path", "is_known"), PIPES.values(), ids=PIPES)
def test_a_pipe_is_not_waited_for(repo: Path, path: str, is_known: bool | None) -> None:
    if path.endswith(".idx"):
        (repo / path).with_suffix(".pack").write_bytes(b"PACK")
    if (repo / path).exists():
        (repo / path).rename(repo / "aside")
    os.mkfifo(repo / path)
    with in_time():
        found = revision([])
    assert is_known is None or (found is not None) == is_known
