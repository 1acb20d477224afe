"""Compare the time of gradient statistics, clipping and an average of the weights with that of textbook code.

    python benchmarks/health.py [1M 35M] [--rounds N] [--threads 1] [--device cpu]

All work on the same network with the same gradients, which are filled in where a backward pass would leave them. The
time for this and for a tiny update of the weights is subtracted, so that measuring, clipping and averaging are left.
hookdiff runs the steps of a real Loop with the plugins `gradients`, `clip` and `ema`, and its time includes all that
the loop does around them, but not the fetching of a batch, which the others do not have. The textbook code moves
the numbers of each tensor that the monitor reports (norm, mean, max, min, ...) to the host with `.item()`,
clips with a norm per tensor, and averages with `mul_` and `add_`. "foreach" is what clipping and averaging cost at
least, without statistics. They take turns in an order shuffled for each round; the table has the median time of a step
and the median over the rounds of the ratio to the textbook's. Then EMA's update to a bare `torch._foreach_lerp_`.
"""

import argparse
import logging
import random
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from attrs import define
from torch import Tensor, nn

from hookdiff import Loop, LoopConfig, LossOutput, hookimpl
from hookdiff_clip import Clip, Norm
from hookdiff_ema import EMA
from hookdiff_gradients import GradientMonitor
from hookdiff_networks import UNet

DECAY, MAX_NORM, LOG_EVERY = 0.999, 1.0, 50


@define(frozen=True)
class Workload:
    channels: int
    num_res_blocks: int
    updates: int  # of a turn of EMA alone
    rounds: int

    def model(self) -> nn.Module:
        width = self.channels
        return UNet(
            in_channels=3,
            image_size=32,
            channels=width,
            channel_mults=(1, 2, 2, 2),
            num_res_blocks=self.num_res_blocks,
            head_dim=width,
        )


WORKLOADS = {"1M": Workload(24, 2, 40, 30), "35M": Workload(104, 4, 8, 8)}


