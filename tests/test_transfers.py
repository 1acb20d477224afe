"""How often a step makes the host wait for the device: with every plugin that looks at it, once."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hookdiff import Feed, Loop, LoopConfig
from hookdiff.builtin.metrics import Metrics
from hookdiff.data import digits
from hookdiff.diffusion import Diffusion
from hookdiff.experiment.discovery import plugin_class
from hookdiff.models import UNet
from hookdiff.testing import CountTransfers

STEPS, LOG_EVERY = 23, 10
# All that takes part in a step or watches it, with what costs most.
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
    """Run, and return the transfers of each step: from the moment its batch is there to the end of what it logs."""
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
def test_a_step_with_all_that_watches_it_makes_one_transfer(tmp_path: Path, config: dict[str, Any]) -> None:
    plugins: dict[str, object] = {"metrics": Metrics()}
    plugins |= {name: plugin_class(name)(**options) for name, options in WATCHING.items()}
    found = counts(tmp_path, plugins, **config)
    # Those of debug are its own: the updates 1, 2, 4 and so on, and every 1000.
    plain = [count for step, count in enumerate(found, 1) if step % LOG_EVERY and step & (step - 1)]
    assert plain == [1] * 16
    # The values that are logged go to the host together.
    assert [found[step - 1] for step in range(LOG_EVERY, STEPS, LOG_EVERY)] == [2, 2]


def test_a_kind_of_clipping_costs_none(tmp_path: Path) -> None:
    for rule in ("norm", "value", "adaptive", "agc"):
        found = counts(tmp_path / rule, {"clip": plugin_class("clip")(rule=rule)})
        assert max(count for step, count in enumerate(found, 1) if step % LOG_EVERY) == 1, rule
