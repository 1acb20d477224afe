import json
import logging
import math
from contextlib import suppress
from itertools import islice

import pytest
import torch
from torch import nn

from hookdiff import PASS, HookError, Loop, LossOutput, SampleRequest, UserError, builtin_plugins, hookimpl
from hookdiff.cli.summary import run_summary
from hookdiff.machine.randomness import derive_seed
from hookdiff.testing import ToyObjective, assert_same, on_ranks, toy_loop, toy_model, weights
from tests.conftest import Clock, Logged, RollsBack, acting, check_facts, check_one, kept, ran, refused


def recorder(calls):
    """Return a plugin that adds each call of its hooks to the list."""
    return acting(
        prepare_model=lambda: calls.append("prepare_model"),
        on_start=lambda: calls.append("on_start"),
        before_step=lambda loop: calls.append(f"before_step {loop.progress.step}"),
        after_backward=lambda: calls.append("after_backward"),
        after_optimizer_step=lambda loop: calls.append(f"after_optimizer_step {loop.progress.step}"),
        on_epoch_end=lambda loop: calls.append(f"on_epoch_end {loop.progress.epoch}"),
        on_nan=lambda report: calls.append(f"on_nan {report.position}"),
        on_stop=lambda reason: calls.append(f"on_stop {reason}"),
    )


def named(hook, calls):
    return [call for call in calls if call.startswith(hook)]


