"""Tests of the tracker."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hookdiff import UserError
from hookdiff.testing import (
    assert_any_order,
    assert_keeps_contract,
    assert_removable,
    assert_resumes,
    assert_tracks,
    toy_loop,
)
from hookdiff_example_sink import ExampleSink


def read(path: Path) -> dict[tuple[int, str], float]:
    """Return the numbers of the file by step and name."""
    rows = [line.split(" ") for line in path.read_text().splitlines()]
    return {(int(step), name): float(value) for step, name, value in rows}


@pytest.mark.parametrize("promise", [assert_keeps_contract, assert_resumes, assert_any_order, assert_removable])
def test_it_keeps_what_each_plugin_promises(promise: Callable[..., None], tmp_path: Path) -> None:
    promise(lambda: ExampleSink(path=str(tmp_path / "numbers.txt")))


def test_the_file_has_the_numbers_of_each_run_and_costs_none_when_it_fails() -> None:
    assert_tracks(lambda path: ExampleSink(path=str(path / "numbers.txt")), lambda path: read(path / "numbers.txt"))


def test_a_file_without_a_folder_is_refused() -> None:
    with pytest.raises(UserError, match="path"):
        toy_loop({"example_sink": ExampleSink()}).run()
