import pytest

from hookdiff import UserError
from hookdiff.cli.arguments import length_settings
from tests.conftest import refused


@pytest.mark.parametrize("key", ["steps", "epochs"])
@pytest.mark.parametrize(("steps", "epochs"), [(3, None), (None, 4), (None, None)])
def test_the_length_of_a_command_replaces_that_of_the_config(load_small, key, steps, epochs) -> None:
    other = {"steps": "epochs", "epochs": "steps"}[key]
    run = load_small(f"run.{other}=none", f"run.{key}=9", *length_settings(steps, epochs)).run
    asked = (steps, epochs) if steps or epochs else tuple(9 if name == key else None for name in ("steps", "epochs"))
    assert (run.steps, run.epochs) == asked


def test_two_lengths_of_a_command_are_refused() -> None:
    with refused(UserError, "--steps", "--epochs"):
        length_settings(1, 1)
