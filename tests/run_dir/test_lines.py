import json
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import example, given, strategies as st

from hookdiff.run_dir.lines import Logged, Tail, read_thinned
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
    assert (steps(tail), steps(tail)) == ((True, [1, 2]), (False, []))
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
    assert (steps(tail), steps(tail)) == ((True, []), (False, []))
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
@example([("append", 3), ("read", 0), ("cut", 30), ("read", 0), ("append", 2), ("read", 0), ("cut", 0), ("read", 0)])
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


def test_of_a_long_file_all_lines_with_rare_names_are_parsed(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rare, often = {*range(700, 10_000, 1000)}, {*range(50, 10_000, 50)}  # `often` would miss every 20th line
    damaged = 5555
    with path.open("w") as file:
        for step in range(1, 10_001):
            line = {"step": step, "time": 1.0, "loss": step / 2, **({"lr \\u00e9": 1.0} if step in often else {})}
            line |= {"fd/x": -1.0} if step in rare else {}
            file.write(f"{json.dumps(line)[: 9 if step == damaged else None]}\n")
        file.write('{"step": 10001, "lo')
    lines, part = read_thinned(path, parse_metrics, 500)
    read = [line.step for line in lines]
    assert (part.every, part.num, part.size) == (20, 10_000, path.stat().st_size - len('{"step": 10001, "lo'))
    assert read == sorted(set(read))
    assert {1, *rare, *range(9901, 10_001)} <= {*read}  # the first, the rare and the newest ones
    assert len(read) < 700
    assert [line.step for line in lines if "fd/x" in line.values] == sorted(rare)
    assert 8 <= sum("lr \\u00e9" in line.values for line in lines[:-100]) <= 20
    assert all(line.values["loss"] == line.step / 2 for line in lines)
    assert [part.counts[name] for name in ("loss", "fd/x", "lr \\u00e9")] == [9999, 10, 199]
    assert f"line {damaged}," in caplog.text
    tail = Tail(path, parse_metrics, 500)
    assert steps(tail) == (True, read)
    append(path, f'ss": 1}}\n{text([10_002])}')
    assert steps(tail) == (False, [10_001, 10_002])
    whole, part = read_thinned(path, parse_metrics, 10_002)
    assert (len(whole), part.every, part.counts) == (10_001, 1, {})
