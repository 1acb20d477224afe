"""Prints hashes of the states of short runs. A change that keeps behaviour keeps every hash.

Run it before and after on one machine, and compare: `python tests/hashes.py > before.txt`. With a FOLDER, the first
call keeps a run of half the length there; later calls resume a copy of it, so that a checkpoint made before a change is
resumed after it: `python tests/hashes.py FOLDER`. A hash is of all tensors of the state of a run: weights, buffers,
optimizers and plugins, adopted modules among them. The runs on two ranks are processes of their own.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookdiff import build_loop, load_config
from hookdiff.machine import whole
from hookdiff.machine.joining import joined, leave

STEPS = 50  # of CONFIG
# Of the default list
PLUGINS = ("lr", "clip", "amp", "ema", "autoguidance", "nan", "checkpoint", "samples", "progress")
CONFIG = """
    [run]
    steps = 50
    batch_size = 32
    micro_batch = 24
    device = "cpu"
    log_every = 10
    plugins = []
    [data]
    source = "digits"
    flip = 0.5
    [model]
    use = "unet"
    channels = 8
    num_res_blocks = 1
    head_dim = 8
    num_classes = 10
    dropout = 0.1
    [plugins.samples]
    every = 20
    num = 4
    [plugins.checkpoint]
    every = 20
"""
ADOPTS = "hookdiff_uncertainty:Uncertainty"  # a plugin that trains a module of its own
EXAMPLE = Path(__file__).parents[1] / "examples" / "plugins" / "uncertainty"
# The settings and the plugins that each run has beside those of the first run.
CASES: dict[str, tuple[list[str], list[str]]] = {
    "plain": ([], []),
    **{f"process {name}": ([f"diffusion.process={name}"], []) for name in ("vp", "ddpm", "flow", "edm")},
    **{
        f"prediction {name}": (["diffusion.process=vp", f"diffusion.prediction={name}"], [])
        for name in ("epsilon", "sample", "v_prediction", "flow_prediction", "edm")
    },
    **{
        f"optimizer {name}": ([f"optimizer.use={name}", "optimizer.lr=0.001"], [])
        for name in ("muon", "adamw", "sgd", "rmsprop")
    },
    **{f"precision {name}": ([f"plugins.amp.precision={name}"], ["amp"]) for name in ("bf16", "fp16", "off")},
    **{f"plugin {name}": ([], [name]) for name in PLUGINS},
    "all plugins": ([], list(PLUGINS)),
    "adopted module": ([], [ADOPTS]),
    "adopted module, all plugins": (
        ['plugins.lr.adopted=["uncertainty"]', 'plugins.clip.adopted=["uncertainty"]'],
        [ADOPTS, *PLUGINS],
    ),
}
# Runs on two ranks; each case as above.
CASES_ON_RANKS: dict[str, tuple[list[str], list[str]]] = {
    "ddp": ([], ["ddp"]),
    "ddp, all plugins": ([], ["ddp", *PLUGINS]),
    "ddp, adopted module": ([], ["ddp", "clip", ADOPTS]),
    "fsdp": ([], ["fsdp"]),
    "fsdp, all plugins": ([], ["fsdp", *PLUGINS]),
}
RANKS = "--ranks"


def tensors(state: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a nested state by their paths."""
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from tensors(value, f"{path}/{key}")
        elif isinstance(value, Tensor):
            yield f"{path}/{key}", whole(value)


def hash_of(state: Mapping[str, Any]) -> str:
    """Return a hash of the values of all tensors in `state`, in the order of their paths."""
    digest = hashlib.sha256()
    for _, value in sorted(tensors(state), key=lambda pair: pair[0]):
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def train(folder: Path, settings: list[str], plugins: list[str], stop: int = STEPS, resume: bool = False) -> str:
    """Train in the run directory `folder` up to the step `stop`, and return the hash."""
    config = folder.with_suffix(".toml")
    config.write_text(CONFIG)
    with build_loop(load_config(config, plugins, settings), folder, resume=resume) as loop:
        for step in loop.steps():
            if step.step == stop:
                loop.stop()
    return hash_of(loop.state_dict())


def main(kept: Path | None) -> None:
    """Print a line for each run: its name, and its hash."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for number, (name, (settings, plugins)) in enumerate(CASES.items()):
            print(f"{train(folder / str(number), settings, plugins)}  {name}", flush=True)
        half = (kept or folder) / "half"
        if not half.exists():
            half.parent.mkdir(parents=True, exist_ok=True)
            train(half, [], list(PLUGINS), stop=STEPS // 2)
        shutil.copytree(half, folder / "resumed")
        print(
            f"{train(folder / 'resumed', [], list(PLUGINS), resume=True)}  resumed from step {STEPS // 2}", flush=True
        )
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        ranks = subprocess.run([*launcher, __file__, RANKS, folder / "ranks"], stderr=subprocess.PIPE, text=True)
        sys.exit(ranks.stderr if ranks.returncode else 0)


def main_of_rank(folder: Path) -> None:
    """Do the work of one rank, and print the lines of all runs on ranks if it is the first."""
    folder.mkdir(exist_ok=True)
    with joined("cpu"):
        for number, (name, (settings, plugins)) in enumerate(CASES_ON_RANKS.items()):
            line = f"{train(folder / str(number), settings, plugins)}  2 ranks, {name}"
            if os.environ["RANK"] == "0":
                print(line, flush=True)
    leave(0)


if __name__ == "__main__":
    sys.path.insert(0, str(EXAMPLE))
    torch.set_num_threads(1)
    logging.getLogger("hookdiff").setLevel(logging.ERROR)
    if sys.argv[1:2] == [RANKS]:
        main_of_rank(Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
