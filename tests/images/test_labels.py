import pytest

from hookdiff.images.labels import encode
from tests.conftest import as_list, refused


def test_classes_are_in_alphabetical_order_whatever_the_order_of_the_images() -> None:
    names = ["dog", "ant", "caf\u00e9", "ant", "cafe\u0301"]  # the last has the letter e and an accent
    labels, classes = encode(names)
    assert (as_list(labels), classes) == ([2, 0, 1, 0, 1], ("ant", "caf\u00e9", "dog"))


def test_integers_stay_as_they_are_and_have_no_names() -> None:
    labels, classes = encode([3, -1, 0])
    assert (as_list(labels), classes, encode([])) == ([3, -1, 0], None, (None, None))


@pytest.mark.parametrize(("labels", "what"), [([1, "a"], "'a'"), ([1.5], 1.5), ([True, False], "False"), ([-2], -2)])
def test_other_labels_are_refused(labels: list[object], what: object) -> None:
    with refused(ValueError, "labels", what):
        encode(labels)
