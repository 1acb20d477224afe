"""The plugins and parts that are used unless others are named. No other module of hookdiff/ names one of a package."""

from collections.abc import Mapping

# The plugins of a config that names none: what a training needs to be stable, sampled well, and continued.
DEFAULT_PLUGINS = ("lr", "clip", "amp", "ema", "autoguidance", "nan", "checkpoint", "samples", "progress")
DEFAULT_OPTIMIZER = "muon"
# A small network of such images, by their shape, c h w; and the network for all others.
DEFAULT_FEATURES: Mapping[tuple[int, ...], str] = {(1, 8, 8): "digits", (1, 28, 28): "fashion-mnist"}
FEATURES_OF_OTHERS = "inception"