def test_weights_are_those_of_a_hand_written_loop():
    loop = ran(toy_loop(steps=7, seed=3))
    model, data = toy_model(), torch.linspace(-1, 1, 160).reshape(40, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    order = torch.cat(
        [torch.randperm(40, generator=torch.Generator().manual_seed(derive_seed(3, "data", e))) for e in (0, 1)]
    )
    for position in range(7):
        x = data[order[8 * position : 8 * position + 8]]
        generator = torch.Generator().manual_seed(derive_seed(3, "noise", position))
        noise = torch.randn(x.shape, generator=generator)
        level = (torch.randint(0, 10, (8,), generator=generator).unsqueeze(1) + 1) / 10
        loss = (model(x + level * noise) - noise).square().mean(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert_same(weights(loop), model.state_dict())


def test_hooks_fire_in_the_order_of_the_contract():
    assert toy_loop({"recorder": recorder(calls := [])}, steps=6, batch_size=20).run() == "done"
    step = ["before_step {}", "after_backward", "after_optimizer_step {}"]
    expected = ["prepare_model", "on_start"]
    for number in range(6):
        expected += [step[0].format(number), step[1], step[2].format(number + 1)]
        if number % 2:
            expected.append(f"on_epoch_end {(number + 1) // 2}")
    assert calls == [*expected, "on_stop done"]


def test_the_last_step_of_a_run_does_not_end_its_epoch():
    toy_loop({"recorder": recorder(calls := [])}, steps=3).run()
    assert named("on_epoch_end", calls) == []


def test_a_run_can_be_counted_in_epochs():
    loop = toy_loop({"recorder": recorder(calls := [])}, epochs=2)
    assert loop.run() == "done"
    assert (loop.progress.step, named("on_epoch_end", calls)) == (10, ["on_epoch_end 1", "on_epoch_end 2"])


def test_max_time_ends_the_run_after_a_step(monkeypatch):
    loop = toy_loop({"clock": Clock(monkeypatch)}, steps=10**6, max_time="25 s")
    assert (loop.run(), loop.progress.step) == ("time", 3)


class Starts:
    """Writes down that it started and stopped, and fails in some of its hooks."""

    def __init__(self, name, heard, *fails):
        self.name, self.heard, self.fails = name, heard, fails

    def note(self, hook):
        self.heard.append(f"{self.name} {hook}")
        if hook in self.fails:
            raise RuntimeError(f"{self.name} failed in {hook}")

    @hookimpl
    def on_start(self):
        self.note("on_start")

    @hookimpl
    def after_backward(self):
        self.note("after_backward")

    @hookimpl
    def on_stop(self):
        self.note("on_stop")


def test_on_stop_reaches_all_plugins_and_the_first_error_is_raised(caplog):
    heard = []
    plugins = {
        name: Starts(name, heard, *fails) for name, fails in {"a": ["on_stop"], "b": ["on_stop"], "c": []}.items()
    }
    with refused(RuntimeError, "a", "on_stop"):
        toy_loop(plugins, steps=1).run()
    assert [entry for entry in heard if "on_stop" in entry] == ["a on_stop", "b on_stop", "c on_stop"]
    check_facts(caplog.text, "'b'", "'on_stop'", "b failed in on_stop")


def test_on_stop_reaches_those_that_started_and_does_not_hide_the_error_of_the_other(caplog):
    heard = []
    plugins = {"a": Starts("a", heard, "on_stop"), "b": Starts("b", heard, "on_start"), "c": Starts("c", heard)}
    with refused(RuntimeError, "b", "on_start"):
        toy_loop({**plugins, "has nothing to start": acting(on_stop=lambda: heard.append("on_stop"))}).run()
    assert heard == ["a on_start", "b on_start", "a on_stop", "on_stop"]
    check_facts(caplog.text, "a failed in on_stop")


def test_an_error_of_a_step_is_not_hidden_by_on_stop(caplog):
    with refused(RuntimeError, "a", "after_backward"):
        toy_loop({"a": Starts("a", [], "after_backward", "on_stop")}).run()
    check_facts(caplog.text, "a failed in on_stop")


def test_a_loop_that_runs_again_starts_and_stops_again():
    heard = []
    ran(ran(toy_loop({"a": Starts("a", heard)}, steps=1)))
    assert heard == ["a on_start", "a after_backward", "a on_stop", "a on_start", "a on_stop"]


@pytest.mark.parametrize("words", [("plugin", "fd is below 3"), ("fd is below 3",), ("fd", "is below 3")])
def test_a_stop_has_a_message_that_the_run_records(tmp_path, words):
    stops = acting(after_optimizer_step=lambda loop: loop.stop(*words))
    loop = toy_loop({**builtin_plugins(signals=False), "stops": stops}, run_dir=tmp_path / "run")
    assert loop.run() == "plugin"
    assert loop.end.message == ("fd: is below 3" if words[0] == "fd" else "fd is below 3")
    record = json.loads((tmp_path / "run" / "outcome.json").read_text())
    assert record == {"reason": "plugin", "message": loop.end.message, "step": 1, "epoch": 0}
    check_facts(run_summary(loop, "plugin", "mine", 1.0), loop.end.message)


@pytest.mark.parametrize("reason", ["done", "time", "signal", "on_nan", "error"])
def test_each_reason_of_a_stop_stays_itself_and_others_are_strings(reason):
    loop = toy_loop()
    for wrong in ((None,), (3,), ("plugin", ValueError("x"))):
        with refused(TypeError, "reason", "message", repr(wrong[-1])):
            loop.stop(*wrong)
    loop.stop(reason, "why")
    assert (loop.end.reason, loop.end.message) == (reason, "why")


def test_a_run_without_a_length_is_refused_and_single_steps_need_none():
    loop = Loop(toy_model(), lambda m: torch.optim.SGD(m.parameters(), lr=0.1), ToyObjective(), torch.zeros(128, 4))
    for train in (loop.run, lambda: list(loop.steps())):
        with refused(UserError, "LoopConfig(steps=1000)", "epochs", "max_time"):
            train()
    with loop:
        assert [step.step for step in loop.run_epoch()] == [1]


class Ready:
    """Writes down the calls of on_ready, and what the loop had loaded by then."""

    def __init__(self, stops=False):
        self.heard, self.stops, self.count = [], stops, 0

    @hookimpl
    def on_ready(self, loop, resumed):
        self.heard.append((resumed, loop.progress.step, self.count))
        if self.stops:
            loop.stop("plugin", "nothing to do")

    @hookimpl
    def after_optimizer_step(self):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_on_ready_is_called_once_after_every_state_is_loaded():
    ready, again, done = Ready(), Ready(), Ready()
    memory = kept({"ready": ready}, at=5)
    toy_loop({"ready": again, "memory": memory}, steps=8).run()
    toy_loop({"ready": done, "memory": memory}, steps=5).run()  # no step is left
    assert [one.heard for one in (ready, again, done)] == [[(False, 0, 0)], [(True, 5, 5)], []]


@pytest.mark.parametrize("by", ["steps", "run_epoch", "run_step"])
def test_a_run_that_is_stopped_in_on_ready_trains_nothing(by):
    loop = toy_loop({"ready": (ready := Ready(stops=True)), "recorder": recorder(calls := [])})
    before = weights(loop)
    with loop:
        if by == "run_step":
            assert loop.run_step(next(iter(loop.feed.batches(0)))).outcome == "stopped"
        else:
            assert list(getattr(loop, by)()) == []
    assert (len(ready.heard), loop.end.reason, loop.end.message) == (1, "plugin", "nothing to do")
    assert named("before_step", calls) == []
    assert_same(weights(loop), before)


class Between:
    """Notes the step and the outcome at each `between_steps`, and the calls at the end; raises an error at `fails`."""

    def __init__(self, fails=0):
        self.fails, self.heard = fails, []

    @hookimpl
    def make_batch(self, loop, batch):
        return batch[:0] if loop.progress.position == 1 else batch  # the second batch is skipped

    @hookimpl
    def between_steps(self, loop, step):
        self.heard.append(step and (step.step, step.outcome))
        if loop.progress.step == self.fails:
            raise RuntimeError("between")

    @hookimpl
    def on_exception(self, error):
        self.heard.append(str(error))

    @hookimpl
    def on_stop(self, reason):
        self.heard.append(reason)


def by_steps(loop):
    for _ in loop.steps():
        pass


def by_steps_and_break(loop):
    for step in loop.steps():
        if step.step == 3:
            break


def by_run_step(loop):
    for batch in islice(loop.feed.batches(0), 4):
        loop.run_step(batch)


def in_turn(loop):
    batches = loop.feed.batches(0)
    loop.run_step(next(batches))
    loop.run_step(next(batches))
    for _ in loop.steps():
        pass


FOUR = [(1, "updated"), (1, "skipped"), (2, "updated"), (3, "updated")]


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        (by_steps, [*FOUR, "done"]),
        (by_steps_and_break, [*FOUR, "plugin"]),
        (by_run_step, [*FOUR, "plugin"]),
        (in_turn, [*FOUR, "done"]),
    ],
)
def test_between_steps_is_called_once_for_each_step(train, expected):
    with toy_loop({"between": (between := Between())}, steps=3, batch_size=5) as loop:
        train(loop)
    assert between.heard == expected


