"""Compare images a second of hookdiff's sampling with bare calls of the network, and with a pipeline of diffusers.

    python benchmarks/sampling.py [--images 128] [--rounds 5] [--threads N] [--device cpu]

One UNet2DModel of diffusers makes images of 32 x 32 with 50 steps of DDIM. "bare calls" are as many calls of it, and
nothing else. The pipeline is diffusers' DDIMPipeline, its images as arrays. hookdiff makes them through a Loop, as
`hookdiff sample` does, in float32 and in bf16, each with the attention of diffusers (kernel) and by layer, the latter
also compiled. All take turns in an order shuffled for each round; the table has medians of the ratio to the bare calls
of the same form, which are not compiled, and to the pipeline.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
from diffusers import DDIMPipeline, DDIMScheduler
from step import of_diffusers

from hookdiff import Loop, SampleRequest
from hookdiff.authors import ImageMaker
from hookdiff.diffusion import Diffusion, Sampling
from hookdiff.machine import keep_memory
from hookdiff.models import adapt, use_attention

SIDE, STEPS, BATCH = 32, 50, 64


def network(attention: str, device: torch.device) -> torch.nn.Module:
    torch.manual_seed(0)
    model = of_diffusers()
    use_attention(model, attention)  # type: ignore[arg-type]
    return model.to(device).eval()


def bare(precision: str, attention: str, num: int, device: torch.device) -> Callable[[], object]:
    model, at_a_time = network(attention, device), min(BATCH, num)
    x = torch.randn(at_a_time, 1, SIDE, SIDE, device=device)
    t = torch.full((at_a_time,), 500, device=device)
    is_cast = precision == "bf16"

    def make() -> None:
        for _ in range(num // at_a_time):
            with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=is_cast):
                for _ in range(STEPS):
                    model(x, t)

    return make


def hookdiff(
    precision: str, attention: str, num: int, device: torch.device, compiles: bool = False
) -> Callable[[], object]:
    model = adapt(network(attention, device))
    sampler = Sampling("ddim", STEPS, precision=precision, compile=compiles)  # type: ignore[arg-type]
    blank = torch.zeros(128, 1, SIDE, SIDE)
    loop = Loop(model, (), Diffusion("ddpm"), blank, sampler=sampler)

    def make() -> None:
        for _ in ImageMaker(loop).make(range(num), lambda part: SampleRequest(len(part), 0, part.start)):
            pass

    return make


def pipeline(num: int, device: torch.device) -> Callable[[], object]:
    made = DDIMPipeline(network("kernel", device), DDIMScheduler())
    made.set_progress_bar_config(disable=True)

    def make() -> None:
        for _ in range(num // BATCH):
            made(batch_size=BATCH, num_inference_steps=STEPS, output_type="np")

    return make


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2 * BATCH)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    device = torch.device(given.device)
    if device.type == "cpu":
        keep_memory()
    num = given.images
    makers = {"pipeline": pipeline(num, device)}
    for precision in ("float32", "bf16"):
        for attention in ("kernel", "by_layer"):
            makers[f"bare {precision} {attention}"] = bare(precision, attention, num, device)
            makers[f"hookdiff {precision} {attention}"] = hookdiff(precision, attention, num, device)
        makers[f"hookdiff {precision} by_layer, compiled"] = hookdiff(precision, "by_layer", num, device, True)
    seconds: dict[str, list[float]] = {name: [] for name in makers}
    order = random.Random(0)
    for number in range(-1, given.rounds):
        for name in order.sample(list(makers), len(makers)):
            begun = time.perf_counter()
            makers[name]()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if number >= 0:
                seconds[name].append(time.perf_counter() - begun)
    print(f"{num} images, batches of {BATCH}: ratio of times")
    for name, times in seconds.items():
        to_bare = seconds[name.replace("hookdiff", "bare").removesuffix(", compiled")]
        cells = [_quartiles(times, to_bare), _quartiles(seconds["pipeline"], times)]
        speed = num / statistics.median(times)
        print(f"{name:<28}{speed:>7.1f} img/s   to bare calls {cells[0]}   as fast as the pipeline {cells[1]}")


def _quartiles(times: list[float], others: list[float]) -> str:
    low, middle, high = statistics.quantiles((mine / its for mine, its in zip(times, others, strict=True)), n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    main()
