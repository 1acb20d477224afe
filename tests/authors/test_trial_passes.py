"""Passes of a step on trial: `rehearsing` leaves no trace, also after an error."""

from collections.abc import Callable, Generator, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookdiff import Batch, Loop, LossOutput, hookimpl
from hookdiff.authors.trial_passes import rehearsing
from hookdiff.disk.tree import flatten
from hookdiff.testing import assert_same, toy_loop
from hookdiff_amp import AMP
from tests.conftest import acting, ran
from tests.sam import SAM, Uncertainty


class Counts:
    """Counts losses, logs, draws, and keeps a tensor."""

    def __init__(self) -> None:
        self.sum = torch.zeros(())

    @hookimpl(wrapper=True)
    def compute_loss(self, loop: Loop) -> Generator[None, LossOutput, LossOutput]:
        output = yield
        self.sum += output.loss.detach() + torch.rand(())
        loop.log({"sum": self.sum})
        return output

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self.sum}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sum = state["sum"]


class Careless:
    """Moves weights, its own too, for a second pass, and puts them back only if nothing fails."""

    def __init__(self) -> None:
        self.fails = False

    @hookimpl
    def accumulate(self, loop: Loop, batch: Batch) -> LossOutput:
        output = loop.run_pass(batch)
        loop.gradients.zero()
        moved = [*loop.model.parameters(), *(parameter for _, parameter in loop.adopted.named_parameters())]
        with torch.no_grad():
            for parameter in moved:
                parameter.add_(0.1)
        loop.run_pass(batch)
        if self.fails:
            raise MemoryError
        with torch.no_grad():
            for parameter in moved:
                parameter.sub_(0.1)
        return output


class Net(nn.Sequential):
    """Has dropout, batch norm, a weight that no optimizer holds, and a buffer that each call replaces."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
        self.register_buffer("calls", torch.zeros(()))
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return super().forward(x) * self.gain


def look(loop: Loop) -> tuple[dict[str, Tensor], Any]:
    """Return all that a trial could change."""
    held = dict((*loop.model.named_parameters(), *loop.adopted.named_parameters()))
    grads = {f"{name} grad": p.grad.clone() for name, p in held.items() if p.grad is not None}
    tensors, tree = flatten(loop.state_dict())
    names = loop.log.names  # now, because the state of a log has its values flushed
    gradients = loop.gradients
    known = (gradients.loss, gradients.total_norm, gradients.finite, gradients.overflowed, gradients.norms.tolist())
    values = {
        **{name: tensor.detach().clone() for name, tensor in tensors.items()},
        **grads,
        "rng": torch.get_rng_state(),
    }
    return values, (tree, known, loop.config, loop.hparams, names, [id(p.grad) for p in held.values()])


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("kind", [SAM, Careless])
def test_it_leaves_no_trace(kind: Callable[[], Any], fails: bool) -> None:
    moves = kind()
    plugins = {"counts": Counts(), "amp": AMP("fp16"), "moves": moves, "weight": Uncertainty()}
    seen: list[Any] = []

    def trial(loop: Loop) -> None:
        batch = loop.objective.draw(next(loop.feed.batches(0)), torch.Generator())
        loop.log({"mine": 1.0})
        loop.log.flush()
        before = look(loop)
        with pytest.raises(MemoryError) if fails else nullcontext(), rehearsing(loop) as passes:
            loop.set_micro_batch(2)
            passes(batch)
            if isinstance(moves, Careless):
                moves.fails = fails
            passes(batch[:4])
            if fails:
                raise MemoryError
        if isinstance(moves, Careless):
            moves.fails = False
        seen.append((before, look(loop)))

    toy_loop(
        {**plugins, "tries": acting(after_backward=trial)},
        model=Net(),
        optimizers=lambda model: torch.optim.AdamW([p for n, p in model.named_parameters() if n != "gain"], 0.01),
        hparams={"run": {"micro_batch": "auto"}},
        steps=3,
        micro_batch=4,
    ).run()
    assert len(seen) == 3
    for (tensors, others), (tensors_after, others_after) in seen:
        assert_same(tensors_after, tensors)
        assert others_after == others
        assert others[3] == {"run": {"micro_batch": "auto"}}


def test_the_passes_are_those_of_the_step() -> None:
    trials: list[dict[str, Tensor]] = []
    real: list[dict[str, Tensor]] = []

    def trial(loop: Loop, batch: Batch) -> None:
        with rehearsing(loop) as passes:
            output = passes(batch)
            trials.append({**loop.gradients.named(), "loss": output.loss})

    def note(loop: Loop) -> None:
        real.append({n: g.clone() for n, g in loop.gradients.named().items()} | {"loss": loop.output.loss})

    plugins = {"sam": SAM(), "weight": Uncertainty(), "tries": acting(before_step=trial, after_backward=note)}
    toy_loop(plugins, model=Net(), steps=3, micro_batch=4).run()
    assert len(real) == 3
    for tried, trained in zip(trials, real, strict=True):
        assert_same(tried, trained)


def test_a_run_with_trials_is_the_run_without() -> None:
    def trial(loop: Loop, batch: Batch) -> None:
        with rehearsing(loop) as passes:
            passes(batch)

    def state(**more: object) -> tuple[dict[str, Tensor], Any]:
        torch.manual_seed(3)
        plugins = {"sam": SAM(), "counts": Counts(), "weight": Uncertainty(), **more}
        return flatten(ran(toy_loop(plugins, model=Net(), steps=6)).state_dict())

    (tensors, tree), (expected, expected_tree) = state(tries=acting(before_step=trial)), state()
    assert_same(tensors, expected)
    assert {**tree, "versions": {}} == {**expected_tree, "versions": {}}
