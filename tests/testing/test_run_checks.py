"""The helpers for tests: each promise fails for a plugin that breaks it, and `CountTransfers` counts once."""

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from hookdiff import Loop, UserError, hookimpl
from hookdiff.testing.companions import COMPANIONS
from hookdiff.testing.compare import assert_same
from hookdiff.testing.run_checks import assert_any_order, assert_removable, assert_resumes
from hookdiff.testing.toy import ToyObjective, toy_loop, toy_model
from hookdiff.testing.transfers import CountTransfers
from tests import faulty
from tests.conftest import StopAt, acting, refused


class Counts:
    """Keeps every promise: it counts updates, and logs a draw from a generator of its own."""

    def __init__(self) -> None:
        self.count = 0
        self.generator = torch.Generator().manual_seed(1)

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        self.count += 1
        loop.log({"count": self.count, "drawn": torch.rand((), generator=self.generator)})

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]
        self.generator.set_state(state["generator"])


def pictures() -> object:
    """Return a plugin that logs a picture from a generator without a saved seed."""
    generator = torch.Generator()
    return acting(
        after_optimizer_step=lambda loop: loop.log.images({"noise": torch.rand(1, 1, 4, 4, generator=generator)})
    )


def draws(draw: Callable[[], float]) -> Callable[[], object]:
    """Return a function that makes plugins, which log a number that `draw` returns."""
    return lambda: acting(before_step=lambda loop: loop.log({"drawn": draw()}))


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (faulty.Counts, ("step 2", "updates", 2.0, 1.0, "fields seen", "saved(...)")),
        (faulty.Forgets, ("step 2", "0.weight")),
        (faulty.Mirrors, ("step 2", "0.weight")),
        (faulty.Mangles, ("plugins/plugin/steps", 20, 8)),
        (faulty.Scales, ("step 2", "0.weight")),
        (pictures, ("step 2", "noise")),
        (faulty.Noisy, ("step 1", "noisy/number", "seed")),
        (draws(random.random), ("step 1", "drawn", "seed")),
        (draws(numpy.random.rand), ("step 1", "drawn", "seed")),
    ],
)
def test_a_plugin_that_does_not_resume_is_found_with_the_first_difference(make: Any, facts: tuple[object, ...]) -> None:
    with refused(AssertionError, type(make()).__name__, *facts):
        assert_resumes(make)


def test_a_state_that_no_checkpoint_holds_is_refused_with_its_place() -> None:
    class Odd(Counts):
        def state_dict(self) -> dict[str, Any]:
            return {"seen": {1, 2}}

    with refused(TypeError, "plugins/plugin/seen", "set"):
        assert_resumes(Odd)


def test_the_state_that_a_plugin_gets_shares_nothing_with_the_saved_run() -> None:
    class Sums:
        def __init__(self) -> None:
            self.total = torch.zeros(2)

        @hookimpl
        def after_optimizer_step(self, loop: Loop) -> None:
            self.total.add_(1)
            loop.log({"total": self.total.sum()})

        def state_dict(self) -> dict[str, Tensor]:
            return {"total": self.total}

        def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
            self.total = state["total"]

    assert_resumes(Sums, at=range(1, 20))


def test_a_state_that_runs_share_is_compared_as_it_was() -> None:
    total = torch.zeros(())

    class Shares(Counts):
        @hookimpl
        def after_optimizer_step(self, loop: Loop) -> None:
            total.add_(1)

        def state_dict(self) -> dict[str, Any]:
            return {"total": total}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            pass

    with refused(AssertionError, "plugins/plugin/total", 20):
        assert_resumes(Shares)


def test_a_run_that_a_plugin_ends_may_end_before_the_last_save() -> None:
    stops = lambda: StopAt(7)  # noqa: E731
    assert_resumes(stops)
    assert_any_order(stops)
    assert_removable(stops)
    with refused(ValueError, 7, 12):
        assert_resumes(stops, at=[12])
    with refused(ValueError, 12):
        assert_removable(stops, at=12)


def early() -> object:
    """Return a plugin that doubles the gradients in a hook that others read them in, without `trylast`."""
    return acting(after_backward=lambda loop: loop.gradients.scale_(2.0))


class Late:
    """Logs the norm of the gradients after others have changed them."""

    @hookimpl(trylast=True)
    def after_backward(self, loop: Loop) -> None:
        loop.log({"norm": loop.gradients.total_norm})


def move(loop: Loop) -> None:
    """Change the weights after the update, when others read them."""
    for parameter in loop.model.parameters():
        parameter.data.mul_(0.9)


def shadow(loop: Loop) -> dict[str, Any]:
    """Offer weights by a name that another plugin has."""
    return {"companion/average": lambda: {name: p.detach() / 2 for name, p in loop.model.named_parameters()}}


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (early, ("companion/gradients", "after average, limit, listener")),
        (Late, ("norm", "after average, limit")),
        (lambda: acting(after_optimizer_step=move), ("companion/weights", "after average, limit, listener")),
        (lambda: acting(offer_weights=shadow), ("companion/sample", "after average")),
    ],
)
def test_a_plugin_that_needs_a_place_in_the_list_is_found(make: Any, facts: tuple[object, ...]) -> None:
    with refused(AssertionError, type(make()).__name__, *facts):
        assert_any_order(make, others=COMPANIONS)


