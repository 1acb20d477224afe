from .builtin import builtin_plugins as builtin_plugins
from .data import Batch as Batch
from .data import Feed as Feed
from .data import InMemory as InMemory
from .errors import (
    ConfigError as ConfigError,
)
from .errors import (
    HookError as HookError,
)
from .errors import (
    PluginError as PluginError,
)
from .errors import (
    StorageError as StorageError,
)
from .errors import (
    UserError as UserError,
)
from .errors import (
    nearest as nearest,
)
from .experiment import Config as Config
from .experiment import build_loop as build_loop
from .experiment import load_config as load_config
from .findings import Alarms as Alarms
from .findings import Finding as Finding
from .hookspecs import Hooks as Hooks
from .hookspecs import hookimpl as hookimpl
from .loop import Loop as Loop
from .nonfinite import NonFinite as NonFinite
from .objective import LossOutput as LossOutput
from .objective import Objective as Objective
from .progress import (
    Due as Due,
)
from .progress import (
    Every as Every,
)
from .progress import (
    LoopConfig as LoopConfig,
)
from .progress import (
    Progress as Progress,
)
from .progress import (
    Reason as Reason,
)
from .progress import (
    Step as Step,
)
from .progress import (
    Verdict as Verdict,
)
from .progress import (
    parse_every as parse_every,
)
from .sampling import (
    Sampler as Sampler,
)
from .sampling import (
    SampleRequest as SampleRequest,
)
from .sampling import (
    Samples as Samples,
)
from .sampling import (
    UnknownWeights as UnknownWeights,
)
from .sinks import Sink as Sink
from .weights import evaluating as evaluating
