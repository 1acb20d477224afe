"""Turns a TOML file into a Loop: reads and checks the config, builds its parts, finds problems that building shows."""

from hookdiff.experiment.build import build_feed, build_loop, make_model, pick_device
from hookdiff.experiment.config import Config, load_config
from hookdiff.experiment.part import Part
from hookdiff.experiment.probe import try_config, try_optimizers

__all__ = [
    "Config",
    "Part",
    "build_feed",
    "build_loop",
    "load_config",
    "make_model",
    "pick_device",
    "try_config",
    "try_optimizers",
]
