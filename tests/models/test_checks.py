import pytest
import torch

from hookdiff.models import check_labels
from tests.conftest import refused


def labels(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize(
    ("given", "num_classes", "facts"),
    [
        (None, 10, ("num_classes=10", "model(x, timesteps, labels)", -1)),
        (labels(0, 1), 0, ("num_classes",)),
        (labels(0), 10, ("(1,)", "(2,)", "int64")),
        (torch.zeros(2), 10, ("(2,)", "float32", "int64")),
        (labels(0, 10), 10, (10, -1, 9, "num_classes=10")),
        (labels(-2, 0), 10, (-2, -1, 9, "num_classes=10")),
    ],
)
def test_labels_that_do_not_fit_are_refused(
    given: torch.Tensor | None, num_classes: int, facts: tuple[object, ...]
) -> None:
    with refused(ValueError, "labels", *facts):
        check_labels(given, 2, num_classes)


def test_labels_that_fit_are_accepted() -> None:
    check_labels(None, 2, 0)
    check_labels(labels(-1, 9), 2, 10)
    check_labels(labels(), 0, 10)
    check_labels(labels(5, 50).to("meta"), 2, 10)  # the range is checked only on the CPU
