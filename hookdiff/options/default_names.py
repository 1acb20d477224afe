"""The default plugins and parts. No other module of hookdiff/ names a plugin, or a part of a plugin's package."""

from collections.abc import Mapping

# The plugins of a config that names none: they keep training stable, sample well, and save checkpoints.
DEFAULT_PLUGINS = ("lr", "clip", "amp", "ema", "autoguidance", "nan", "checkpoint", "samples", "progress")
DEFAULT_OPTIMIZER = "muon"
# The networks of features for small images, by shape (c h w), and the network for images of other shapes.
DEFAULT_FEATURES: Mapping[tuple[int, ...], str] = {(1, 8, 8): "digits", (1, 28, 28): "fashion-mnist"}
FEATURES_OF_OTHERS = "inception"
