"""What the files of a run directory say about a run, also while another process writes them. It imports no torch."""

from hookdiff.history.history import BEGINS, History, find_runs, is_run_dir, total_steps
from hookdiff.history.lines import (
    DISTRIBUTIONS,
    EVENTS,
    METRICS,
    TEXTS,
    LoggedEvent,
    Tail,
    parse_event,
    parse_metrics,
    read_distributions,
    read_events,
    read_metrics,
    read_texts,
)
from hookdiff.history.pictures import find_pictures, newest_picture, picture_files, picture_path, read_picture
from hookdiff.history.skim import Skim

__all__ = [
    "BEGINS",
    "DISTRIBUTIONS",
    "EVENTS",
    "METRICS",
    "TEXTS",
    "History",
    "LoggedEvent",
    "Skim",
    "Tail",
    "find_pictures",
    "find_runs",
    "is_run_dir",
    "newest_picture",
    "parse_event",
    "parse_metrics",
    "picture_files",
    "picture_path",
    "read_distributions",
    "read_events",
    "read_metrics",
    "read_picture",
    "read_texts",
    "total_steps",
]