def test_a_save_that_one_rank_asks_for_reaches_all_at_the_same_step():
    def heard_by(rank):
        ask = lambda loop: loop.save() if loop.progress.step == (3, 6)[rank] else None  # noqa: E731
        asks = acting(**{("before_step", "after_optimizer_step")[rank]: ask})  # before or after the ranks' exchange
        hears, heard = acting(on_save_request=lambda loop: heard.append(loop.progress.step)), []
        toy_loop({"asks": asks, "hears": hears}, steps=9).run()
        return heard

    assert on_ranks(2, heard_by) == [[4, 7]] * 2


def test_an_error_between_steps_ends_the_run_and_is_not_followed_by_another_call():
    between = Between(fails=1)
    loop = toy_loop({"between": between}, batch_size=10)
    with pytest.raises(RuntimeError, match="between"), loop:
        loop.run_step(next(loop.feed.batches(0)))  # the error is raised at the end of the `with`
    assert between.heard == [(1, "updated"), "between", "error"]
    assert loop.end.message == "RuntimeError: between"

    between.heard, between.fails = [], 0
    with suppress(ValueError), loop:
        loop.run_step(next(loop.feed.batches(0)))
        raise ValueError("of the script")
    with loop:
        pass
    assert between.heard == ["of the script", "error", "plugin"]


