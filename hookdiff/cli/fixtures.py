"""Fixtures of pytest for the tests of a package: `pytest_plugins = ["hookdiff.cli.fixtures"]` in its conftest.py."""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hookdiff.builtin import builtin_plugins
from hookdiff.loop.loop import Loop
from hookdiff.testing.toy import toy_loop


@pytest.fixture
def recorded_loop(tmp_path: Path) -> Callable[..., Loop]:
    """Return a function like `toy_loop`; the runs of its loops write their files to `tmp_path / "run"`."""

    def make(plugins: Mapping[str, object] | None = None, **options: Any) -> Loop:
        options.setdefault("run_dir", tmp_path / "run")
        return toy_loop({**builtin_plugins(), **(plugins or {})}, **options)

    return make


@pytest.fixture
def hookdiff_command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs the command line in this process and returns its exit code, stdout and stderr.

    The function fails if stderr has a traceback, which no user should see.
    """
    from hookdiff.cli.command_line import main

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hookdiff", *map(str, words)])
        monkeypatch.setenv("PYTHONSAFEPATH", "1")  # as the command sets it; pytest restores the old value
        if path := os.environ.get("PYTHONPATH"):
            monkeypatch.setenv("PYTHONPATH", path)
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return int(caught.value.code or 0), out, err

    return call
