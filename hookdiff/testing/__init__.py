"""Helpers for tests of plugins: a small real Loop, and the promises that every plugin keeps."""

from hookdiff.testing.companions import COMPANIONS
from hookdiff.testing.compare import assert_same, weights
from hookdiff.testing.on_ranks import assert_trains_on_ranks
from hookdiff.testing.promises import assert_any_order, assert_removable, assert_resumes
from hookdiff.testing.threads import OutOfStep, on_ranks
from hookdiff.testing.toy import ToyObjective, ToySampler, toy_loop, toy_model
from hookdiff.testing.transfers import CountTransfers

__all__ = [
    "COMPANIONS",
    "CountTransfers",
    "OutOfStep",
    "ToyObjective",
    "ToySampler",
    "assert_any_order",
    "assert_removable",
    "assert_resumes",
    "assert_same",
    "assert_trains_on_ranks",
    "on_ranks",
    "toy_loop",
    "toy_model",
    "weights",
]