def test_on_ready_is_not_called_in_a_loop_that_only_samples_or_after_a_rollback():
    ready = Ready()
    with toy_loop({"ready": ready}) as loop:
        loop.sample(SampleRequest(2))
    assert ready.heard == []

    toy_loop({"ready": ready, "back": RollsBack(at=5, position=6)}, steps=8).run()
    assert len(ready.heard) == 1


def test_an_error_reaches_on_exception_before_on_stop_and_the_resources_are_closed():
    heard = []

    class Hears:
        @hookimpl
        def on_start(self, loop):
            loop.resources.callback(heard.append, "closed")

        @hookimpl
        def on_exception(self, loop, error):
            heard.append((type(error), loop.progress.step))
            raise RuntimeError("its own")

        @hookimpl
        def on_stop(self, reason):
            heard.append(reason)

    with refused(RuntimeError, "a", "after_backward"):
        toy_loop({"a": Starts("a", [], "after_backward"), "hears": Hears()}).run()
    assert heard == [(RuntimeError, 0), "error", "closed"]
    heard.clear()
    toy_loop({"hears": Hears()}, steps=1).run()
    assert heard == ["done", "closed"]


class Thaws:
    """Freezes the last layer, and thaws it before step 3."""

    @hookimpl
    def prepare_model(self, loop):
        loop.model[-1].requires_grad_(False)

    @hookimpl
    def before_step(self, loop):
        loop.model[-1].requires_grad_(loop.progress.step >= 2)


def test_a_weight_that_is_thawed_is_in_the_norm_and_the_finite_check():
    found = []

    def norms(loop):
        grads = [p.grad for p in loop.model.parameters() if p.grad is not None]
        found.append((len(grads), loop.gradients.total_norm, float(torch.cat([*map(torch.ravel, grads)]).norm())))

    toy_loop({"thaws": Thaws(), "norms": acting(after_backward=norms)}, steps=4).run()
    assert found[1][0] < found[2][0]
    for _, read, expected in found:
        assert read == pytest.approx(expected, rel=1e-5)

    class Spoils:
        @hookimpl(wrapper=True)
        def backward(self, loop):
            done = yield
            for parameter in loop.model[-1].parameters():
                if parameter.grad is not None:
                    parameter.grad.fill_(math.nan)
            return done

    loop = toy_loop({"thaws": Thaws(), "spoils": Spoils(), "recorder": recorder(calls := [])}, steps=4)
    assert (loop.run(), named("on_nan", calls)) == ("on_nan", ["on_nan 2"])
    assert all(value.isfinite().all() for value in weights(loop).values())


def test_a_weight_that_no_optimizer_holds_is_warned_of_once(caplog):
    def first_layer(model):
        return torch.optim.SGD(model[0].parameters(), lr=0.1)

    for plugins in ({"thaws": Thaws()}, {}):
        caplog.clear()
        toy_loop(plugins, optimizers=first_layer).run()
        check_one(caplog.messages, "3.weight", "3.bias")


def test_pull_style_gives_the_loss_logs_values_and_can_stop():
    logged, calls, losses = Logged(), [], []
    with toy_loop({"logged": logged, "recorder": recorder(calls)}) as loop:
        for step in loop.steps():
            losses.append(step.loss)
            loop.log({"mine": step.loss})
            if step.step == 7:
                break
    assert (len(losses), calls[-1]) == (7, "on_stop plugin")
    assert logged.of("mine")[7] == pytest.approx(losses[6])
    assert logged.of("loss")[5] == pytest.approx(sum(losses[:5]) / 5)


