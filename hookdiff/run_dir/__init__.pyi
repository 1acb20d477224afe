from .checkpoints import CHECKPOINTS as CHECKPOINTS, checkpoint_name as checkpoint_name, step_of as step_of
from .config_toml import CONFIG as CONFIG, flat as flat
from .distributions_jsonl import DISTRIBUTIONS as DISTRIBUTIONS
from .events_jsonl import (
    BEGINS as BEGINS,
    EVENTS as EVENTS,
    LoggedEvent as LoggedEvent,
    follow_events as follow_events,
    skim_events as skim_events,
)
from .history import (
    History as History,
    asked_number as asked_number,
    find_runs as find_runs,
    total_steps as total_steps,
)
from .layout import run_of as run_of
from .lines import Logged as Logged, Tail as Tail, without_times as without_times
from .metrics_jsonl import (
    DISTANCES as DISTANCES,
    METRICS as METRICS,
    SMOOTHED as SMOOTHED,
    follow_metrics as follow_metrics,
    is_distance as is_distance,
    read_metrics as read_metrics,
    skim_metrics as skim_metrics,
)
from .outcome_json import OUTCOME as OUTCOME
from .pictures_png import (
    newest_picture as newest_picture,
    picture_files as picture_files,
    picture_path as picture_path,
    read_picture as read_picture,
)
from .texts_jsonl import TEXTS as TEXTS
from .thinned import MOST_LINES as MOST_LINES
