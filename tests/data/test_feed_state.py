"""Test that the facts about the data in a checkpoint are refused if no data has them."""

from typing import Any

import pytest
import torch

from hookdiff import UserError
from hookdiff.data.feed_state import Facts
from tests.conftest import refused

GOOD = {"shape": [1, 4, 4], "num_samples": 4, "drop_last": True, "num_classes": 2}
HUGE = 10**12
BAD: list[tuple[dict[str, Any], str]] = [
    ({"shape": [HUGE, HUGE, HUGE]}, "shape"),
    ({"shape": [1, HUGE, 4]}, "shape"),
    ({"shape": [1, -4, 4]}, "shape"),
    ({"shape": [1, float("nan"), 4]}, "shape"),
    ({"shape": [[1, 4, 4]]}, "shape"),
    ({"shape": [1, "x"]}, "shape"),
    ({"picture_shape": [3, HUGE, HUGE]}, "picture_shape"),
    ({"picture_shape": [3, 0, 4]}, "picture_shape"),
    ({"num_samples": HUGE}, "num_samples"),
    ({"num_samples": -1}, "num_samples"),
    ({"num_samples": 4.0}, "num_samples"),
    ({"num_classes": HUGE}, "num_classes"),
    ({"texts": {"text": []}}, "texts"),
    ({"texts": {"text": [["a disc"]]}}, "texts.text"),
    ({"texts": {"text": "a disc"}}, "texts.text"),
    ({"texts": {"text": ["a disc"], "other": ["a disc", "a ring"]}}, "texts"),
    ({"texts": {"text": ["a disc"]}, "labels": torch.tensor([0, 1])}, "texts"),
    ({"texts": {"text": ["a disc"]}, "conditions": {"size": torch.zeros(2, 1)}}, "texts"),
    ({"conditions": {"size": 1}}, "conditions"),
    ({"conditions": {"size": torch.zeros(0, 1)}}, "conditions"),
    ({"conditions": {"size": torch.zeros(1, 1)}, "labels": torch.tensor([2])}, "num_classes = 2"),
]


def test_facts_are_read() -> None:
    texts = {"text": ["a disc", "a ring"]}
    labels, sizes = torch.tensor([0, 1]), torch.zeros(2, 1)
    facts = Facts.of({**GOOD, "texts": texts, "labels": labels, "conditions": {"size": sizes}})
    assert (facts.texts, facts.shape, facts.num_samples) == ({"text": ("a disc", "a ring")}, (1, 4, 4), 4)
    with refused(UserError, "data", "facts"):
        Facts.of(None)


@pytest.mark.parametrize(("values", "key"), BAD)
def test_facts_that_no_data_has_are_refused(values: dict[str, Any], key: str) -> None:
    with refused(UserError, "data", "facts", key):
        Facts.of({**GOOD, **values})
