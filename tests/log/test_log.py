import json
import logging
import math
import struct
from collections.abc import Generator, Mapping
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, strategies as st

from hookdiff import PASS, Batch, Finding, Loop, Verdict, hookimpl
from hookdiff.log import Picture, panel_layouts
from hookdiff.log.event import Event, Severity
from hookdiff.testing import CountTransfers, toy_loop
from tests.conftest import Logged, RollsBack, acting, check_facts, refused


class Sink(Logged):
    """Records the values and the images that are logged."""

    def __init__(self) -> None:
        super().__init__()
        self.pictures = dict[int, Mapping[str, Picture]]()

    @hookimpl
    def on_images(self, step: int, images: Mapping[str, Picture]) -> None:
        self.pictures[step] = images


def averaged(values: list[float], as_tensor: bool = False, cuts: tuple[int, ...] = ()) -> list[float]:
    """Average one value a step; after the steps in `cuts` take the state of the log, as a checkpoint does."""

    def log(loop: Loop) -> None:
        value = values[loop.progress.step - 1]
        loop.log.average({"mine": torch.tensor(value) if as_tensor else value})
        if loop.progress.step in cuts:
            loop.log.state_dict()

    sink = Sink()
    toy_loop({"average": acting(after_optimizer_step=log), "sink": sink}, steps=len(values), log_every=5).run()
    return list(sink.of("mine").values())


def test_a_mean_is_over_the_steps_since_the_last_log() -> None:
    values = [float(n * n) for n in range(12)]
    assert averaged(values) == [sum(values[:5]) / 5, sum(values[5:10]) / 5]  # the last window is not full


@given(
    values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=10, max_size=10),
    cuts=st.sets(st.integers(1, 10)).map(tuple),
    as_tensor=st.booleans(),
)
def test_a_window_cut_by_checkpoints_has_the_same_mean_to_the_bit(
    values: list[float], cuts: tuple[int, ...], as_tensor: bool
) -> None:
    assert averaged(values, as_tensor=as_tensor, cuts=cuts) == averaged(values)


@given(values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=10, max_size=10), cut=st.integers(1, 9))
def test_a_window_cut_by_a_resume_has_the_same_mean_to_the_bit(values: list[float], cut: int) -> None:
    sink = Sink()
    first, second = toy_loop(log_every=10), toy_loop({"sink": sink}, log_every=10)
    for loop, mine in ((first, values[:cut]), (second, values[cut:])):
        if loop is second:
            loop.log.load_state_dict(json.loads(json.dumps(first.log.state_dict())))
            loop.progress.step = cut
        for value in mine:
            loop.progress.step += 1
            loop.log.average({"mine": value})
            loop.log.flush()
    total = 0.0
    for value in values:
        total += value
    assert sink.calls == [(10, {"mine": total / 10})]


def test_a_mean_counts_only_the_steps_that_gave_a_value() -> None:
    def log(loop: Loop) -> None:
        if loop.progress.step in (2, 5):
            loop.log.average({"seldom": loop.progress.step})

    toy_loop({"seldom": acting(after_optimizer_step=log), "sink": (sink := Sink())}, steps=10).run()
    assert [values.get("seldom") for _, values in sink.calls] == [3.5, None]


def test_the_values_of_a_step_arrive_together_after_it() -> None:
    def log(loop: Loop) -> None:
        loop.log({"a": loop.progress.step})
        loop.log({"b": torch.tensor(0.5), "a": 7})

    sink = Sink()
    chatty = acting(before_step=lambda: sink.calls.append((-1, {})), after_optimizer_step=log)
    toy_loop({"chatty": chatty, "sink": sink}, steps=3, log_every=100).run()
    assert sink.calls == [entry for step in (1, 2, 3) for entry in ((-1, {}), (step, {"a": 7.0, "b": 0.5}))]


