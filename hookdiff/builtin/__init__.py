"""The plugins of every run from a config; a script adds them with one call."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hookdiff.builtin.config_changes import Changes
from hookdiff.builtin.directory import RunDir
from hookdiff.builtin.events import Events
from hookdiff.builtin.logged import Distributions, Metrics, Texts
from hookdiff.builtin.pictures import Pictures
from hookdiff.builtin.signals import Signals
from hookdiff.builtin.skip import SkipBatches
from hookdiff.builtin.start_from import Start


def builtin_plugins(
    *,
    overwrite: bool = False,
    signals: bool = True,
    fit_micro_batch: bool = False,
    start_from: str | None = None,
    start_partial: bool = False,
    skip_batches: int = 0,
    defaults: Mapping[str, Any] | None = None,
    fixed: Mapping[str, str] | None = None,
    written: Callable[[Path, bytes], object] | None = None,
) -> dict[str, object]:
    """Return the plugins of every run by name, in the order in which they are called.

    A script puts these plugins before its own: `Loop(..., plugins={**builtin_plugins(), "ema": EMA()})`.

    Args:
        overwrite: delete an earlier run in the run directory
        signals: end the run cleanly on SIGINT and SIGTERM
        fit_micro_batch: find the largest micro-batch that fits in memory
        start_from: safetensors file, or the index of several, with the weights of a new run
        start_partial: load only the tensors of `start_from` that fit
        skip_batches: number of batches to skip at the start
        defaults: defaults of the config; if given, a resumed run logs the keys that have changed since its checkpoint
        fixed: more keys that must not change on resume, with the reasons; some keys are fixed in every run
        written: called with the path and the bytes of config.toml once the run has written it
    """
    plugins: dict[str, object] = {"signals": Signals()} if signals else {}
    if fit_micro_batch:
        from hookdiff.builtin.micro_batch import FitMicroBatch

        plugins["micro_batch"] = FitMicroBatch()  # before run_dir, which writes this size to the config
    plugins |= {
        "run_dir": RunDir(overwrite, written),
        "metrics": Metrics(),
        "texts": Texts(),
        "distributions": Distributions(),
    }
    plugins |= {"images": Pictures(), "events": Events()}
    if defaults is not None:
        plugins["changes"] = Changes(defaults, fixed or {})
    if start_from:
        plugins["start"] = Start(start_from, start_partial)
    if skip_batches:
        plugins["skip_batches"] = SkipBatches(skip_batches)
    return plugins
