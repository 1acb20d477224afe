"""A small, hook-based trainer for diffusion models: the public names.

They are imported on first use, so that `hookdiff --help` does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookdiff.buffers import Buffers
    from hookdiff.cli.options import config_argument, override_options
    from hookdiff.config import Config, load_config
    from hookdiff.data.batch import Batch
    from hookdiff.data.feed import Feed
    from hookdiff.data.memory import InMemory
    from hookdiff.dispatch import HookError
    from hookdiff.errors import ConfigError, PluginError, StorageError, UserError, nearest
    from hookdiff.experiment import build_loop, try_optimizers
    from hookdiff.files import (
        Written,
        cannot_write,
        check_tensors,
        make_folder,
        new_file,
        new_folder,
        write_file,
        write_tensors,
    )
    from hookdiff.fit_micro_batch import FitMicroBatch
    from hookdiff.hookspecs import Hooks, Reason, Verdict, hookimpl
    from hookdiff.images import as_pictures, check_writable, save_grid
    from hookdiff.lock import lock_run_dir
    from hookdiff.log import Log
    from hookdiff.loop import Loop
    from hookdiff.memory_estimate import HeldBytes, MemoryEstimate, estimate_memory
    from hookdiff.metrics import Metrics
    from hookdiff.nonfinite import NonFinite
    from hookdiff.objective import LossOutput, Objective
    from hookdiff.progress import Due, Every, LoopConfig, Progress, Step, parse_every
    from hookdiff.randomness import derive_seed
    from hookdiff.restore import is_branch
    from hookdiff.run_dir import run_of
    from hookdiff.sampling import Sampler, SampleRequest, Samples, UnknownWeights, ask_network
    from hookdiff.signals import Signals
    from hookdiff.sinks import Sink
    from hookdiff.start import load_into
    from hookdiff.state import flatten, run_state, unflatten
    from hookdiff.weights import borrowed_weights, evaluating

_HOME = {
    "Batch": "hookdiff.data.batch",
    "Buffers": "hookdiff.buffers",
    "Config": "hookdiff.config",
    "ConfigError": "hookdiff.errors",
    "Due": "hookdiff.progress",
    "Every": "hookdiff.progress",
    "Feed": "hookdiff.data.feed",
    "FitMicroBatch": "hookdiff.fit_micro_batch",
    "HeldBytes": "hookdiff.memory_estimate",
    "HookError": "hookdiff.dispatch",
    "Hooks": "hookdiff.hookspecs",
    "InMemory": "hookdiff.data.memory",
    "Log": "hookdiff.log",
    "Loop": "hookdiff.loop",
    "LoopConfig": "hookdiff.progress",
    "LossOutput": "hookdiff.objective",
    "MemoryEstimate": "hookdiff.memory_estimate",
    "Metrics": "hookdiff.metrics",
    "NonFinite": "hookdiff.nonfinite",
    "Objective": "hookdiff.objective",
    "PluginError": "hookdiff.errors",
    "Progress": "hookdiff.progress",
    "Reason": "hookdiff.hookspecs",
    "SampleRequest": "hookdiff.sampling",
    "Sampler": "hookdiff.sampling",
    "Samples": "hookdiff.sampling",
    "Signals": "hookdiff.signals",
    "Sink": "hookdiff.sinks",
    "Step": "hookdiff.progress",
    "StorageError": "hookdiff.errors",
    "UnknownWeights": "hookdiff.sampling",
    "UserError": "hookdiff.errors",
    "Written": "hookdiff.files",
    "Verdict": "hookdiff.hookspecs",
    "as_pictures": "hookdiff.images",
    "ask_network": "hookdiff.sampling",
    "borrowed_weights": "hookdiff.weights",
    "build_loop": "hookdiff.experiment",
    "cannot_write": "hookdiff.files",
    "check_tensors": "hookdiff.files",
    "check_writable": "hookdiff.images",
    "config_argument": "hookdiff.cli.options",
    "derive_seed": "hookdiff.randomness",
    "estimate_memory": "hookdiff.memory_estimate",
    "evaluating": "hookdiff.weights",
    "flatten": "hookdiff.state",
    "hookimpl": "hookdiff.hookspecs",
    "is_branch": "hookdiff.restore",
    "load_config": "hookdiff.config",
    "load_into": "hookdiff.start",
    "lock_run_dir": "hookdiff.lock",
    "make_folder": "hookdiff.files",
    "nearest": "hookdiff.errors",
    "new_file": "hookdiff.files",
    "new_folder": "hookdiff.files",
    "override_options": "hookdiff.cli.options",
    "parse_every": "hookdiff.progress",
    "run_of": "hookdiff.run_dir",
    "run_state": "hookdiff.state",
    "save_grid": "hookdiff.images",
    "try_optimizers": "hookdiff.experiment",
    "unflatten": "hookdiff.state",
    "write_file": "hookdiff.files",
    "write_tensors": "hookdiff.files",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'hookdiff' has no attribute {name!r}")


__all__ = [
    "Batch",
    "Buffers",
    "Config",
    "ConfigError",
    "Due",
    "Every",
    "Feed",
    "FitMicroBatch",
    "HeldBytes",
    "HookError",
    "Hooks",
    "InMemory",
    "Log",
    "Loop",
    "LoopConfig",
    "LossOutput",
    "MemoryEstimate",
    "Metrics",
    "NonFinite",
    "Objective",
    "PluginError",
    "Progress",
    "Reason",
    "SampleRequest",
    "Sampler",
    "Samples",
    "Signals",
    "Sink",
    "Step",
    "StorageError",
    "UnknownWeights",
    "UserError",
    "Verdict",
    "Written",
    "as_pictures",
    "ask_network",
    "borrowed_weights",
    "build_loop",
    "cannot_write",
    "check_tensors",
    "check_writable",
    "config_argument",
    "derive_seed",
    "estimate_memory",
    "evaluating",
    "flatten",
    "hookimpl",
    "is_branch",
    "load_config",
    "load_into",
    "lock_run_dir",
    "make_folder",
    "nearest",
    "new_file",
    "new_folder",
    "override_options",
    "parse_every",
    "run_of",
    "run_state",
    "save_grid",
    "try_optimizers",
    "unflatten",
    "write_file",
    "write_tensors",
]
