"""`hookdiff check`."""

import json

import pytest
import tomli

from hookdiff.experiment.memory import estimate_memory
from tests.conftest import check_facts

DIT = {"use": "dit", "num_classes": 10}
MLP = """
import torch
from torch import nn

class MLP(nn.Module):
    def __init__(self, hidden: int = 100):
        super().__init__()
        self.first, self.last = nn.Linear(64, hidden), nn.Linear(hidden, 64)

    def forward(self, x, timesteps):
        return self.last(torch.relu(self.first(x.flatten(1)))).reshape(x.shape)
"""


@pytest.fixture
def check(hookdiff, write_config, tmp_path, monkeypatch):
    """Return a function that checks a DiT config with settings, and returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    write_config(run={"steps": 1}, model=DIT)

    def checked(*settings, command="check"):
        return hookdiff(command, "small.toml", *(word for setting in settings for word in ("--set", setting)))

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
    ("setting", "place", "facts"),
    [
        ("model.num_head=4", "model.num_head", ("'num_heads'", "in_channels")),
        ("model.num_heads=3", "model", ("num_heads=3", "hidden_size=128", 2)),
        ("model.patch_size=0", "model", ("patch_size=0", 1)),
        ("model.depth=six", "model.depth", ("'six'",)),
        ("model.use=dti", "model.use", ("'dti'", "'dit'", "unet", "dit", "module:Name")),
        ("model.start_from=gone.safetensors", "model.start_from", ("gone.safetensors",)),
    ],
)
def test_a_wrong_argument_is_reported_in_one_line(check, setting, place, facts):
    code, out, err = check(setting)
    assert (code, out) == (2, "")
    first, line = err.splitlines()
    check_facts(first, "small.toml", 1)
    assert line.startswith(f"  {place}: ")
    check_facts(line, *facts)


def test_golden_message_of_a_network_that_does_not_fit_its_images(check):
    problem = "model: image_size=8 is no multiple of patch_size=3; nearest: 6 or 9, or patch_size=2"
    assert check("model.patch_size=3")[0] == 0  # the data will decide the image size
    code, _, err = check("model.patch_size=3", "model.image_size=8")
    assert (code, err) == (2, f"hookdiff: small.toml: 1 problem\n  {problem}\n")
    code, _, err = check("model.patch_size=3", command="run")
    assert (code, err) == (2, f"hookdiff: {problem}\n")


@pytest.fixture
def count(hookdiff, user_module, write_config):
    """Return a function that runs `hookdiff check` on an MLP config, and returns exit code, stdout and stderr."""
    user_module("hd_mlp", MLP)
    path = write_config(run={"batch_size": 6}, model={"use": "hd_mlp:MLP"})
    return lambda *words: hookdiff("check", path, *words)


def test_memory_is_printed_as_a_table_in_mib(count):
    code, out, _ = count("--memory", "--set", "model.hidden=8192", "--plugins", "ema")
    assert code == 0
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in out.splitlines()[1:]}
    expected = {"parameters": 4.03, "gradients": 4.03, "optimizer": 8.06, "plugins.ema": 4.03, "activations": 0.19}
    assert {name: float(rows[name][0]) for name in expected} == expected
    check_facts(rows["activations"][1], 6, 0.032)


def test_memory_is_printed_as_json_in_bytes(count, load_small):
    code, out, _ = count("--memory", "--json")
    found = json.loads(out)
    assert (code, found["parameters"], found["plugins"]) == (0, 4 * (2 * 6400 + 164), {})
    assert found["total"] == estimate_memory(load_small(run={"batch_size": 6}, model={"use": "hd_mlp:MLP"})).total


def test_json_needs_memory(count):
    code, _, err = count("--json")
    assert code == 2
    check_facts(err, "--json", "--memory")
