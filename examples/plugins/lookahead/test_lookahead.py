"""Tests of the plugin; `pytest` runs them."""

import torch
from hookdiff_lookahead import Lookahead

from hookdiff.testing import assert_any_order, assert_removable, assert_resumes, toy_loop, weights


def make() -> Lookahead:
    return Lookahead(every=2, alpha=0.25)


def test_it_resumes_exactly_stands_anywhere_in_the_list_and_can_be_left_out() -> None:
    assert_resumes(make)
    assert_any_order(make)
    assert_removable(make, changes="training")


def test_it_follows_its_paper() -> None:
    def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.5)

    plain, start = [], weights(toy_loop())
    loop = toy_loop(optimizers=sgd, steps=2)
    with loop:
        for _ in loop.steps():
            plain.append(weights(loop))
    looked = toy_loop({"lookahead": make()}, optimizers=sgd, steps=2)
    looked.run()
    for name, value in weights(looked).items():
        torch.testing.assert_close(value, start[name] + 0.25 * (plain[1][name] - start[name]))