def test_an_uneven_last_micro_batch_counts_by_its_samples():
    # Micro-batches of 4 and 2 samples with gradients 1, 2, 3, 4 and 10, 20: the mean is 40 / 6, not the mean of means.
    gradients = torch.tensor([1.0, 2, 3, 4, 10, 20]).unsqueeze(1)
    parts = {"model": nn.Linear(1, 1, bias=False), "objective": lambda net, batch: net(batch.inputs).squeeze(1)}
    loop = toy_loop(**parts, data=gradients, steps=1, batch_size=6, micro_batch=4)
    assert ran(loop).gradients.named()["weight"].item() == pytest.approx(40 / 6)


def test_each_micro_batch_has_a_dropout_of_its_own():
    masks = []

    def objective(net, batch):
        masks.append(nn.functional.dropout(torch.ones(64)))
        return net(batch.inputs).square().mean(1)

    ran(toy_loop(objective=objective, steps=1, batch_size=8, micro_batch=4))
    assert not torch.equal(*masks)


def test_dropout_is_a_function_of_the_position():
    one, other = (toy_loop(model=toy_model(dropout=0.5)) for _ in range(2))
    one.run()
    with other:
        for _ in other.steps():
            torch.rand(100)  # a script that draws numbers of its own
    assert_same(weights(one), weights(other))


class NaNAt:
    """An objective with a NaN loss at the draws in `bad`, or with only a gradient that is not finite."""

    def __init__(self, bad, gradient_only=False):
        self.bad, self.gradient_only, self.noises = bad, gradient_only, []
        self.inner = ToyObjective()

    def draw(self, batch, generator):
        batch = self.inner.draw(batch, generator)
        self.noises.append(batch.draws["noise"])
        return batch

    def __call__(self, net, batch):
        output = self.inner(net, batch)
        if len(self.noises) - 1 not in self.bad:
            return output
        if self.gradient_only:
            weight = next(net.parameters())
            return LossOutput(output.loss + (weight - weight).sqrt().sum() * 0)  # forward: 0; backward: 0 * inf
        return LossOutput(output.loss * math.nan, output.per_sample * math.nan)


@pytest.mark.parametrize("gradient_only", [False, True])
def test_a_nan_reaches_on_nan_before_any_weight_changes(gradient_only, caplog):
    loop = toy_loop({"recorder": recorder(calls := [])}, objective=NaNAt({2}, gradient_only))
    before = []
    with caplog.at_level(logging.ERROR), loop:
        for step in loop.steps():
            if step.outcome == "stopped":
                break
            before.append(weights(loop))
    assert (named("on_nan", calls), loop.end.reason) == (["on_nan 2"], "on_nan")
    assert_same(weights(loop), before[-1])
    assert loop.progress.step == loop.progress.position == 2  # a resumed run gets the same batch again
    assert ("0.weight" in caplog.text) or not gradient_only
    assert math.isfinite(step.loss) == gradient_only


def test_a_trial_counts_on_from_another_step():
    loop, made = toy_loop(steps=10), []
    with loop:
        for step in loop.steps():
            made.append(step.step)
            if step.step == 2:
                loop.set_step(8)
    assert (made, loop.progress.position) == ([1, 2, 9, 10], 4)


SKIP = acting(on_nan=lambda: "skip")


def test_a_skipped_step_gets_new_noise_and_is_not_counted():
    objective = NaNAt({2})
    loop = toy_loop({"skip": SKIP}, objective=objective, steps=4)
    assert (loop.run(), loop.progress.step, loop.progress.position) == ("done", 4, 5)
    assert not torch.equal(objective.noises[2], objective.noises[3])


# As if gradients in float16 had overflowed.
OVERFLOWS = acting(unscale=lambda loop: loop.progress.position != 2)


@pytest.mark.parametrize(("plugin", "bad", "outcome"), [(SKIP, {2}, "skipped"), (OVERFLOWS, {}, "void")])
def test_a_skipped_step_leaves_the_buffers_as_they_were(plugin, bad, outcome):
    model = nn.Sequential(nn.BatchNorm1d(4), toy_model())
    kept, outcomes = {}, []
    with toy_loop({"skips": plugin}, model=model, objective=NaNAt(bad), steps=3) as loop:
        for step in loop.steps():
            before, kept = kept, {name: buffer.clone() for name, buffer in model.named_buffers()}
            outcomes.append(step.outcome)
            assert kept["0.num_batches_tracked"] == step.step
            if step.outcome == outcome:
                assert_same(kept, before)
    assert outcomes == ["updated", "updated", outcome, "updated"]


