"""The promise of a plugin that several ranks train as one process does."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from attrs import define
from torch import Tensor

from hookdiff.hookspecs import hookimpl
from hookdiff.loop import Loop
from hookdiff.objective import LossOutput
from hookdiff.ranks import num_ranks, summed
from hookdiff.testing.companions import COMPANIONS
from hookdiff.testing.record import Record, Runs
from hookdiff.testing.threads import on_ranks

_NUM = 2
_TOLERANCE = 1e-4  # of float32 sums in another order, over some steps


@define(eq=False)
class Averaging:
    """Averages the gradients over the ranks after the last micro-batch, as the plugin `ddp` does."""

    @hookimpl(wrapper=True)
    def micro_step(self, loop: Loop, index: int, count: int) -> Generator[None, LossOutput, LossOutput]:
        output = yield
        for gradient in loop.gradients.tensors() if index == count - 1 else ():
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

    Both ranks must ask each other for the same at the same places, make the same steps, and hold the same weights after
    each. The weights and the values that the first rank logs must be those of a run on one process, within `tolerance`
    of their size. The ranks are threads of this process, so the plugin must not use torch.distributed itself; what it
    asks the other ranks goes through `loop.reduce`, `loop.agree` and `hookdiff.ranks`.

    make_plugin: returns a new plugin. others: functions that make the other plugins of the run, by name. except_for:
    patterns of logged names that may differ, such as measurements on some samples of the first rank. loop: further
    arguments of `toy_loop`; a model with dropout cannot be the same on two ranks.
    """
    with Runs(make_plugin, {**others, "averaging": Averaging}, loop) as runs:
        alone, run_dir = Record("one process"), runs.new_folder()
        runs.train(alone)

        def train(rank: int) -> Record:
            record = Record(f"rank {rank} of {_NUM}")
            runs.train(record, run_dir=run_dir)
            return record

        first, *rest = on_ranks(_NUM, train)
    problems = [text for other in rest for text in _differences(_weights(first), _weights(other), first, other, 0.0)]
    unequal = [f"the logged {pattern}" for pattern in except_for]
    one, two = (_without(record, unequal) for record in (alone, first))
    problems += _differences(one, two, alone, first, tolerance)
    if problems:
        more = [f"and {len(problems) - 5} more"] * (len(problems) > 5)
        raise AssertionError("\n  ".join(["several ranks do not train as one process; first:", *problems[:5], *more]))


def _weights(record: Record) -> dict[int, dict[str, Any]]:
    return {s: {n: v for n, v in values.items() if n.startswith("the weight ")} for s, values in record.steps.items()}


def _without(record: Record, patterns: Sequence[str]) -> dict[int, dict[str, Any]]:
    return {
        step: {name: value for name, value in values.items() if not any(fnmatchcase(name, one) for one in patterns)}
        for step, values in record.steps.items()
    }


def _differences(
    one: Mapping[int, Mapping[str, Any]],
    two: Mapping[int, Mapping[str, Any]],
    first: Record,
    second: Record,
    tolerance: float,
) -> list[str]:
    """Return a sentence about each value that only one has, or that is further apart than `tolerance` of its size."""
    found = []
    for step in sorted(one.keys() | two.keys()):
        ours, its = one.get(step, {}), two.get(step, {})
        for name in sorted(ours.keys() | its.keys()):
            if name not in ours or name not in its:
                found.append(f"after step {step}, only {first.name if name in ours else second.name} has {name}")
            elif "picture" not in name and not _is_close(ours[name], its[name], tolerance):
                values = [_short(ours[name]), _short(its[name])]
                where = f"{values[0]} on {first.name}, {values[1]} on {second.name}"
                found.append(f"after step {step}, {name} is {where}")
    return found


def _is_close(one: Any, two: Any, tolerance: float) -> bool:
    first, second = (torch.as_tensor(value, dtype=torch.float64) for value in (one, two))
    size = max([1.0, *(float(value.abs().max()) for value in (first, second) if value.numel())])
    return torch.allclose(first, second, rtol=0.0, atol=tolerance * size, equal_nan=True)


def _short(value: Any) -> str:
    return f"{float(torch.linalg.vector_norm(value.double())):.9g}" if isinstance(value, Tensor) else f"{value:.9g}"