def test_values_logged_as_the_run_stops_arrive() -> None:
    late = acting(on_stop=lambda loop: loop.log({"late": 1}))
    toy_loop({"late": late, "sink": (sink := Sink())}, steps=3, log_every=100).run()
    assert sink.calls == [(3, {"late": 1.0})]


@given(
    value=st.floats(width=32)
    | st.integers(-(2**24), 2**24)
    | st.booleans()
    | st.floats(width=16).map(lambda x: torch.tensor(x, dtype=torch.float16))
)
def test_any_scalar_becomes_a_float(value: Any) -> None:
    loop = toy_loop({"sink": (sink := Sink())})
    loop.log({"value": value, "tensor": torch.tensor(float(value))})
    loop.log.flush()
    ((_, logged),) = sink.calls
    assert {type(number) for number in logged.values()} == {float}
    assert struct.pack("d", logged["value"]) == struct.pack("d", logged["tensor"]) or math.isnan(value)


def test_all_tensors_are_read_together() -> None:
    loop = toy_loop({"sink": (sink := Sink())}, log_every=1)
    loop.progress.step = 1
    with CountTransfers() as transfers:
        for number in range(50):
            loop.log({f"a{number}": torch.tensor(float(number)), "text": 1.5})
            loop.log.average({f"b{number}": torch.tensor(float(number)), "c": 2.0})
        assert transfers.count == 0
        loop.log.flush()
    assert transfers.count == 2  # one read for the values, one for the means
    ((_, logged),) = sink.calls
    assert [logged[f"a{n}"] for n in range(50)] == [logged[f"b{n}"] for n in range(50)] == list(range(50))
    assert (logged["text"], logged["c"]) == (1.5, 2.0)


def test_a_step_reads_the_device_once_for_all_plugins() -> None:
    def read(loop: Loop) -> None:
        assert loop.gradients.finite
        assert loop.gradients.total_norm > 0
        loop.gradients.scale_(0.5)
        loop.log.average({"norm": loop.gradients.total_norm, "first": loop.gradients.norms[0]})

    plugins = {name: acting(after_backward=read) for name in ("one", "other")}
    loop, reads = toy_loop(plugins, log_every=100, steps=5), []
    with loop, CountTransfers() as transfers:
        for _ in loop.steps():
            reads.append(transfers.count)
    assert reads == [1, 2, 3, 4, 5]


@pytest.mark.cuda
def test_tensors_may_be_on_any_device() -> None:
    loop = toy_loop({"sink": (sink := Sink())})
    a, b, c = (torch.tensor(float(n), device=device) for n, device in enumerate(("cuda", "cpu", "cuda")))
    loop.log({"a": a, "b": b, "c": c, "d": 3.0})
    loop.log.flush()
    assert sink.calls == [(0, {"a": 0.0, "b": 1.0, "c": 2.0, "d": 3.0})]


def test_values_with_a_graph_are_logged() -> None:
    weight = torch.ones((), requires_grad=True)
    loop = toy_loop({"sink": (sink := Sink())}, log_every=1)
    loop.progress.step = 1
    loop.log({"a": weight * 2})
    loop.log.average({"b": weight * 3})
    loop.log.flush()
    assert sink.calls == [(1, {"a": 2.0, "b": 3.0})]


@pytest.mark.parametrize("log_every", [1, 3, 7])
def test_a_log_is_due_every_log_every_steps(log_every: int) -> None:
    due = []
    look = acting(after_optimizer_step=lambda loop: due.append(loop.log.due))
    toy_loop({"look": look, "sink": (sink := Sink())}, log_every=log_every).run()
    assert [step for step, is_due in enumerate(due, 1) if is_due] == list(range(log_every, 21, log_every))
    assert [step for step, _ in sink.calls] == list(range(log_every, 21, log_every))


IN_A_BATCH = ("make_batch", "before_step", "compute_loss", "after_backward", "optimizer_step")


