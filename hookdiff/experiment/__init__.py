"""Turns a TOML file into a Loop: reads and checks the config, builds its parts, finds problems that building shows."""

from hookdiff.experiment.build import build_feed, build_loop, make_model, pick_device, set_by_data
from hookdiff.experiment.config import Config, load_config, make_plugin
from hookdiff.experiment.load import Run, load_run, run_config
from hookdiff.experiment.part import Part
from hookdiff.experiment.probe import try_config, try_optimizers

__all__ = [
    "Config",
    "Part",
    "Run",
    "build_feed",
    "build_loop",
    "load_config",
    "load_run",
    "make_model",
    "make_plugin",
    "pick_device",
    "run_config",
    "set_by_data",
    "try_config",
    "try_optimizers",
]
