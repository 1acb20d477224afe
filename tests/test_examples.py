"""The examples run as a user runs them."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import tomli

from tests.conftest import PATIENCE, check_facts

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_embed_trains_in_both_styles(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "embed.py", "--steps", "8", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, timeout=PATIENCE)
    pushed, *_, sampled = done.stdout.splitlines()
    check_facts(pushed, "push", "done", 2)
    check_facts(sampled, tmp_path / "embed.png", "ema", 8)
    assert (tmp_path / "push" / "checkpoints" / "step-00000002" / "ema.safetensors").is_file()
    assert (tmp_path / "embed.png").is_file()


def test_the_basic_example_is_a_valid_config(hookdiff: Any) -> None:
    code, out, err = hookdiff("check", EXAMPLES / "basic.toml", "--plugins", "ema,amp,fid")
    assert code == 0, err
    assert tomli.loads(out)["run"]["plugins"][-3:] == ["ema", "amp", "fid"]
