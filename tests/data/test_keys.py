from typing import Any

import pytest

from hookdiff.data import Arrays, Feed, Folder, HuggingFace, Store, Transforms, fashion_mnist
from hookdiff.experiment.config import FEED_KEYS
from hookdiff.experiment.reference import keys


@pytest.mark.parametrize("target", [Arrays, Folder, HuggingFace, Store, Transforms, fashion_mnist])
def test_every_key_has_its_help(target: Any) -> None:
    assert [key.name for key in keys(target) if not key.help] == []


def test_every_key_of_a_feed_has_its_help() -> None:
    described = {key.name for key in keys(Feed) if key.help}
    assert described == set(FEED_KEYS)
