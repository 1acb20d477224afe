"""Work that takes long: what is shown and logged of it."""

import itertools
import logging
from collections.abc import Iterator

import pytest

from hookdiff.terminal.pace import Work, paced, shown_by
from tests.conftest import Clock


class Seen:
    """Keeps what is shown: the name of each work, with the units that are done."""

    def __init__(self) -> None:
        self.pictures: list[list[tuple[str, int]]] = []

    def __call__(self, works: tuple[Work, ...]) -> None:
        self.pictures.append([(work.what, work.done) for work in works])


def parts(monkeypatch: pytest.MonkeyPatch, num: int, seconds: float) -> Iterator[range]:
    """Return parts of two units, each of which takes some time."""
    clock = Clock(monkeypatch)

    def made() -> Iterator[range]:
        for _ in range(num):
            clock.now += seconds
            yield range(2)

    return made()


def test_works_inside_each_other_are_shown() -> None:
    with shown_by(seen := Seen()):
        for _ in paced([range(3), range(1)], 4, "outer"):
            list(paced("ab", 2, "inner"))
    outer = [[("outer", 0)], [("outer", 3)], [("outer", 4)]]
    inner = [[("outer", before), ("inner", done)] for before in (0, 3) for done in (0, 1, 2)]
    assert [works for works in seen.pictures if len(works) == 2] == inner
    assert [works for works in seen.pictures if len(works) == 1] == [outer[0], outer[0], outer[1], outer[1], outer[2]]
    assert seen.pictures[-1] == []


def test_work_that_an_error_ends_is_gone() -> None:
    def work() -> None:
        for _ in paced(range(3), 3, "broken", size=lambda _: 1):
            raise RuntimeError

    with shown_by(seen := Seen()), pytest.raises(RuntimeError):
        work()
    assert seen.pictures == [[("broken", 0)], []]


def test_the_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    list(paced(parts(monkeypatch, 10, 1.0), 20, "short"))
    list(paced(itertools.chain(parts(monkeypatch, 1, 20.0), parts(monkeypatch, 24, 0.5)), 50, "compiles first"))
    list(paced(itertools.chain(parts(monkeypatch, 2, 0.4), [range(996)]), 1000, "starts two processes"))
    assert not caplog.messages
    for _ in paced(parts(monkeypatch, 12, 10.0), 24, "fid: images"):
        list(paced(range(100), 100, "inner", size=lambda _: 1))
    assert caplog.messages == [
        "fid: images: 4 of 24 images, about 2 min left",
        "fid: images: 12 of 24 images, about 60 s left",
        "fid: images: 20 of 24 images, about 20 s left",
    ]


def test_the_log_gets_a_line_of_the_inner_work_while_no_part_of_the_outer_one_is_done(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    Clock(monkeypatch)
    for _ in paced(range(2), 2, "fid: images", size=lambda _: 1):
        list(paced(parts(monkeypatch, 6, 10.0), 12, "sampling", "steps"))
    assert caplog.messages == [
        "fid: images, sampling: 4 of 12 steps, about 40 s left",
        "fid: images: 1 of 2 images, about 60 s left",
    ]


def test_other_ranks_show_and_log_nothing(
    second_rank: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with shown_by(seen := Seen()):
        assert list(paced("abc", 3, "shown")) == ["a", "b", "c"]
    list(paced(parts(monkeypatch, 12, 10.0), 24, "logged"))
    assert not seen.pictures
    assert not caplog.messages
