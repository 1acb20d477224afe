"""A step makes the host wait for the device once, even with every plugin that watches it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hookdiff import Feed, Loop, LoopConfig
from hookdiff.builtin.logged import Metrics
from hookdiff.data import digits
from hookdiff.diffusion.diffusion import Diffusion
from hookdiff.experiment.discovery import plugin_class
from hookdiff.testing.transfers import CountTransfers
from hookdiff_networks import UNet

STEPS, LOG_EVERY = 23, 10
# Every plugin that takes part in a step or watches it, with its most costly options.
WATCHING: dict[str, dict[str, Any]] = {
    "ema": {"decay": [0.99, 0.999]},
    "amp": {"precision": "bf16"},
    "clip": {"rule": {"use": "adaptive", "warmup": 2}},
    "gradients": {"per_tensor": True},
    "lr": {"warmup": 3},
    "loss": {},
    "nan": {},
    "debug": {"every": 1000},
    "memory": {},
}


def counts(folder: Path, plugins: dict[str, object], **config: Any) -> list[int]:
    """Run, and return the number of transfers in each step, from its batch to the end of its logging."""
    torch.manual_seed(0)
    loop = Loop(
        UNet(in_channels=1, image_size=8, channels=8, num_res_blocks=1, head_dim=8),
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
        Diffusion(weighting="min_snr"),
        Feed(digits(), held_out=32),
        LoopConfig(steps=STEPS, batch_size=8, log_every=LOG_EVERY, **config),
        plugins,
        run_dir=folder,
    )
    found = []
    with loop:
        for batch in loop.feed.batches(0):
            with CountTransfers() as transfers:
                loop.run_step(batch)
                loop.log.flush()
            found.append(transfers.count)
            if loop.progress.step == STEPS:
                break
    return found


@pytest.mark.parametrize("config", [{}, {"micro_batch": 3}], ids=["whole", "micro-batches"])
def test_a_step_with_all_plugins_that_watch_it_makes_one_transfer(tmp_path: Path, config: dict[str, Any]) -> None:
    plugins: dict[str, object] = {"metrics": Metrics()}
    plugins |= {name: plugin_class(name)(**options) for name, options in WATCHING.items()}
    found = counts(tmp_path, plugins, **config)
    # The updates 1, 2, 4, 8 and 16 do not count here: debug makes transfers of its own in these.
    plain = [count for step, count in enumerate(found, 1) if step % LOG_EVERY and step & (step - 1)]
    assert plain == [1] * 16
    # All logged values go to the host in one more transfer.
    assert [found[step - 1] for step in range(LOG_EVERY, STEPS, LOG_EVERY)] == [2, 2]
