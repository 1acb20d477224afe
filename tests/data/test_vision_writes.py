"""Sets of torchvision make and change nothing in the folder that they read, unless they are marked as writers."""

import inspect
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import pytest

from hookdiff.data.vision import vision
from hookdiff.errors import UserError
from hookdiff.options.fields import Writes
from tests.hostile.mutations import listing

datasets = pytest.importorskip("torchvision.datasets")


def made(name: str) -> Any:
    try:
        return vision(name)
    except UserError:  # no set of pictures that is read without pickle
        return None


@pytest.mark.parametrize("name", [name for name in datasets.__all__ if made(name)])
def test_a_set_that_is_not_there_is_not_made(name: str, tmp_path: Path) -> None:
    make = made(name)
    parameters = inspect.signature(make).parameters
    if "root" not in parameters:
        return
    if any(isinstance(mark, Writes) and not mark.when for mark in get_args(parameters["root"].annotation)[1:]):
        return
    root, nowhere = str(tmp_path / "root"), str(tmp_path / "x")
    needed = {"root": root, "annFile": nowhere, "ann_file": nowhere}
    lacking = [key for key, one in parameters.items() if one.default is one.empty and one.kind is not one.VAR_KEYWORD]
    options = {key: needed.get(key, "train") for key in lacking}
    before = listing(tmp_path)
    with suppress(Exception):  # each set has its own
        make(**{**options, "root": root})
    assert listing(tmp_path) == before
