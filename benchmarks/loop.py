"""Compare the time per step of hookdiff's loop with that of the best hand-written loop and of other trainers.

    python benchmarks/loop.py [tiny middle unet] [--rounds N] [--threads 1]

All train the same network on the same digits with the same features: v prediction with min-SNR weights and
stratified times, AdamW (fused), clipping by norm, an average of the weights, a learning rate schedule, a line of mean
loss and norm every 50 steps. The C library keeps freed memory, as `hookdiff run` has it. "by hand, checked" also has
what hookdiff does for its promises: it seeds the draws of each step, and looks at loss and norm before it updates
anything. "by hand, seeded" has the first of these, "hookdiff, bare" has no plugins at all. hookdiff trains with its own
class of AdamW, a loop by hand with torch's, as one writes it; two rows have them the other way round.

They take turns: in each round every one of them makes a block of steps, in a shuffled order, so that other load on the
machine affects all alike. The table has the median time of a step, the median over the rounds of its ratio to "by hand"
and to "by hand, checked" in the same round, and of its difference from the second. Lightning, accelerate and ignite
take part when they are installed.
"""

import argparse
import importlib.util
import json
import logging
import math
import random
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from attrs import define
from torch import Tensor, nn
from torch.nn import functional

from hookdiff import Loop, LoopConfig, builtin_plugins
from hookdiff.data import digits
from hookdiff.diffusion import VP, Diffusion
from hookdiff.machine import keep_memory
from hookdiff.models import AdamW
from hookdiff_clip import Clip
from hookdiff_ema import EMA
from hookdiff_lr import LR
from hookdiff_networks import UNet

RATE, DECAY, LOG_EVERY, WARMUP = 1e-3, 0.999, 50, 100
STEPS = 1_000_000  # of the schedule; no run gets there


class Denoiser(nn.Module):
    """A network with steps of about half a millisecond, on which the cost of a loop shows most, unless it is wider."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(65, width), nn.Linear(width, 64)

    def forward(self, x: Tensor, timesteps: Tensor) -> Tensor:
        seen = torch.cat((x.flatten(1), timesteps[:, None] / 1000), 1)
        return self.last(functional.silu(self.first(seen))).view_as(x)


@define(frozen=True)
class Workload:
    model: Callable[[], nn.Module]
    batch_size: int
    block: int  # steps of a turn
    rounds: int


WORKLOADS = {
    "tiny": Workload(Denoiser, 16, 20, 600),
    "middle": Workload(lambda: Denoiser(2048), 256, 5, 200),
    "unet": Workload(lambda: UNet(channels=32, num_res_blocks=1), 16, 1, 100),
}


class Turn:
    """One contestant, on a thread of its own that runs only while it is its turn."""

    def __init__(
        self, train: Callable[[Workload, Path, Callable[[], None]], None], work: Workload, folder: Path
    ) -> None:
        self.work, self.left = work, 1  # the first step waits for the first turn; it is not timed
        self.began = time.perf_counter()
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        threads = torch.get_num_threads()

        def run() -> None:
            torch.set_num_threads(threads)  # OpenMP asks each thread for itself
            train(work, folder, self.step)

        threading.Thread(target=run, daemon=True).start()
        self.done.acquire()

    def step(self) -> None:
        """Count a step; called by the contestant after each."""
        self.left -= 1
        if self.left == 0:
            self.seconds = (time.perf_counter() - self.began) / self.work.block
            self.done.release()
            self.go.acquire()
            self.left, self.began = self.work.block, time.perf_counter()

    def take(self) -> float:
        """Let it make a block of steps; return the seconds of one."""
        self.go.release()
        self.done.acquire()
        return self.seconds


class Parts:
    """The parts of the other loops: the same data, loss, schedule and average as hookdiff's, in plain torch."""

    def __init__(self, work: Workload, file: IO[str], kind: type[torch.optim.AdamW] = torch.optim.AdamW) -> None:
        torch.manual_seed(0)
        self.model, self.file = work.model(), file
        self.optimizer = kind(self.model.parameters(), lr=RATE, fused=True)
        schedule = VP().tables
        self.alpha = schedule.alphas_cumprod.sqrt().float()
        self.sigma = (1 - schedule.alphas_cumprod).sqrt().float()
        snr = schedule.snr.float()
        self.weights = snr.clamp(max=5) / (snr + 1)
        self.parameters = list(self.model.parameters())
        self.average = [parameter.detach().clone() for parameter in self.parameters]
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []
        self.generator = torch.Generator()
        self.done = 0

    def loss(self, model: nn.Module, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        noise = torch.randn(x.shape, generator=generator)
        part, within = torch.randperm(len(x), generator=generator), torch.rand(len(x), generator=generator)
        t = ((part + within) * (1000 / len(x))).long().clamp_(max=999)
        alpha, sigma = self.alpha[t].view(-1, 1, 1, 1), self.sigma[t].view(-1, 1, 1, 1)
        output = model(alpha * x + sigma * noise, t)
        error = functional.mse_loss(output, alpha * noise - sigma * x, reduction="none").flatten(1).mean(1)
        return (self.weights[t] * error).mean()

    def factor(self, step: int) -> float:
        if step < WARMUP:
            return step / WARMUP
        return (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))) / 2

    def set_rate(self) -> None:
        self.optimizer.param_groups[0]["lr"] = RATE * self.factor(self.done)

    @torch.no_grad()
    def count(self, loss: Tensor, norm: Tensor) -> None:
        """Update the average after a step, and log the line when it is due; only the line needs a transfer."""
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
    """Yield batches for ever from memory, in the fastest way: indexed, not collated."""
    images = digits().images.float().div_(127.5).sub_(1)
    while True:
        for rows in torch.randperm(len(images)).split(work.batch_size)[:-1]:
            yield images[rows]