def test_the_strongest_verdict_wins(caplog):
    plugins = {"skip": SKIP, "stop": acting(on_nan=lambda: "stop")}
    assert toy_loop(plugins, objective=NaNAt({1})).run() == "on_nan"


@pytest.mark.parametrize(("verdict", "facts"), [("stop", ["stop", "resumed"]), ("skip", ["skip"])])
def test_the_report_has_the_notes_of_plugins_and_the_verdict(verdict, facts, caplog):
    def note(report):
        report.notes["mine"] = "first\nsecond"
        return verdict

    loop = ran(toy_loop({"note": acting(on_nan=note)}, objective=NaNAt({1}), steps=2))
    (text,) = caplog.messages
    notes, _, following = text.partition("on_nan")
    assert "\n  mine: first\n    second\n" in notes
    check_facts(following, *facts)
    check_facts(notes, *(f"sample {index}" for index in loop.feed.order(0)[8:16].tolist()))


def test_an_unknown_verdict_is_an_error():
    with refused(HookError, "retry", "stop", "rollback", "skip"):
        toy_loop({"odd": acting(on_nan=lambda: "retry")}, objective=NaNAt({1})).run()


def test_an_infinite_norm_of_finite_gradients_is_no_nan():
    class Huge:
        @hookimpl(trylast=True)
        def backward(self, loop, loss):
            (loss * 1e25).backward()
            return True

    norms, calls = [], []
    look = acting(after_backward=lambda loop: norms.append(loop.gradients.total_norm))
    toy_loop({"huge": Huge(), "look": look, "recorder": recorder(calls)}, steps=2).run()
    assert named("on_nan", calls) == []
    assert all(math.isfinite(norm) and norm > 1e20 for norm in norms)


def test_a_held_update_is_not_counted():
    hold = acting(optimizer_step=lambda loop: False if loop.progress.position == 1 else PASS)
    loop = ran(toy_loop({"hold": hold, "recorder": recorder(calls := [])}, steps=3))
    assert named("after_optimizer_step", calls) == [f"after_optimizer_step {n}" for n in (1, 2, 3)]
    assert loop.progress.position == 4


def test_several_optimizers_all_step():
    def optimizers(model):
        return [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.AdamW(model[3].parameters(), lr=0.1)]

    loop = toy_loop(optimizers=optimizers, steps=1)
    before = weights(loop)
    loop.run()
    assert not torch.equal(before["0.weight"], weights(loop)["0.weight"])
    assert not torch.equal(before["3.weight"], weights(loop)["3.weight"])


def test_optimizers_are_made_from_the_prepared_model():
    def freeze(loop):
        loop.model[0].requires_grad_(False)

    held = []

    def optimizers(model):
        held.extend(name for name, p in model.named_parameters() if p.requires_grad)
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    toy_loop({"freeze": acting(prepare_model=freeze)}, optimizers=optimizers, steps=1).run()
    assert held == ["3.weight", "3.bias"]


def test_sampling_does_not_change_the_training():
    def look(loop):
        assert loop.sample(SampleRequest(5)).images.shape == (5, 4)

    looks = {"look": acting(after_optimizer_step=look)}
    plain, looked = (ran(toy_loop(plugins, model=toy_model(dropout=0.3))) for plugins in ({}, looks))
    assert_same(weights(plain), weights(looked))
    assert looked.model.training


def test_two_loops_in_one_process_are_independent():
    alone = ran(toy_loop(seed=1))
    with toy_loop(seed=1) as one, toy_loop(seed=2) as two:
        for _ in zip(one.steps(), two.steps(), strict=True):
            pass
    assert_same(weights(one), weights(alone))
