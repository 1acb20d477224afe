"""Tests of the evaluation."""

from collections.abc import Callable

import pytest
import torch

from hookdiff import Feed, UserError
from hookdiff.testing import assert_any_order, assert_keeps_contract, assert_removable, assert_resumes, toy_loop
from hookdiff_example_evaluation import ExampleEvaluation

DATA = Feed(torch.linspace(-1, 1, 160).reshape(40, 4), held_out=8)


@pytest.mark.parametrize("promise", [assert_keeps_contract, assert_resumes, assert_any_order, assert_removable])
def test_it_keeps_what_each_plugin_promises(promise: Callable[..., None]) -> None:
    promise(lambda: ExampleEvaluation(every=4), data=DATA)


def test_the_same_weights_have_the_same_loss_which_falls_in_training() -> None:
    evaluation = ExampleEvaluation(every=0)

    def measured() -> float:
        total, count = evaluation.evaluate(loop)["example_evaluation"]
        assert count == 8 * evaluation.draws
        return total.item() / count

    with toy_loop({"example_evaluation": evaluation}, data=DATA, steps=40) as loop:
        for _ in loop.steps():
            pass
    trained = measured()
    assert measured() == trained
    with toy_loop({"example_evaluation": evaluation}, data=DATA) as loop:
        assert trained < measured()


def test_a_run_without_held_out_samples_is_refused() -> None:
    with pytest.raises(UserError, match="held_out"):
        toy_loop({"example_evaluation": ExampleEvaluation()}).run()
