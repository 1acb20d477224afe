"""The spelling of times, speeds and sizes."""

import math
from collections.abc import Callable

import pytest

from hookdiff.terminal import byte_size, duration, in_words, rate, step_label

TABLE: dict[Callable[[float], str], dict[float, str]] = {
    duration: {0: "0 s", 59.4: "59 s", 59.6: "1:00", 324: "5:24", 3924: "1:05:24", 2e5: "55:33:20", 1e6: "11 d"},
    in_words: {0: "1 s", 99: "99 s", 324: "5 min", 9000: "2.5 h", 36000: "10 h", 302400: "3.5 d", 1e9: "11,574 d"},
    rate: {0.123: "0.12 img/s", 9.94: "9.9 img/s", 9.96: "10 img/s", 1234.5: "1,234 img/s"},
    byte_size: {96: "96 bytes", 2500: "2.4 KiB", 2**29: "512 MiB", 3 * 2**29: "1.5 GiB", 2**41: "2,048.0 GiB"},
}


@pytest.mark.parametrize("spelled", TABLE)
def test_spelling(spelled: Callable[[float], str]) -> None:
    assert {value: spelled(value) for value in TABLE[spelled]} == TABLE[spelled]


def test_a_time_that_cannot_be_is_unknown() -> None:
    assert {spelled(value) for spelled in (duration, in_words) for value in (-1, 1e12, math.nan)} == {"unknown"}


def test_steps_have_thousands_and_the_length_of_the_run() -> None:
    assert (step_label(1680, None), step_label(1680, 10000)) == ("step 1,680", "step 1,680/10,000")