def by_hand(
    work: Workload,
    folder: Path,
    step: Callable[[], None],
    seeded: bool = False,
    checked: bool = False,
    kind: type[torch.optim.AdamW] = torch.optim.AdamW,
) -> None:
    with (folder / "log.jsonl").open("w") as file:
        parts = Parts(work, file, kind)
        for x in batches(work):
            parts.set_rate()
            parts.optimizer.zero_grad(set_to_none=True)
            generator = parts.generator.manual_seed(hash((7, parts.done)) & 0xFFFFFFFF) if seeded else None
            loss = parts.loss(parts.model, x, generator)
            loss.backward()
            if checked:
                gradients = [parameter.grad for parameter in parts.parameters]
                norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
                found, length = torch.stack((loss.detach(), norm)).tolist()
                if not math.isfinite(found + length):
                    continue
                if length > 1:
                    torch._foreach_mul_(gradients, 1 / (length + 1e-6))
            else:
                norm = nn.utils.clip_grad_norm_(parts.parameters, 1.0, foreach=True)
            parts.optimizer.step()
            parts.count(loss, norm)
            step()


def hookdiff(
    work: Workload, folder: Path, step: Callable[[], None], bare: bool = False, kind: type[torch.optim.AdamW] = AdamW
) -> None:
    torch.manual_seed(0)
    plugins = {**builtin_plugins(signals=False), "lr": LR(warmup=WARMUP), "clip": Clip("norm"), "ema": EMA(decay=DECAY)}
    loop = Loop(
        work.model(),
        lambda model: kind(model.parameters(), lr=RATE, fused=True),
        Diffusion(VP()),
        digits(),
        LoopConfig(steps=STEPS, batch_size=work.batch_size, log_every=LOG_EVERY),
        {} if bare else plugins,
        run_dir=folder,
    )
    with loop:
        for _ in loop.steps():
            step()


def accelerate(work: Workload, folder: Path, step: Callable[[], None]) -> None:
    from accelerate import Accelerator

    with (folder / "log.jsonl").open("w") as file:
        parts = Parts(work, file)
        accelerator = Accelerator(cpu=True)
        scheduler = torch.optim.lr_scheduler.LambdaLR(parts.optimizer, parts.factor)
        model, optimizer, scheduler = accelerator.prepare(parts.model, parts.optimizer, scheduler)
        for x in batches(work):
            with accelerator.accumulate(model):
                loss = parts.loss(model, x)
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(parts.parameters, 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            parts.count(loss, norm)
            step()


def ignite(work: Workload, folder: Path, step: Callable[[], None]) -> None:
    from ignite.engine import Engine, Events

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
        engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: step())
        engine.run(batches(work), max_epochs=1, epoch_length=STEPS)


def lightning(work: Workload, folder: Path, step: Callable[[], None]) -> None:
    import lightning as pl

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
                step()

        class Endless(torch.utils.data.IterableDataset[Tensor]):
            def __iter__(self) -> Iterator[Tensor]:
                return batches(work)

        trainer = pl.Trainer(
            accelerator="cpu",
            max_steps=STEPS,
            callbacks=[Rest()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(), torch.utils.data.DataLoader(Endless(), batch_size=None))


CHECKED = "by hand, checked"
CONTESTANTS: dict[str, Callable[[Workload, Path, Callable[[], None]], None]] = {
    "by hand": by_hand,
    "by hand, seeded": partial(by_hand, seeded=True),
    CHECKED: partial(by_hand, seeded=True, checked=True),
    "by hand, checked, hookdiff's AdamW": partial(by_hand, seeded=True, checked=True, kind=AdamW),
    "hookdiff, bare": partial(hookdiff, bare=True),
    "hookdiff": hookdiff,
    "hookdiff, torch's AdamW": partial(hookdiff, kind=torch.optim.AdamW),
}
for other in (accelerate, ignite, lightning):
    if importlib.util.find_spec(other.__name__):
        CONTESTANTS[other.__name__] = other


def compare(work: Workload, rounds: int, folder: Path) -> dict[str, list[float]]:
    turns = {}
    for name, train in CONTESTANTS.items():
        (folder / name).mkdir()
        turns[name] = Turn(train, work, folder / name)
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    order = random.Random(0)
    for number in range(-5, rounds):  # the first few to get warm
        for name in order.sample(list(turns), len(turns)):
            took = turns[name].take()
            if number >= 0:
                seconds[name].append(took)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", help=f"of {', '.join(WORKLOADS)}; all unless given")
    parser.add_argument("--rounds", type=int, help="turns of each; the workload's own number unless given")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if unknown := set(options.workloads) - set(WORKLOADS):
        parser.error(f"no workload named {unknown.pop()!r}; known: {', '.join(WORKLOADS)}")
    torch.set_num_threads(options.threads)
    keep_memory()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    print(f"torch {torch.__version__}, {options.threads} threads")
    for name in options.workloads or WORKLOADS:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            seconds = compare(WORKLOADS[name], options.rounds or WORKLOADS[name].rounds, Path(folder))
        for contestant, times in seconds.items():
            shown = [f"{name:<6} {contestant:<34} {statistics.median(times) * 1e3:8.3f} ms a step"]
            for base in ("by hand", CHECKED):
                ratios = [mine / other for mine, other in zip(times, seconds[base], strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                shown.append(f"{middle:.3f} ({low:.3f} to {high:.3f}) of {base}")
            more = [1e6 * (mine - other) for mine, other in zip(times, seconds[CHECKED], strict=True)]
            low, middle, high = statistics.quantiles(more, n=4)
            print("   ".join([*shown, f"{middle:+.0f} us ({low:+.0f} to {high:+.0f})"]))


if __name__ == "__main__":
    main()
