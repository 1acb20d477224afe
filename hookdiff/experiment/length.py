"""The length of a training in updates."""

import tempfile
from pathlib import Path

from hookdiff.experiment.build import build_loop
from hookdiff.experiment.config import Config
from hookdiff.experiment.loaded_run import load_run


def num_steps(config: Config, run: Path | None = None, *, trust: bool = False) -> int:
    """Return the number of updates of a training with `config`.

    If the config gives epochs, the length of an epoch is read from a checkpoint of the directory `run`. Default: from
    the data. `trust` is as in `load_run`.
    """
    if config.run.steps is not None:
        return config.run.steps
    assert config.run.epochs is not None  # a config has one of them
    if run is not None:
        with load_run(run, device="cpu", trust=trust) as opened:
            return opened.loop.feed.num_batches(config.run.epochs)
    with tempfile.TemporaryDirectory() as folder:
        return build_loop(config, Path(folder), hooks=()).feed.num_batches(config.run.epochs)
