from .authors.evaluation import Evaluation as Evaluation
from .authors.periodic import Periodic as Periodic
from .authors.sinks import Sink as Sink, TrackedRun as TrackedRun
from .builtin import builtin_plugins as builtin_plugins
from .data.batch import Batch as Batch
from .data.feed import Feed as Feed
from .data.memory import InMemory as InMemory
from .disk.paths import why_missing as why_missing
from .errors import (
    ConfigError as ConfigError,
    HookError as HookError,
    PluginError as PluginError,
    StorageError as StorageError,
    UnknownWeights as UnknownWeights,
    UserError as UserError,
    listed as listed,
    nearest as nearest,
    shown as shown,
)
from .experiment.build import build_loop as build_loop
from .experiment.config import Config as Config, load_config as load_config
from .experiment.loaded_run import load_run as load_run
from .log.event import Finding as Finding
from .log.findings import Alarms as Alarms
from .loop.counts import LoopConfig as LoopConfig, Progress as Progress, Step as Step, Verdict as Verdict
from .loop.dispatch import PASS as PASS
from .loop.end import Reason as Reason
from .loop.hookspecs import HOOKS_VERSION as HOOKS_VERSION, Hooks as Hooks, hookimpl as hookimpl, plugin as plugin
from .loop.loop import Loop as Loop
from .loop.nonfinite import NonFinite as NonFinite
from .loop.saved import saved as saved
from .models.objective import LossOutput as LossOutput, Objective as Objective
from .models.sample_request import SampleRequest as SampleRequest, Samples as Samples
from .models.weights import evaluating as evaluating
from .options.every import Due as Due, Every as Every, parse_every as parse_every
