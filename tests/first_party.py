"""The plugins of this distribution, and a loop in which each of them does something."""

from typing import Any

import torch
from torch import nn

from hookdiff import InMemory
from hookdiff.data import digits
from hookdiff.options.imports import installed
from hookdiff.testing.toy import toy_model

# Options with which each plugin does something in 8 steps; a plugin that is not named here has its defaults.
OPTIONS: dict[str, dict[str, Any]] = {
    "amp": {"precision": "fp16", "init_scale": 2.0**22, "growth_interval": 4},
    "checkpoint": {"every": 2, "keep_last": 9},
    "clip": {"rule": {"use": "adaptive", "warmup": 2, "factor": 0.5}},
    "compile": {"backend": "eager"},  # the compiler itself takes most of a minute
    "diversity": {"every": 4, "num_samples": 20, "modes": 2},
    "ema": {"decay": 0.9, "std": [0.05, 0.1], "snapshot_every": 4},
    "fid": {"every": 4, "num_samples": 8},
    "lora": {"targets": ["1", "2.*"]},
    "loss": {"window": 20, "plateau": 0},
    "lr": {"warmup": 3},
    "memory": {"empty_cache_every": 6},
    "samples": {"every": 4, "num": 4, "scale": 1},
    "spectral": {"layers": ["2.3"]},
    "stop_early": {"metric": "loss", "patience": 99},
}
COSTLY = {"aim", "compile", "memory", "report", "wandb"}  # start processes, compile, or collect garbage
KINDS: dict[str, Any] = {
    name: entry.load()
    for name, (entry, *_) in installed().items()
    if entry.dist is not None and entry.dist.name == "hookdiff"
}


def net(dropout: float = 0.2) -> nn.Module:
    """Return the toy net between layers that take and give digits."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        first, toy, last = nn.Linear(64, 4), toy_model(dropout=dropout), nn.Linear(4, 64)
    return nn.Sequential(nn.Flatten(), first, toy, last, nn.Unflatten(1, (1, 8, 8)))


DATA = InMemory(digits().images[:40])  # 4 batches in an epoch
LOOP: dict[str, Any] = {"data": DATA, "steps": 12, "batch_size": 10, "micro_batch": 4, "log_every": 3}
