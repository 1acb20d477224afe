"""Test the pass over all pictures of a source, in this process and in workers."""

import math
import multiprocessing
import os
from typing import Any

import numpy
import pytest

from hookdiff import StorageError
from hookdiff.images import Unreadable, parallel_reading, with_images


class Numbers:
    """Pictures of one pixel, the number of the picture; every tenth is broken, and a disk fails at `failing`."""

    labels, classes = None, None

    def __init__(self, num: int, failing: int = -1) -> None:
        self.num, self.failing = num, failing

    def __len__(self) -> int:
        return self.num

    def load(self, index: int) -> Any:
        if index == self.failing:
            raise StorageError("the disk is gone")
        if index % 10 == 9:
            raise ValueError("broken bytes")
        return numpy.full((1, 1, 1), index, numpy.int64)

    def describe(self, index: int) -> str:
        return f"picture {index}"


class OneAtATime(Numbers):
    one_at_a_time = True


def place_and_value(image: Any) -> tuple[int, int]:
    return os.getpid(), image.item()


@pytest.fixture(params=[0.0, math.inf], ids=["workers", "no workers"])
def worth(request, monkeypatch) -> float:
    monkeypatch.setattr(parallel_reading, "_WORTH", request.param)
    return request.param


@pytest.mark.parametrize("num", [0, 1, 9, 64, 65, 300])
def test_each_picture_comes_once_and_in_order(worth: float, num: int) -> None:
    wanted = [index for index in range(num) if index % 3]
    found = list(with_images(Numbers(num), wanted, place_and_value))
    assert [index for index, _ in found] == wanted
    for index, result in found:
        if index % 10 == 9:
            assert isinstance(result, Unreadable)
            assert str(result) == f"picture {index}: broken bytes"
        else:
            assert result[1] == index


def test_the_first_pictures_are_read_here_and_the_others_in_workers_if_that_is_worth_it(worth: float) -> None:
    places = [result[0] for _, result in with_images(Numbers(300), range(0, 300, 2), place_and_value)]
    assert (set(places[:64]), os.getpid() in places[64:]) == ({os.getpid()}, worth > 0)


def test_a_source_that_reads_one_picture_at_a_time_has_no_workers(monkeypatch) -> None:
    monkeypatch.setattr(parallel_reading, "_WORTH", 0.0)
    assert {result[0] for _, result in with_images(OneAtATime(300), range(0, 300, 2), place_and_value)} == {os.getpid()}


def test_a_failing_disk_ends_the_pass_with_one_message_and_no_worker_stays(worth: float) -> None:
    before = multiprocessing.active_children()
    with pytest.raises(StorageError) as failed:
        list(with_images(Numbers(300, failing=200), range(0, 300, 2), place_and_value))
    assert str(failed.value) == "the disk is gone"
    assert set(multiprocessing.active_children()) <= set(before)


def test_a_pass_that_is_left_early_leaves_no_worker(worth: float) -> None:
    before = multiprocessing.active_children()
    found = with_images(Numbers(1000), range(0, 1000, 2), place_and_value)
    for index, _ in found:
        if index == 200:
            break
    found.close()
    assert set(multiprocessing.active_children()) <= set(before)
