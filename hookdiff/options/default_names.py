"""The default plugins and parts, and the groups of commands.

No other module of hookdiff/ names a plugin, or a part or a command of a plugin's package.
"""

from collections.abc import Mapping

# The plugins of a config that names none: they keep training stable, sample well, and save checkpoints.
DEFAULT_PLUGINS = ("lr", "clip", "amp", "ema", "autoguidance", "nan", "checkpoint", "samples", "progress")
DEFAULT_OPTIMIZER = "muon"
# The networks of features for small images, by shape (c h w), and the network for images of other shapes.
DEFAULT_FEATURES: Mapping[tuple[int, ...], str] = {(1, 8, 8): "digits", (1, 28, 28): "fashion-mnist"}
FEATURES_OF_OTHERS = "inception"
# The commands in `hookdiff --help`, by the purpose for which one looks for them; those of other packages come last.
COMMAND_GROUPS: Mapping[str, tuple[str, ...]] = {
    "Begin": ("init", "run", "resume", "sample", "report"),
    "Look": ("check", "data", "doctor", "watch", "runs", "lr", "ema"),
    "Measure": ("fid", "memory", "profile"),
    "Prove": ("selftest", "replay"),
    "Extend": ("plugins", "hooks", "schema", "new-plugin", "export", "mirror"),
}