class InABatch:
    """Logs in a hook of each batch; by their positions, some batches are skipped, some void, not finite or held."""

    def __init__(self, hook: str) -> None:
        self.hook, self.due = hook, dict[int, bool]()

    def note(self, hook: str, loop: Loop) -> None:
        if hook != self.hook:
            return
        position = loop.progress.position
        self.due[position] = loop.log.due
        values = torch.full((2,), float(position))
        if loop.log.due:
            loop.log({"position": float(position)})
        loop.log.average({"mean": float(position)})
        loop.log.texts({"text": str(position)})
        loop.log.images({"image": torch.zeros(1, 1, 2, 2)})
        loop.log.distributions({"values": values})
        loop.log.event(Event("mine", str(position)))

    @hookimpl
    def make_batch(self, loop: Loop, batch: Batch) -> Batch:
        self.note("make_batch", loop)
        return batch[:0] if loop.progress.position == 2 else batch

    @hookimpl
    def before_step(self, loop: Loop, batch: Batch) -> None:
        self.note("before_step", loop)
        if loop.progress.position == 4:
            batch.inputs.fill_(math.nan)

    @hookimpl(wrapper=True)
    def compute_loss(self, loop: Loop) -> Generator[None, Any, Any]:
        self.note("compute_loss", loop)
        return (yield)

    @hookimpl
    def unscale(self, loop: Loop) -> bool:
        return loop.progress.position != 6

    @hookimpl
    def on_nan(self) -> Verdict:
        return "skip"

    @hookimpl
    def after_backward(self, loop: Loop) -> None:
        self.note("after_backward", loop)

    @hookimpl(wrapper=True)
    def optimizer_step(self, loop: Loop) -> Generator[None, bool, bool]:
        self.note("optimizer_step", loop)
        return (yield) and loop.progress.position != 8


@pytest.mark.parametrize("hook", IN_A_BATCH)
def test_what_a_batch_logs_is_of_its_update_or_dropped(hook: str) -> None:
    logs, step_of, position_at, steps = InABatch(hook), dict[int, int](), dict[int, int](), list[int]()
    hears = acting(
        on_event=lambda step, event: step_of.update({int(event.text): step}),
        on_texts=lambda step, texts: position_at.update({step: int(texts["text"])}),
        on_distributions=lambda step: steps.append(step),
    )
    toy_loop({"logs": logs, "hears": hears, "sink": (sink := Sink())}, log_every=2, steps=8).run()
    updates = {position: step for step, position in enumerate((0, 1, 3, 5, 7, 9, 10, 11), 1)}
    before = {position: sum(p < position for p in updates) for position in logs.due}
    assert logs.due == {position: (made + 1) % 2 == 0 for position, made in before.items()}
    assert step_of == {position: made + 1 for position, made in before.items()}
    assert position_at == {step: position for position, step in updates.items()}
    assert steps == list(sink.pictures) == list(updates.values())
    logged = dict(sink.calls)
    assert len(logged) == len(sink.calls)  # one line a step
    assert {step: values["position"] for step, values in logged.items()} == {2: 1, 4: 5, 6: 9, 8: 11}
    assert {step: values["mean"] for step, values in logged.items()} == {2: 0.5, 4: 4, 6: 8, 8: 10.5}


def test_pictures_arrive_at_once_as_bytes() -> None:
    with toy_loop({"sink": (sink := Sink())}) as loop:
        next(loop.steps())
        finished = Picture(numpy.arange(6, dtype=numpy.uint8).reshape(2, 3))
        loop.log.images({"a": torch.tensor([-1.0, 0.0, 1.0, 9.0]).reshape(1, 1, 2, 2), "b/c": finished})
        (place,) = panel_layouts(sink.pictures[1]["a"].info)
        left, top, right, bottom = place.box(0)
        pixels = sink.pictures[1]["a"].pixels[top:bottom, left:right]
        assert (pixels.dtype, pixels[0, 0], pixels[-1, -1]) == (numpy.uint8, 0, 255)
        assert sink.pictures[1]["b/c"] is finished


