"""Checks that several ranks train with a plugin as one process does."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from attrs import define
from torch import nn

from hookdiff.data.feed import Feed
from hookdiff.loop.hookspecs import hookimpl
from hookdiff.loop.loop import Loop
from hookdiff.machine.ranks import num_ranks, summed
from hookdiff.models.objective import LossOutput
from hookdiff.testing.companions import COMPANIONS
from hookdiff.testing.compare import ValueKey, all_differences, fail
from hookdiff.testing.record import Record, Runs
from hookdiff.testing.threads import on_ranks

_NUM = 41  # samples: five batches of 8, and one sample
_TOLERANCE = 1e-4  # float32 sums in another order differ by less over some steps


class _Replica(nn.Module):
    """Calls `net`. Trial passes call the model instead, so that `Averaging` does not change their gradients."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.net(*args, **kwargs)


@define(eq=False)
class Averaging:
    """Averages the gradients over the ranks after the last micro-batch, as the plugin `ddp` does."""

    @hookimpl
    def wrap_net(self, net: nn.Module) -> nn.Module:
        return _Replica(net)

    @hookimpl(wrapper=True)
    def micro_step(self, loop: Loop, index: int, count: int) -> Generator[None, LossOutput, LossOutput]:
        output = yield
        is_last = index == count - 1 and isinstance(loop.net, _Replica)
        for gradient in loop.gradients.tensors() if is_last else ():
            gradient.copy_(summed(gradient) / num_ranks())
        return output


def assert_trains_on_ranks(
    make_plugin: Callable[[], object],
    *,
    others: Mapping[str, Callable[[], object]] = COMPANIONS,
    tolerance: float = _TOLERANCE,
    except_for: Iterable[str] = (),
    **loop: Any,
) -> None:
    """Raise AssertionError unless two ranks train with the plugin as one process does, up to rounding.

    Both ranks must make the same exchanges in the same order, make the same steps, and hold the same weights after each
    step. The weights and the values that the first rank logs must be those of a run on one process, within `tolerance`
    of their size. The ranks are threads of this process, so the plugin must not use torch.distributed itself, but
    `loop.reduce`, `loop.agree` and `hookdiff.machine.ranks`.

    Args:
        make_plugin: returns a new plugin.
        others: functions that make the other plugins of the run, by name.
        tolerance: largest difference, relative to the size of a value.
        except_for: patterns of logged names that may differ, such as measurements on some samples of the first rank.
        loop: further arguments of `toy_loop`; a model with dropout cannot be the same on two ranks. By default each
            epoch ends with a batch of one sample: the second rank gets a filler instead, and such a step is logged.
    """
    patterns = list(except_for)
    odd = Feed(torch.linspace(-1, 1, 4 * _NUM).reshape(_NUM, 4), drop_last=False)
    loop = {"data": odd, "log_every": 3, **loop}
    with Runs(make_plugin, {**others, "averaging": Averaging}, loop) as runs:
        alone, run_dir = Record("one process"), runs.new_folder()
        runs.train(alone)

        def train(rank: int) -> Record:
            record = Record(f"rank {rank} of 2")
            runs.train(record, run_dir=run_dir)
            return record

        first, second = on_ranks(2, train)
    ours, its = ({k: v for k, v in record.values.items() if k.kind == "weight"} for record in (first, second))
    facts = [each.describe(first.name, second.name) for each in all_differences(ours, its)]

    def compared(record: Record) -> dict[ValueKey, Any]:
        """Return the values of each step; None for a picture, which only has to exist."""
        values = {key: None if key.kind == "logged picture" else value for key, value in record.steps.items()}
        numbers = [key for key in values if key.kind == "logged number"]
        left_out = {key for key in numbers if any(fnmatchcase(key.name, pattern) for pattern in patterns)}
        return {key: value for key, value in values.items() if key not in left_out}

    differences = all_differences(compared(alone), compared(first), tolerance)
    facts += [each.describe(alone.name, first.name) for each in differences]
    fail("several ranks do not train as one process", facts)
