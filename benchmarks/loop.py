"""Time per step of hookdiff's loop over that of the best loop one writes by hand, and of other trainers.

    python benchmarks/loop.py [tiny unet] [--rounds 7] [--threads 1]

All train the same network on the same digits with the same features: AdamW (fused), clipping by norm, an average
of the weights, a learning rate schedule, a line of mean loss and norm every 50 steps. In each round every one of them
trains anew, in an order that turns from round to round; the first steps are not timed. The table has the median
time of a step and the median over the rounds of its ratio to the hand-written loop of the same round. Lightning,
accelerate and ignite take part when they are installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import torch
from attrs import define
from torch import Tensor, nn

from hookdiff import Loop, LoopConfig
from hookdiff.data import digits
from hookdiff.diffusion import Diffusion, make_schedule
from hookdiff.models import UNet
from hookdiff_clip import Clip
from hookdiff_ema import EMA
from hookdiff_lr import LR

RATE, DECAY, LOG_EVERY, WARMUP = 1e-3, 0.999, 50, 100


class Denoiser(nn.Module):
    """A step of about half a millisecond: what a loop costs shows most on it."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(1000, 64)
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64))

    def forward(self, x: Tensor, timesteps: Tensor) -> Tensor:
        return self.layers(x.flatten(1) + self.time(timesteps)).view_as(x)


@define(frozen=True)
class Workload:
    model: Callable[[], nn.Module]
    batch_size: int
    warm: int  # steps before the clock starts
    steps: int  # that are timed


WORKLOADS = {
    "tiny": Workload(Denoiser, 64, 100, 1000),
    "unet": Workload(lambda: UNet(channels=32, num_res_blocks=1), 32, 3, 20),
}


class Clock:
    """Notes when the timed steps began; `seconds` is the time of one of them once the last is done."""

    def __init__(self, work: Workload) -> None:
        self.work, self.done, self.seconds = work, 0, math.nan

    def step(self) -> None:
        self.done += 1
        if self.done == self.work.warm:
            self.began = time.perf_counter()
        if self.done == self.work.warm + self.work.steps:
            self.seconds = (time.perf_counter() - self.began) / self.work.steps


class Parts:
    """What the others are written with: the same data, loss, schedule and average as ours, in plain torch."""

    def __init__(self, work: Workload, file: IO[str]) -> None:
        torch.manual_seed(0)
        self.model, self.file, self.total = work.model(), file, work.warm + work.steps
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, fused=True)
        schedule = make_schedule("cosine", 1000)
        self.alpha = schedule.alphas_cumprod.sqrt().float()
        self.sigma = (1 - schedule.alphas_cumprod).sqrt().float()
        self.parameters = list(self.model.parameters())
        self.average = [parameter.detach().clone() for parameter in self.parameters]
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []
        self.done = 0

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        noise, t = torch.randn_like(x), torch.randint(0, 1000, (len(x),))
        alpha, sigma = self.alpha[t].view(-1, 1, 1, 1), self.sigma[t].view(-1, 1, 1, 1)
        return (model(alpha * x + sigma * noise, t) - noise).square().mean()

    def factor(self, step: int) -> float:
        if step < WARMUP:
            return step / WARMUP
        return (1 + math.cos(math.pi * (step - WARMUP) / max(1, self.total - WARMUP))) / 2

    def set_rate(self) -> None:
        self.optimizer.param_groups[0]["lr"] = RATE * self.factor(self.done)

    @torch.no_grad()
    def count(self, loss: Tensor, norm: Tensor) -> None:
        """Do what follows a step: the average, and the line when it is due. Nothing is read from the device before."""
        torch._foreach_lerp_(self.average, self.parameters, 1 - min(DECAY, (1 + self.done) / (10 + self.done)))
        self.done += 1
        self.losses.append(loss.detach())
        self.norms.append(norm)
        if self.done % LOG_EVERY == 0:
            means = torch.stack((torch.stack(self.losses).mean(), torch.stack(self.norms).mean())).tolist()
            record = {"step": self.done, "loss": means[0], "grad_norm": means[1], "lr": RATE * self.factor(self.done)}
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()
            self.losses, self.norms = [], []


def batches(work: Workload) -> Iterator[Tensor]:
    """Yield batches for ever, from memory, as a careful person would: indexed, not collated."""
    images = digits().images.float().div_(127.5).sub_(1)
    while True:
        for rows in torch.randperm(len(images)).split(work.batch_size)[:-1]:
            yield images[rows]


def by_hand(work: Workload, folder: Path) -> float:
    clock = Clock(work)
    with (folder / "log.jsonl").open("w") as file:
        parts = Parts(work, file)
        for _, x in zip(range(parts.total), batches(work), strict=False):
            parts.set_rate()
            parts.optimizer.zero_grad(set_to_none=True)
            loss = parts.loss(parts.model, x)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(parts.parameters, 1.0, foreach=True)
            parts.optimizer.step()
            parts.count(loss, norm)
            clock.step()
    return clock.seconds