def test_an_unseeded_plugin_is_not_blamed_for_its_place() -> None:
    with refused(AssertionError, "drawn", "seed"):
        assert_any_order(draws(random.random))


@pytest.mark.parametrize(
    ("draw", "name"),
    [(random.random, "python"), (numpy.random.rand, "numpy"), (lambda: float(torch.rand(())), "torch")],
)
def test_a_draw_from_a_global_generator_is_found_with_its_hook(draw: Any, name: str) -> None:
    with refused(AssertionError, name, "before_step", "derive_seed(loop.config.seed, ...)"):
        assert_removable(draws(draw), changes="training")


def test_a_second_pass_may_draw_dropout() -> None:
    def passes(loop: Loop, batch: Any) -> None:
        loop.hook.micro_step(loop=loop, batch=batch, index=0, count=1)

    assert_removable(lambda: acting(before_step=passes), model=toy_model(dropout=0.5))


def test_a_plugin_that_changes_the_training_has_to_say_so() -> None:
    with refused(AssertionError, "changes='training'", "step 1", "0.weight"):
        assert_removable(lambda: acting(after_optimizer_step=move))
    assert_removable(lambda: acting(after_optimizer_step=move), changes="training")


def test_a_plugin_that_leaves_something_behind_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.SiLU, "forward", nn.SiLU.forward)  # the end of the test puts it back

    def patch() -> None:
        nn.SiLU.forward = nn.ReLU.forward  # type: ignore[assignment]

    with refused(AssertionError, "same process"):
        assert_removable(lambda: acting(on_start=patch), changes="training")


def test_a_plugin_without_which_its_checkpoint_does_not_load_is_found() -> None:
    def renames() -> object:
        return acting(prepare_model=lambda loop: nn.utils.parametrizations.weight_norm(loop.model[0]) and None)

    with refused(AssertionError, "0.weight", "resumed without it"):
        assert_removable(renames, changes="training")
    assert_removable(renames, changes="model")
    with refused(AssertionError, "not refused"):
        assert_removable(Counts, changes="model")


def test_a_plugin_that_cannot_start_without_its_state_is_found() -> None:
    class Expects(Counts):
        @hookimpl
        def on_ready(self, resumed: bool) -> None:
            if resumed and not self.count:
                raise UserError("no count was loaded")

    with refused(AssertionError, "no count was loaded", "fresh="):
        assert_removable(Expects)


def test_the_arguments_of_the_loop_are_passed_on_and_copied() -> None:
    model, objective = toy_model(dropout=0.5), Learned()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for check in (assert_resumes, assert_any_order, assert_removable):
        check(Counts, model=model, objective=objective, data=torch.ones(24, 4), batch_size=4, micro_batch=2, epochs=3)
    assert_same(before, dict(model.state_dict()))
    assert objective.calls == 0


class Learned(ToyObjective):
    calls = 0

    def __call__(self, net: nn.Module, batch: Any) -> Any:
        self.calls += 1
        return super().__call__(net, batch)


def test_a_plugin_that_is_the_same_object_each_time_is_refused() -> None:
    plugin = Counts()
    for check in (assert_resumes, assert_any_order, assert_removable):
        with refused(ValueError, "make_plugin"):
            check(lambda: plugin)


def test_the_toy_objective_has_log_snr_and_losses_with_their_graph() -> None:
    with toy_loop() as loop:
        for batch in loop.feed.batches(0, 0):
            batch = loop.objective.draw(batch, torch.Generator().manual_seed(0))
            output: Any = loop.objective(loop.net, batch)
            torch.testing.assert_close(output.loss, output.per_sample.mean())
            level = (batch.draws["timesteps"] + 1) / 10
            torch.testing.assert_close(output.log_snr, -2 * level.log())
            (weighted,) = torch.autograd.grad(output.per_sample[0], [next(loop.model.parameters())])
            assert weighted.abs().sum() > 0


def test_each_read_of_a_tensor_counts_once() -> None:
    vector, scalar = torch.ones(3), torch.ones(())
    with CountTransfers() as transfers:
        vector.tolist()
        scalar.tolist()
        scalar.item()
        float(scalar)
        bool(scalar)
        vector.numpy()
        vector.cpu()
        vector.to("cpu", torch.float64)
        vector.to(device="cpu")
    assert transfers.count == 9


def test_values_that_stay_on_the_device_do_not_count() -> None:
    values = torch.ones(3)
    with CountTransfers() as transfers:
        (values * 2).sum().to(torch.float64)
        values.to(values.device, non_blocking=True)
    assert transfers.count == 0
    values.tolist()
    assert transfers.count == 0


def test_a_loop_reads_once_a_step_and_an_unfused_optimizer_more_often() -> None:
    def adamw(fused: bool) -> int:
        optimizer = lambda model: torch.optim.AdamW(nn.ModuleList([model]).parameters(), fused=fused)  # noqa: E731
        with toy_loop(log_every=100, optimizers=optimizer) as loop:
            steps = loop.steps()
            next(steps)
            with CountTransfers() as transfers:
                next(steps)
                next(steps)
        return transfers.count

    assert adamw(fused=True) == 2
    assert adamw(fused=False) > 2
