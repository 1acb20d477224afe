"""Tests of the plugin."""

from collections.abc import Callable

import pytest

from hookdiff.testing import assert_any_order, assert_keeps_contract, assert_removable, assert_resumes, toy_loop
from hookdiff_example_plugin import ExamplePlugin


@pytest.mark.parametrize("promise", [assert_keeps_contract, assert_resumes, assert_any_order, assert_removable])
def test_it_keeps_what_each_plugin_promises(promise: Callable[..., None]) -> None:
    promise(ExamplePlugin)


def test_the_mean_follows_the_loss() -> None:
    plugin, losses = ExamplePlugin(decay=0.5), []
    with toy_loop({"example_plugin": plugin}, steps=3) as loop:
        for _ in loop.steps():
            losses.append(loop.gradients.loss)
    assert plugin.mean == pytest.approx(losses[0] / 4 + losses[1] / 4 + losses[2] / 2)
