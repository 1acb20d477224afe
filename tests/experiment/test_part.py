from urllib.request import urlopen

import pytest

from hookdiff.errors import ConfigError
from hookdiff.experiment.part import Part
from tests.conftest import refused


def test_a_part_of_a_stranger_connects_to_nothing_while_it_is_built() -> None:
    part = Part("data", "urlopen", urlopen, {"url": "http://127.0.0.1:9"}, is_strangers=True)
    with refused(ConfigError, "data", "127.0.0.1", "--trust"):
        part.build()
    with pytest.raises(ConfigError, match="refused"):  # by the machine, whose port 9 is closed
        Part("data", "urlopen", urlopen, {"url": "http://127.0.0.1:9"}).build()