class Stand:
    """Stands in for the passes and the optimizer: gradients that are always the same, and weights that move a little.

    The gradients' norm is twice the threshold, so that each contestant clips in every step.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.parameters = model, list(model.parameters())
        torch.manual_seed(0)
        source = [torch.randn_like(p) for p in self.parameters]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(source)))
        self.source = torch._foreach_mul(source, 2 * MAX_NORM / norm)
        self.gradients = [torch.empty_like(g) for g in self.source]
        self.weights = [p.detach() for p in self.parameters]
        self.seconds = 0.0  # spent in here since the last reset

    def synchronize(self) -> None:
        if self.weights[0].is_cuda:
            torch.cuda.synchronize()

    def fill(self) -> None:
        with self:
            torch._foreach_copy_(self.gradients, self.source)
            for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
                parameter.grad = gradient

    def move(self) -> None:
        with self:
            torch._foreach_mul_(self.weights, 1 + 1e-6)

    def __enter__(self) -> None:
        self.synchronize()
        self.began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.synchronize()
        self.seconds += time.perf_counter() - self.began

    @hookimpl
    def micro_step(self) -> LossOutput:
        self.fill()
        return LossOutput(self.weights[0].new_ones(()))

    @hookimpl
    def optimizer_step(self) -> bool:
        self.move()
        return True


Contestant = Callable[[Stand], Iterator[None]]


def textbook(stand: Stand) -> Iterator[None]:
    average = [weight.clone() for weight in stand.weights]
    history: list[dict[str, dict[str, float]]] = []
    while True:
        stand.fill()
        numbers = {}
        for name, parameter in stand.model.named_parameters():
            gradient = parameter.grad
            assert gradient is not None
            numbers[name] = {
                "norm": gradient.norm().item(),
                "mean": gradient.abs().mean().item(),
                "max": gradient.abs().max().item(),
                "min": gradient.abs().min().item(),
                "zeros": (gradient == 0).float().mean().item(),
                "finite": torch.isfinite(gradient).all().item(),
            }
        history = [*history[-99:], numbers]
        total = 0.0
        for parameter in stand.parameters:
            assert parameter.grad is not None
            total += parameter.grad.norm(2).item() ** 2
        factor = MAX_NORM / (total**0.5 + 1e-6)
        if factor < 1:
            for parameter in stand.parameters:
                assert parameter.grad is not None
                parameter.grad.mul_(factor)
        stand.move()
        for shadow, weight in zip(average, stand.weights, strict=True):
            shadow.mul_(DECAY).add_(weight, alpha=1 - DECAY)
        yield


def foreach(stand: Stand) -> Iterator[None]:
    average = [weight.clone() for weight in stand.weights]
    while True:
        stand.fill()
        nn.utils.clip_grad_norm_(stand.parameters, MAX_NORM, foreach=True)
        stand.move()
        torch._foreach_lerp_(average, stand.weights, 1 - DECAY)
        yield


def loop_of(stand: Stand, plugins: dict[str, object], log_every: int) -> Loop:
    def objective(net: nn.Module, batch: object) -> Tensor:
        raise AssertionError("micro_step never asks")

    return Loop(
        stand.model,
        torch.optim.SGD(stand.parameters, lr=0.0),
        objective,
        torch.zeros(1, 1),
        LoopConfig(steps=10**9, batch_size=1, log_every=log_every),
        {"stand": stand, **plugins},
    )


def hookdiff(stand: Stand, log_every: int = LOG_EVERY) -> Iterator[None]:
    plugins = {"gradients": GradientMonitor(), "clip": Clip(Norm(MAX_NORM)), "ema": EMA(decay=DECAY)}
    with loop_of(stand, plugins, log_every) as loop:
        (batch,) = loop.feed.batches(0, 0)
        while True:
            loop.run_step(batch)
            loop.log.flush()
            yield


# With the steps of a turn: a turn of hookdiff has one that is logged.
CONTESTANTS: dict[str, tuple[Contestant, int]] = {
    "textbook": (textbook, 10),
    "hookdiff": (hookdiff, LOG_EVERY),
    "hookdiff, log_every = 1": (lambda stand: hookdiff(stand, 1), 5),
    "foreach": (foreach, LOG_EVERY),
}


def ema_plugin(stand: Stand) -> Iterator[None]:
    with loop_of(stand, {"ema": EMA(decay=DECAY)}, 10**9) as loop:
        loop.progress.step = 1  # no step that is logged
        while True:
            loop.hook.after_optimizer_step(loop=loop)
            yield


def bare(stand: Stand) -> Iterator[None]:
    average = [weight.clone() for weight in stand.weights]
    while True:
        torch._foreach_lerp_(average, stand.weights, 1 - DECAY)
        yield


def compare(contestants: dict[str, tuple[Contestant, int]], stand: Stand, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of a step of each contestant, round by round."""
    runs = {name: make(stand) for name, (make, _) in contestants.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    order = random.Random(0)
    for number in range(-1, rounds):  # the first to get warm
        for name in order.sample(list(runs), len(runs)):
            steps = contestants[name][1]
            stand.synchronize()
            stand.seconds, began = 0.0, time.perf_counter()
            for _ in range(steps):
                next(runs[name])
            stand.synchronize()
            took = time.perf_counter() - began - stand.seconds
            if number >= 0:
                seconds[name].append(took / steps)
    return seconds


def table(title: str, seconds: dict[str, list[float]]) -> None:
    first = next(iter(seconds.values()))
    for name, times in seconds.items():
        low, middle, high = statistics.quantiles((mine / base for mine, base in zip(times, first, strict=True)), n=4)
        print(
            f"{title:<16} {name:<24} {statistics.median(times) * 1e3:8.3f} ms a step   ratio {middle:.3f}"
            f"  (half within {low:.3f} to {high:.3f})   {1 / middle:.1f} times as fast"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", help=f"of {', '.join(WORKLOADS)}; all unless given")
    parser.add_argument("--rounds", type=int, help="turns of each; the workload's own number unless given")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    if unknown := set(options.workloads) - set(WORKLOADS):
        parser.error(f"no workload named {unknown.pop()!r}; known: {', '.join(WORKLOADS)}")
    torch.set_num_threads(options.threads)
    logging.disable(logging.WARNING)
    print(f"torch {torch.__version__}, {options.threads} threads, {options.device}")
    for name in options.workloads or WORKLOADS:
        work = WORKLOADS[name]
        stand = Stand(work.model().to(options.device))
        size, rounds = sum(weight.numel() for weight in stand.weights), options.rounds or work.rounds
        print(f"{size / 1e6:.2f}M parameters in {len(stand.weights)} tensors, {rounds} rounds")
        table(f"{name} all three", compare(CONTESTANTS, stand, rounds))
        updates: dict[str, tuple[Contestant, int]] = {
            "foreach_lerp_": (bare, work.updates),
            "EMA": (ema_plugin, work.updates),
        }
        table(f"{name} EMA alone", compare(updates, stand, 3 * rounds))


if __name__ == "__main__":
    main()
