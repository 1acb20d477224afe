import copy
import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from hookdiff import PASS, InMemory, Loop, UserError, hookimpl
from hookdiff.builtin.logged import Metrics
from hookdiff.disk.tree import flatten
from hookdiff.errors import NoCheckpoint
from hookdiff.testing import assert_same, toy_loop, toy_model, weights
from hookdiff_checkpoint import Checkpoint, read_checkpoint
from tests.conftest import Restores, RollBackAt, acting, check_facts, kept, outcomes, ran, refused, saved, warnings


class Momenta(Optimizer):
    """Steps along the mean of the last two gradients, kept in a list."""

    def __init__(self, weights: Any, lr: float) -> None:
        super().__init__(weights, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for weight in self.param_groups[0]["params"]:
            before = self.state[weight].get("last", {"two": [torch.zeros_like(weight)]})["two"]
            self.state[weight]["last"] = {"two": [before[-1], weight.grad.clone()]}
            weight.sub_(torch.stack(self.state[weight]["last"]["two"]).mean(0), alpha=self.param_groups[0]["lr"])


MAKERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda m: SGD(m.parameters(), lr=0.01),
    "adamw": lambda m: AdamW(m.parameters(), lr=0.01, fused=True),
    "lists of tensors": lambda m: Momenta(m.parameters(), lr=0.01),
    "several": lambda m: [AdamW(m[0].parameters(), lr=0.01), SGD(m[3].parameters(), lr=0.01, momentum=0.9)],
}


SOME_WIDE = pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=() if name in ("adamw", "several") else pytest.mark.wide)
        for name, make in MAKERS.items()
    ],
)


@SOME_WIDE
def test_any_optimizer_resumes_from_its_saved_state(make: Callable[[nn.Module], Any]) -> None:
    whole, memory = ran(toy_loop(optimizers=make)), kept(at=7, optimizers=make)
    again = ran(toy_loop({"memory": memory}, model=toy_model(seed=9), optimizers=make))
    assert_same(weights(again), weights(whole))
    assert_same(flatten(again.state_dict())[0], flatten(whole.state_dict())[0])


def test_optimizer_state_goes_by_name_and_not_by_order() -> None:
    def backwards(model: nn.Module) -> Optimizer:
        first, *others = reversed(list(model.parameters()))
        return AdamW([{"params": others[::-1]}, {"params": [first]}], lr=0.01, fused=True)

    again = ran(toy_loop({"memory": kept(at=7)}, optimizers=backwards))
    assert_same(weights(again), weights(ran(toy_loop())))


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True)], ids=["from fused", "to fused"])
def test_a_state_moves_between_kernels(before: bool, after: bool) -> None:
    def make(fused: bool) -> Callable[[nn.Module], Optimizer]:
        return lambda model: AdamW(model.parameters(), lr=0.01, fused=fused)

    memory = kept(at=7, optimizers=make(before))
    again = ran(toy_loop({"memory": memory}, optimizers=make(after)))
    for name, value in weights(ran(toy_loop())).items():
        torch.testing.assert_close(weights(again)[name], value)  # the kernels round differently


def test_hyper_parameters_come_from_the_new_optimizer() -> None:
    def other(model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=0.5, betas=(0.8, 0.9), weight_decay=0.0, fused=True)

    with toy_loop({"memory": kept(at=3)}, optimizers=other) as loop:
        (group,) = loop.optimizers[0].param_groups
        assert (group["lr"], group["betas"], group["weight_decay"]) == (0.5, (0.8, 0.9), 0.0)
        assert all(entry["step"] == 3 for entry in loop.optimizers[0].state.values())


