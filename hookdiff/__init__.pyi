from .builtin import builtin_plugins as builtin_plugins
from .data import Batch as Batch, Feed as Feed, InMemory as InMemory
from .dispatch import PASS as PASS
from .errors import (
    ConfigError as ConfigError,
    HookError as HookError,
    PluginError as PluginError,
    StorageError as StorageError,
    UserError as UserError,
    nearest as nearest,
)
from .evaluation import Evaluation as Evaluation
from .experiment import (
    Config as Config,
    build_loop as build_loop,
    load_config as load_config,
    load_run as load_run,
)
from .findings import Alarms as Alarms, Finding as Finding
from .hookspecs import HOOKS_VERSION as HOOKS_VERSION, Hooks as Hooks, hookimpl as hookimpl
from .loop import Loop as Loop
from .nonfinite import NonFinite as NonFinite
from .objective import LossOutput as LossOutput, Objective as Objective
from .periodic import Periodic as Periodic
from .progress import (
    Due as Due,
    Every as Every,
    LoopConfig as LoopConfig,
    Progress as Progress,
    Reason as Reason,
    Step as Step,
    Verdict as Verdict,
    parse_every as parse_every,
)
from .sampling import Sampler as Sampler, SampleRequest as SampleRequest, Samples as Samples
from .sinks import Sink as Sink, TrackedRun as TrackedRun
from .weights import evaluating as evaluating