def hookdiff(work: Workload, folder: Path) -> float:
    from hookdiff.metrics import Metrics

    clock = Clock(work)
    torch.manual_seed(0)
    loop = Loop(
        work.model(),
        lambda model: torch.optim.AdamW(model.parameters(), lr=RATE, fused=True),
        Diffusion(schedule="cosine"),
        digits(),
        LoopConfig(steps=work.warm + work.steps, batch_size=work.batch_size, log_every=LOG_EVERY),
        {
            "metrics": Metrics(),
            "lr": LR(warmup=min(WARMUP, work.warm)),
            "clip": Clip(max_norm=1.0),
            "ema": EMA(decay=DECAY),
        },
        run_dir=folder,
    )
    with loop:
        for _ in loop.steps():
            clock.step()
    return clock.seconds


def accelerate(work: Workload, folder: Path) -> float:
    from accelerate import Accelerator

    clock = Clock(work)
    with (folder / "log.jsonl").open("w") as file:
        parts = Parts(work, file)
        accelerator = Accelerator(cpu=True)
        scheduler = torch.optim.lr_scheduler.LambdaLR(parts.optimizer, parts.factor)
        model, optimizer, scheduler = accelerator.prepare(parts.model, parts.optimizer, scheduler)
        for _, x in zip(range(parts.total), batches(work), strict=False):
            with accelerator.accumulate(model):
                loss = parts.loss(model, x)
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(parts.parameters, 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            parts.count(loss, norm)
            clock.step()
    return clock.seconds


def ignite(work: Workload, folder: Path) -> float:
    from ignite.engine import Engine, Events

    clock = Clock(work)
    with (folder / "log.jsonl").open("w") as file:
        parts = Parts(work, file)

        def update(engine: Engine, x: Tensor) -> tuple[Tensor, Tensor]:
            parts.optimizer.zero_grad(set_to_none=True)
            loss = parts.loss(parts.model, x)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(parts.parameters, 1.0, foreach=True)
            parts.optimizer.step()
            return loss, norm

        engine = Engine(update)
        engine.add_event_handler(Events.ITERATION_STARTED, parts.set_rate)
        engine.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: parts.count(*engine.state.output))
        engine.add_event_handler(Events.ITERATION_COMPLETED, clock.step)
        engine.run(batches(work), max_epochs=1, epoch_length=parts.total)
    return clock.seconds


def lightning(work: Workload, folder: Path) -> float:
    import lightning as pl

    clock = Clock(work)
    with (folder / "log.jsonl").open("w") as file:
        parts = Parts(work, file)

        class Module(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = parts.model

            def training_step(self, x: Tensor, index: int) -> Tensor:
                return parts.loss(self.model, x)

            def configure_optimizers(self) -> dict[str, Any]:
                scheduler = torch.optim.lr_scheduler.LambdaLR(parts.optimizer, parts.factor)
                return {"optimizer": parts.optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        class Rest(pl.Callback):
            norm = torch.zeros(())

            def on_before_optimizer_step(self, *_: Any) -> None:
                self.norm = nn.utils.clip_grad_norm_(parts.parameters, 1.0, foreach=True)

            def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
                parts.count(outputs["loss"], self.norm)
                clock.step()

        class Endless(torch.utils.data.IterableDataset[Tensor]):
            def __iter__(self) -> Iterator[Tensor]:
                return batches(work)

        trainer = pl.Trainer(
            accelerator="cpu",
            max_steps=parts.total,
            callbacks=[Rest()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(), torch.utils.data.DataLoader(Endless(), batch_size=None))
    return clock.seconds


CONTESTANTS = {"by hand": by_hand, "hookdiff": hookdiff}
for other in (accelerate, ignite, lightning):
    if importlib.util.find_spec(other.__name__):
        CONTESTANTS[other.__name__] = other


def compare(work: Workload, rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    names = list(CONTESTANTS)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            with tempfile.TemporaryDirectory() as folder:
                seconds[name].append(CONTESTANTS[name](work, Path(folder)))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", help=f"of {', '.join(WORKLOADS)}; all unless given")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if unknown := set(options.workloads) - set(WORKLOADS):
        parser.error(f"no workload named {unknown.pop()!r}; known: {', '.join(WORKLOADS)}")
    torch.set_num_threads(options.threads)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    print(f"torch {torch.__version__}, {options.threads} threads, {options.rounds} rounds")
    for name in options.workloads or WORKLOADS:
        seconds = compare(WORKLOADS[name], options.rounds)
        for contestant, times in seconds.items():
            ratios = [mine / base for mine, base in zip(times, seconds["by hand"], strict=True)]
            print(
                f"{name:<6} {contestant:<10} {statistics.median(times) * 1e3:8.3f} ms a step"
                f"   ratio {statistics.median(ratios):.3f}  ({min(ratios):.3f} to {max(ratios):.3f})"
            )


if __name__ == "__main__":
    main()
