import json
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from hookdiff.run_dir.lines import Logged, Tail
from hookdiff.run_dir.metrics_jsonl import parse_metrics


def text(steps: Iterable[int], time: float = 0.0) -> str:
    return "".join(f"{json.dumps({'step': step, 'time': time})}\n" for step in steps)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def tail_of(path: Path) -> Tail[Logged[float]]:
    return Tail(path, parse_metrics)


def steps(tail: Tail[Logged[float]]) -> tuple[bool, list[int]]:
    anew, lines = tail.read()
    return anew, [line.step for line in lines]


def append(path: Path, more: str) -> None:
    with path.open("a") as file:
        file.write(more)


def test_only_new_lines_are_read(path: Path) -> None:
    path.write_text(text([1, 2]))
    tail = tail_of(path)
    assert steps(tail) == (True, [1, 2])
    assert steps(tail) == (False, [])
    append(path, text([3, 4]))
    assert steps(tail) == (False, [3, 4])
    append(path, f"damaged\n{text([5])}[]\n")
    assert steps(tail) == (False, [5])


def test_a_half_written_line_is_read_when_it_is_whole(path: Path) -> None:
    path.write_text(text([1]))
    tail = tail_of(path)
    line = text([2])
    append(path, line[:7])
    assert steps(tail) == (True, [1])
    append(path, line[7:-1])
    assert steps(tail) == (False, [])
    append(path, line[-1:])
    assert steps(tail) == (False, [2])


def test_a_file_that_was_cut_begins_anew(path: Path) -> None:
    path.write_text(text(range(5)))
    tail = tail_of(path)
    tail.read()
    os.truncate(path, len(text(range(3))))
    assert steps(tail) == (True, [0, 1, 2])
    append(path, text([3]))
    assert steps(tail) == (False, [3])
    os.truncate(path, 0)
    assert steps(tail) == (True, [])
    append(path, text([7]))
    assert steps(tail) == (False, [7])


@pytest.mark.parametrize("more", [2, 3, 10])  # lines: fewer, as many and more than were cut
def test_a_file_that_was_cut_and_has_grown_meanwhile_begins_anew(path: Path, more: int) -> None:
    path.write_text(text(range(10, 20)))
    tail = tail_of(path)
    tail.read()
    os.truncate(path, len(text(range(10, 17))))
    append(path, text(range(17, 17 + more), time=1.0))  # as a resumed run writes them: the same steps, at other times
    assert steps(tail) == (True, [*range(10, 17 + more)])


def test_a_file_that_was_replaced_begins_anew(path: Path) -> None:
    path.write_text(text([1, 2]))
    tail = tail_of(path)
    tail.read()
    other = path.with_name("other")
    other.write_text(text([1, 2, 3]))
    other.replace(path)
    assert steps(tail) == (True, [1, 2, 3])
    path.write_text(text([4, 5], time=2.0))  # in place, with the number of the old file
    assert steps(tail) == (True, [4, 5])


def test_a_file_that_was_removed_begins_anew_once(path: Path) -> None:
    tail = tail_of(path)
    assert steps(tail) == (False, [])
    path.write_text(text([1]))
    assert steps(tail) == (True, [1])
    path.unlink()
    assert steps(tail) == (True, [])
    assert steps(tail) == (False, [])
    path.write_text(text([1]))
    assert steps(tail) == (True, [1])
    path.unlink()
    path.mkdir()
    assert steps(tail) == (True, [])


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.integers(0, 3)),
            st.tuples(st.just("cut"), st.integers(0, 100)),
            st.tuples(st.just("replace"), st.integers(0, 3)),
            st.tuples(st.just("remove"), st.just(0)),
            st.tuples(st.just("read"), st.just(0)),
        )
    )
)
def test_what_was_read_is_always_what_the_file_has(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[str, int]]
) -> None:
    path = tmp_path_factory.mktemp("tail") / "metrics.jsonl"
    tail, known, count = tail_of(path), [], 0
    for change, number in [*changes, ("read", 0)]:
        content = path.read_text() if path.exists() else ""
        if change == "append":
            count += 1
            append(path, text(range(number), time=count))
        elif change == "cut" and path.exists():
            os.truncate(path, len(content[: content.rfind("\n", 0, number) + 1]))
        elif change == "replace":
            count += 1
            path.with_name("new").write_text(text(range(number), time=count))
            path.with_name("new").replace(path)
        elif change == "remove":
            path.unlink(missing_ok=True)
        elif change == "read":
            anew, lines = tail.read()
            known = lines if anew else known + lines
            assert known == [parse_metrics(json.loads(line)) for line in content.splitlines()]