def test_moments_keep_the_memory_format_of_their_weights() -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)

    def objective(net: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = net(batch.inputs).square().mean((1, 2, 3))
        return loss

    def loop(plugins: Mapping[str, object], **options: Any) -> Loop:
        options |= {"model": copy.deepcopy(model), "objective": objective, "data": torch.ones(8, 3, 4, 4)}
        return toy_loop(plugins, **options)

    memory = Restores(at=1)
    loop({"memory": memory}, steps=1).run()
    state = memory.state["optimizers"]["0"]["weights"]["weight"]
    state["exp_avg"] = state["exp_avg"].contiguous()  # safetensors gives back contiguous tensors
    with loop({"memory": memory}) as again:
        entry = again.optimizers[0].state[again.model.weight]  # type: ignore[index]
        assert entry["exp_avg"].is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(entry["exp_avg"], state["exp_avg"])


def test_loading_shares_no_tensor_with_the_given_state() -> None:
    memory = kept(at=3)
    before = {name: tensor.clone() for name, tensor in flatten(memory.state)[0].items()}
    toy_loop({"memory": Restores(memory.state)}).run()
    assert_same(flatten(memory.state)[0], before)


def refusal(change: Callable[[dict[str, Any]], object]) -> str:
    """Return the error message for a state that `change` has modified."""
    state = saved(ran(toy_loop(steps=2)))
    change(state)
    with pytest.raises(UserError) as error:
        toy_loop({"memory": Restores(state)}).run()
    return str(error.value)


def test_golden_message_of_a_missing_and_an_unexpected_weight() -> None:
    message = refusal(lambda state: state["model"].update({"0.wieght": state["model"].pop("0.weight")}))
    head, *lines = message.splitlines()
    assert head == "the checkpoint is of another model: 2 differences"
    assert lines == ["  missing 0.weight; did you mean '0.wieght'?", "  unexpected 0.wieght; did you mean '0.weight'?"]


def test_the_message_about_another_model_is_cut_to_a_few_lines() -> None:
    message = refusal(lambda state: state.update(model={f"x{n}": torch.zeros(1) for n in range(100)}))
    assert len(message.splitlines()) == 7
    check_facts(message.splitlines()[-1], 99)  # 4 missing and 100 unexpected: 5 are shown, 99 are not


def test_a_weight_of_another_shape_is_refused_with_both_shapes_and_the_model_left_as_it_was() -> None:
    state = saved(ran(toy_loop(steps=2)))
    state["model"]["3.bias"] = torch.zeros(5)
    other = toy_loop({"memory": Restores(state)}, model=toy_model(seed=3))
    before = weights(other)
    with refused(UserError, "3.bias", (5,), (4,)):
        other.run()
    assert_same(weights(other), before)


def test_another_number_of_optimizers_is_refused() -> None:
    check_facts(refusal(lambda state: state["optimizers"].update({"1": {}})), "optimizers", 2, 1)


def test_optimizer_state_of_a_parameter_that_is_not_held_is_refused() -> None:
    def second_layer(model: Any) -> Optimizer:
        return AdamW(model[3].parameters(), lr=0.01)

    with refused(UserError, "optimizer", "0.weight"):
        toy_loop({"memory": kept(at=2)}, optimizers=second_layer).run()


class Slowing(Optimizer):
    """Divides the learning rate by the number of steps, kept in the groups of weights."""

    def __init__(self, weights: Any, lr: float) -> None:
        super().__init__(weights, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for weight in group["params"]:
                weight.sub_(weight.grad, alpha=group["lr"] / group["count"])


def test_counts_in_the_groups_of_an_optimizer_are_restored() -> None:
    def make(lr: float, groups: int = 1) -> Callable[[nn.Module], Optimizer]:
        layers = (lambda m: [m[0], m[3]]) if groups == 2 else lambda m: [m]
        return lambda m: Slowing([{"params": list(layer.parameters())} for layer in layers(m)], lr)

    whole, memory = ran(toy_loop(optimizers=make(0.01))), kept(at=7, optimizers=make(0.01))
    again = ran(toy_loop({"memory": memory}, model=toy_model(seed=9), optimizers=make(0.01)))
    assert_same(weights(again), weights(whole))
    with toy_loop({"memory": memory}, optimizers=make(0.5)) as other:
        (group,) = other.optimizers[0].param_groups
        assert (group["lr"], group["count"]) == (0.5, 7)
    with refused(UserError, "Slowing", 1, 2):
        toy_loop({"memory": memory}, optimizers=make(0.01, groups=2)).run()


def test_another_optimizer_is_refused() -> None:
    memory = kept(at=2)
    with refused(UserError, "AdamW", "SGD"):
        toy_loop({"memory": memory}, optimizers=MAKERS["sgd"]).run()


class Counter:
    """Counts updates, and saves the count in its state."""

    def __init__(self) -> None:
        self.count = 0

    @hookimpl
    def after_optimizer_step(self) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.count = state["count"]


def test_a_plugin_without_saved_state_must_be_named_as_fresh() -> None:
    memory, counter = kept(at=7), Counter()
    with refused(UserError, "--fresh counter", "fresh=['counter']"):
        toy_loop({"memory": memory, "counter": Counter()}).run()
    loop = ran(toy_loop({"memory": memory, "counter": counter}, fresh=["counter"]))
    assert (loop.progress.step, counter.count) == (20, 13)


def test_all_plugins_without_saved_state_are_named_at_once() -> None:
    plugins = {"old": Counter(), "memory": kept(at=7), "one": Counter(), "two": Counter()}
    loop = toy_loop(plugins, fresh=["old"])
    with refused(UserError, "--fresh one --fresh two", "fresh=['old', 'one', 'two']"):
        loop.run()


def test_a_fresh_plugin_does_not_load_its_saved_state() -> None:
    memory, counter = kept({"counter": Counter()}, at=7), Counter()
    toy_loop({"memory": memory, "counter": counter}, fresh=["counter"]).run()
    assert counter.count == 13


def test_saved_state_without_its_plugin_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    loop = ran(toy_loop({"memory": kept({"counter": Counter()}, at=7)}))
    (warning,) = warnings(caplog)
    check_facts(warning, "counter")
    assert loop.progress.step == 20


def test_no_state_can_be_taken_while_weights_are_lent() -> None:
    def offer(loop: Loop) -> Any:
        return {"zeros": lambda: {name: torch.zeros_like(p) for name, p in loop.model.named_parameters()}}

    loop = toy_loop({"holds": acting(offer_weights=offer)})
    with loop.weights("zeros"), pytest.raises(AssertionError):
        loop.state_dict()


@SOME_WIDE
def test_a_rollback_restores_everything_but_the_position_in_the_data(make: Callable[[nn.Module], Any]) -> None:
    memory, counter, then = Restores(at=3), Counter(), []

    def look(loop: Loop) -> None:
        if loop.progress.position in (6, 9):
            then.append((saved(loop), loop.progress.state_dict(), counter.count))

    plugins = {"counter": counter, "memory": memory, "bad": RollBackAt(5, 8), "look": acting(before_step=look)}
    results = outcomes(toy_loop(plugins, optimizers=make, steps=10, batch_size=4))
    assert [position for position, result in enumerate(results) if result == "skipped"] == [5, 8]
    for state, progress, count in then:
        assert_same(flatten(state)[0], flatten(memory.state)[0])
        assert (progress["step"], count) == (3, 3)
    assert [progress["position"] for _, progress, _ in then] == [6, 9]
    assert [progress["samples"] for _, progress, _ in then] == [24, 36]


def test_a_rollback_restores_a_fresh_plugin_only_from_states_of_its_own_run() -> None:
    memory, counter, counts = kept({"counter": Counter()}, at=3), Counter(), []
    memory.at = 6

    def look(loop: Loop) -> None:
        if loop.progress.position in (5, 9):
            counts.append((loop.progress.step, counter.count))

    plugins = {"counter": counter, "memory": memory, "bad": RollBackAt(4, 8), "look": acting(before_step=look)}
    toy_loop(plugins, steps=8, fresh=["counter"]).run()
    # The state of step 3 is older than this run, so the counter keeps its 1; the state of step 6 has its count, 4.
    assert counts == [(3, 1), (6, 4)]


def test_a_rollback_to_the_start_removes_the_moments_of_the_optimizer() -> None:
    class Start:
        state: Any = PASS

        @hookimpl
        def on_start(self, loop: Loop) -> None:
            self.state = saved(loop)

        @hookimpl
        def restore(self) -> Any:
            return self.state

    seen = []
    look = acting(before_step=lambda loop: seen.append(len(loop.optimizers[0].state)))
    toy_loop({"start": Start(), "bad": RollBackAt(2), "look": look}, steps=3).run()
    assert seen == [0, 4, 4, 0, 4, 4]


def test_a_rollback_without_a_saved_state_stops_the_run() -> None:
    loop = toy_loop({"bad": RollBackAt(2)})
    assert loop.run() == "on_nan"
    check_facts(loop.end.message, "checkpoint")


def test_without_a_checkpoint_the_run_starts_anew_unless_a_path_was_given(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run = tmp_path / "run"
    plugins = {"metrics": Metrics(), "keeps": Restores({})}
    assert toy_loop(plugins, run_dir=run, resume=True, steps=3).run() == "done"
    assert caplog.messages == []  # there was no run directory
    assert (run / "metrics.jsonl").is_file()
    assert toy_loop(plugins, run_dir=run, resume=True, steps=3).run() == "done"
    message, replaced = caplog.messages
    check_facts(message, run, "checkpoint")
    check_facts(replaced, "metrics.jsonl", "1 line")
    for named in (run, str(run)):
        with refused(NoCheckpoint, run):
            toy_loop({"keeps": Restores({})}, run_dir=run, resume=named, steps=3).run()
    with refused(UserError, tmp_path / "rum", "'run'"):
        toy_loop({"keeps": Restores({})}, run_dir=run, resume=tmp_path / "rum", steps=3).run()


def test_a_run_that_no_plugin_restores_is_refused_and_not_changed(tmp_path: Path) -> None:
    toy_loop({"checkpoint": Checkpoint(every=2)}, run_dir=tmp_path, steps=4).run()
    before = sorted(tmp_path.rglob("*"))
    for resume in (True, tmp_path):
        with refused(UserError, tmp_path, "plugins"):
            toy_loop(run_dir=tmp_path, resume=resume, steps=8).run()
    assert sorted(tmp_path.rglob("*")) == before


def test_another_seed_is_refused(tmp_path: Path) -> None:
    def loop(seed: int, **options: Any) -> Loop:
        return toy_loop({"checkpoint": Checkpoint(every=2)}, run_dir=tmp_path, seed=seed, **options)

    loop(7, steps=2).run()
    with refused(UserError, "seed", 7, 0):
        loop(0, steps=4, resume=True).run()
    assert loop(7, steps=4, resume=True).run() == "done"


@pytest.mark.parametrize("part", ["random", "data", "versions"])
def test_an_invalid_part_of_a_state_is_named(part: str, tmp_path: Path) -> None:
    state = {**ran(toy_loop(steps=2)).state_dict(), part: None}
    with refused(UserError, part, "AttributeError"):
        toy_loop({"keeps": Restores(state)}, run_dir=tmp_path, resume=True, steps=3).run()


def test_another_number_of_samples_gives_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def loop(samples: int, **options: Any) -> Loop:
        data = torch.zeros(samples, 1, 4, 4)
        plugins = {"metrics": Metrics(), "checkpoint": Checkpoint(every=2)}
        return toy_loop(plugins, data=data, run_dir=tmp_path, **options)

    loop(40, steps=2).run()
    loop(40, steps=4, resume=True).run()
    assert not warnings(caplog)
    loop(30, steps=6, resume=True).run()
    number, parts = warnings(caplog)
    check_facts(number, "data", 30, 40)
    check_facts(parts, "pictures", "40 -> 30")


class Conditional:
    """An objective that says whether the network gets labels."""

    def __init__(self, conditional: bool) -> None:
        self.conditional = conditional

    def draw(self, batch: Any, generator: Any) -> Any:
        return batch

    def __call__(self, net: nn.Module, batch: Any) -> Tensor:
        return net(batch.inputs).square().mean()


@pytest.mark.parametrize("conditional", [True, False])
def test_classes_in_another_order_are_refused_if_the_network_gets_them(
    conditional: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def loop(classes: Sequence[str], **options: Any) -> Loop:
        data = InMemory(torch.zeros(8, 4), torch.arange(8) % 2, classes)
        plugins = {"metrics": Metrics(), "checkpoint": Checkpoint(every=2)}
        return toy_loop(plugins, data=data, objective=Conditional(conditional), run_dir=tmp_path, **options)

    loop(["ant", "bee"], steps=2).run()
    loop(["ant", "wasp", "fly", "ant"], steps=4, resume=True).run()  # another name for a number, and further ones
    loop(["ant", "wasp", "fly", "ant"], steps=6, resume=True).run()  # two classes have one name
    assert not warnings(caplog)
    swapped = loop(["fly", "ant"], steps=8, resume=True)
    if conditional:
        with refused(UserError, "'ant'", 0, 1):
            swapped.run()
    else:
        swapped.run()
        check_facts(warnings(caplog)[0], "'ant'", 0, 1)


def test_golden_line_of_changed_versions(
    tmp_path: Path, install: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    install("my-plugin", {"other": "hd_versions:Mine"}, hd_versions="class Mine:\n    pass\n")
    mine = importlib.import_module("hd_versions").Mine
    caplog.set_level(logging.INFO)

    def train(steps: int) -> None:
        caplog.clear()
        toy_loop({"mine": mine(), "checkpoint": Checkpoint()}, run_dir=tmp_path / "run", resume=True, steps=steps).run()

    def lines() -> list[str]:
        return [message for message in caplog.messages if "->" in message]

    train(2)
    train(4)
    assert lines() == []
    now = read_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000004")["versions"]
    assert now["torch"] == torch.__version__
    assert set(now) == {"python", "torch", "hookdiff", "my-plugin"}
    (metadata,) = tmp_path.glob("site/my_plugin-*/METADATA")
    metadata.write_text(metadata.read_text().replace("Version: 1.0", "Version: 1.1"))
    train(6)
    assert lines() == ["changed since the checkpoint: my-plugin 1.0 -> 1.1"]
    train(8)
    assert lines() == []


@pytest.mark.parametrize("name", ["python", "torch"])
def test_a_changed_version_is_reported_without_a_config(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = saved(ran(toy_loop(steps=2)))
    now, state["versions"][name] = state["versions"][name], "0.1"
    del state["plugins"]
    caplog.set_level(logging.INFO)
    toy_loop({"keeps": Restores({**state, "plugins": {}})}, run_dir=tmp_path, resume=True, steps=3).run()
    (line,) = [message for message in caplog.messages if "->" in message]
    check_facts(line, f"{name} 0.1 -> {now}")


def test_paths_may_be_strings(tmp_path: Path) -> None:
    plugins = {"checkpoint": Checkpoint(every=2)}
    toy_loop(plugins, run_dir=str(tmp_path / "run"), steps=2).run()
    again = ran(toy_loop(plugins, run_dir=str(tmp_path / "other"), resume=str(tmp_path / "run"), steps=4))
    assert again.first_step == 2
