"""What `hookdiff check` tells of a network."""

import sys

import pytest
import tomli

from hookdiff.cli import main

CONFIG = """
[run]
steps = 1
device = "cpu"
[data]
source = "digits"
[model]
use = "dit"
num_classes = 10
"""


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    (tmp_path / "small.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)

    def checked(*settings, command="check"):
        words = [word for setting in settings for word in ("--set", setting)]
        monkeypatch.setattr(sys, "argv", ["hookdiff", command, "small.toml", *words])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code, *capsys.readouterr()

    return checked


def test_a_config_with_a_dit_is_printed_with_every_default(check):
    code, out, err = check("model.hidden_size=1152", "model.depth=28", "model.num_heads=16")  # takes no memory
    assert (code, err) == (0, "")
    assert tomli.loads(out)["model"] == {
        "use": "dit",
        "in_channels": 1,
        "image_size": 8,
        "patch_size": 2,
        "hidden_size": 1152,
        "depth": 28,
        "num_heads": 16,
        "mlp_ratio": 4.0,
        "num_classes": 10,
        "dropout": 0.0,
        "gradient_checkpointing": False,
        "init": "default",
        "zero_output": False,
    }


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("model.num_head=4", "model.num_head: unknown key; did you mean 'num_heads'?; known: in_channels, "),
        ("model.num_heads=3", "model: num_heads=3 does not divide hidden_size=128; nearest: 2"),
        ("model.patch_size=0", "model: patch_size=0 is less than 1; nearest: 1"),
        ("model.depth=six", "model.depth: expected an integer, got 'six'"),
        ("model.use=dti", "model.use: unknown 'dti'; did you mean 'dit'?; known: unet, dit, or module:Name"),
        ("model.start_from=gone.safetensors", "model.start_from: gone.safetensors: no such file"),
    ],
)
def test_a_wrong_argument_is_one_line(check, setting, line):
    code, out, err = check(setting)
    assert (code, out) == (2, "")
    assert err.startswith(f"hookdiff: small.toml: 1 problem\n  {line}")
    assert err.count("\n") == 2


def test_what_depends_on_the_size_of_the_data_waits_for_it(check):
    wrong_for_digits = "model: image_size=8 is no multiple of patch_size=3; nearest: 6 or 9, or patch_size=2"
    assert check("model.patch_size=3")[0] == 0
    code, _, err = check("model.patch_size=3", "model.image_size=8")
    assert (code, err) == (2, f"hookdiff: small.toml: 1 problem\n  {wrong_for_digits}\n")
    code, _, err = check("model.patch_size=3", command="run")
    assert (code, err) == (2, f"hookdiff: {wrong_for_digits}\n")