@pytest.mark.parametrize("name", ["", "../up", "a//b", "/root", ".hidden", "a/.b", "a\\b", "a\nb"])
def test_the_name_of_a_picture_is_that_of_a_folder(name: str) -> None:
    with refused(ValueError, "name"):
        toy_loop().log.images({name: torch.zeros(1, 1, 2, 2)})


def test_what_is_logged_before_the_first_step_arrives_when_the_run_is_ready() -> None:
    order: list[str] = []

    def log(loop: Loop) -> None:
        loop.log.event(Event("mine", "early"))
        loop.log.texts({"a": "b"})

    early = acting(
        on_start=log,
        on_ready=lambda: order.append("ready"),
        on_event=lambda step, event: order.append(f"{event.kind} {step}"),
        on_texts=lambda texts: order.append(str(texts)),
    )
    with toy_loop({"early": early}) as loop:
        assert order == []
        next(loop.steps())
        assert order == ["ready", "mine 0", "{'a': 'b'}"]
        loop.log.event(Event("mine", "at once"))
        assert order[-1] == "mine 1"
        with loop.log.muted():
            loop.log.event(Event("mine", "never"))
            loop.log.images({"c": torch.zeros(1, 1, 2, 2)})
        assert order[-1] == "mine 1"


@pytest.mark.parametrize(("severity", "level"), [("info", "INFO"), ("warning", "WARNING"), ("error", "WARNING")])
def test_a_finding_is_logged_for_people_and_as_an_event(
    severity: Severity, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    finding, events = Finding(severity, "hot", "70 degrees"), []

    with toy_loop({"hears": acting(on_event=lambda step, event: events.append((step, event)))}) as loop:
        next(loop.steps())
        loop.log.report(None)
        loop.log.report(finding)
        loop.log.report(finding, step=9)
    assert events == [(step, Event("finding", str(finding), severity)) for step in (1, 9)]
    messages = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert messages == [(level, f"step {step}: {finding}") for step in (1, 9)]


def test_other_ranks_report_nothing(second_rank: None, caplog: pytest.LogCaptureFixture) -> None:
    with toy_loop() as loop:
        next(loop.steps())
        loop.log.report(Finding("warning", "hot"))
    assert not caplog.messages


@pytest.mark.parametrize("cut", [False, True])
def test_a_held_step_does_not_log_the_means_again(cut: bool) -> None:
    def save(loop: Loop) -> None:
        if cut:
            loop.log.load_state_dict(loop.log.state_dict())

    hold = acting(
        before_step=save,
        after_backward=lambda loop: loop.log.average({"position": float(loop.progress.position)}),
        optimizer_step=lambda loop: False if loop.progress.position in (2, 3) else PASS,  # after the means of step 2
    )
    toy_loop({"hold": hold, "sink": (sink := Sink())}, log_every=2, steps=4).run()
    assert sink.of("position") == {2: 0.5, 4: 4.5}  # those of the held batches are dropped


def test_a_sum_with_its_count_is_logged_as_a_mean_unless_the_count_is_zero() -> None:
    def log(loop: Loop) -> None:
        counts, sums = torch.tensor([4.0, 0.0, 8.0]), torch.tensor([6.0, 0.0, 2.0])
        loop.log({"low": (sums[0], counts[0]), "none": (sums[1], counts[1]), "plain": 3, "high": (sums[2], 8)})

    sink = Sink()
    toy_loop({"levels": acting(after_optimizer_step=log), "sink": sink}, steps=1).run()
    assert sink.calls == [(1, {"low": 1.5, "plain": 3.0, "high": 0.25})]


@pytest.mark.parametrize("name", ["step", "time"])
def test_what_each_line_has_is_no_name_of_a_value(name: str) -> None:
    loop = toy_loop()
    with refused(ValueError, name):
        loop.log({name: 7.0})
    with refused(ValueError, name):
        loop.log.average({name: 7.0})


NO_NUMBERS: dict[str, tuple[Any, tuple[object, ...]]] = {  # and what the message has of them
    "text": ("fast", ("'fast'",)),
    "a number as text": ("3.5", ("'3.5'",)),
    "bytes": (b"3", ("b'3'",)),
    "none": (None, ("None",)),
    "list": ([1.0, 2.0], ("[1.0, 2.0]",)),
    "dict": ({"a": 1}, ("{'a': 1}",)),
    "complex": (1j, ("1j",)),
    "too large": (10**400, ("...",)),
    "triple": ((1.0, 2.0, 3.0), ("(1.0, 2.0, 3.0)",)),
    "a pair of texts": ((1.0, "2"), ("'2'",)),
    "vector": (torch.ones(3), ("(3,)", "float32")),
    "vector of one": (torch.ones(1), ("(1,)", "float32")),
    "flags": (torch.ones(2, 2).bool(), ("(2, 2)", "bool")),
    "no numbers": (torch.ones(0), ("(0,)",)),
    "complex tensor": (torch.ones((), dtype=torch.complex64), ("complex64",)),
    "array": (numpy.ones(2, bool), ("(2,)", "bool")),
    "array of one": (numpy.ones(1), ("(1,)", "float64")),
    "array of text": (numpy.array("a"), ("()", "<U1")),
}


@pytest.mark.parametrize("call", ["log", "average"])
@pytest.mark.parametrize("value", NO_NUMBERS)
def test_a_value_that_is_no_number_is_refused_in_the_plugin_that_logs_it(call: str, value: str) -> None:
    given, facts = NO_NUMBERS[value]

    def log(loop: Loop) -> None:
        (loop.log if call == "log" else loop.log.average)({"good": 1.0, "mine/x": given})

    other = acting(after_optimizer_step=lambda loop: loop.log.average({"mine": 1.0}))
    loop = toy_loop({"other": other, "guilty": acting(after_optimizer_step=log), "sink": Sink()})
    with refused(ValueError, "'mine/x'", "number", *facts) as caught:
        loop.run()
    check_facts(caught.value.__notes__[0], "'guilty'", "'after_optimizer_step'")


def test_a_mean_takes_no_pair_and_names_and_texts_are_strings() -> None:
    log = toy_loop().log
    with refused(ValueError, "'x'", "(3.0, 2)", "number"):
        log.average({"x": (3.0, 2)})  # type: ignore[dict-item]
    with refused(ValueError, "number", 7, "string"):
        log({7: 1.0})  # type: ignore[dict-item]
    with refused(ValueError, "'x'", 7, "text"):
        log.texts({"x": 7})  # type: ignore[dict-item]


def test_a_name_has_one_kind() -> None:
    log = toy_loop().log
    calls: dict[str, Any] = {
        "number": lambda name: log({name: 1.0}),
        "picture": lambda name: log.images({name: torch.zeros(1, 1, 2, 2)}),
        "text": lambda name: log.texts({name: "a"}),
        "distribution": lambda name: log.distributions({name: torch.zeros(2)}),
    }
    for kind, call in calls.items():
        call(kind)
        call(kind)
        for other in calls.keys() - {kind}:
            with refused(ValueError, kind, other):
                calls[other](kind)


def test_values_of_a_step_that_is_rolled_back_are_not_logged() -> None:
    log = acting(before_step=lambda loop: loop.log({"seen": loop.progress.position}))
    plugins = {"seen": log, "back": RollsBack(at=1, position=2), "sink": (sink := Sink())}
    toy_loop(plugins, log_every=1, steps=3).run()
    seen = [(step, values["seen"]) for step, values in sink.calls if "seen" in values]
    assert seen == [(1, 0), (2, 1), (2, 3), (3, 4)]
