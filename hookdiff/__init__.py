"""A small, hook-based trainer for diffusion models: the public names."""

from hookdiff.data.batch import Batch
from hookdiff.data.feed import Feed
from hookdiff.data.memory import InMemory
from hookdiff.errors import ConfigError, PluginError, UserError
from hookdiff.hookspecs import Hooks, Reason, Verdict, hookimpl
from hookdiff.log import Log
from hookdiff.loop import Loop
from hookdiff.nonfinite import NonFinite
from hookdiff.objective import LossOutput, Objective
from hookdiff.progress import Due, Every, LoopConfig, Progress, Step
from hookdiff.randomness import derive_seed
from hookdiff.sampling import Sampler, SampleRequest, Samples
from hookdiff.weights import borrowed_weights

__all__ = [
    "Batch",
    "ConfigError",
    "Due",
    "Every",
    "Feed",
    "Hooks",
    "InMemory",
    "Log",
    "Loop",
    "LoopConfig",
    "LossOutput",
    "NonFinite",
    "Objective",
    "PluginError",
    "Progress",
    "Reason",
    "SampleRequest",
    "Sampler",
    "Samples",
    "Step",
    "UserError",
    "Verdict",
    "borrowed_weights",
    "derive_seed",
    "hookimpl",
]
