"""Saves checkpoints in safetensors and JSON, in the background."""

from hookdiff_checkpoint.folder import find_checkpoints, read_checkpoint
from hookdiff_checkpoint.plugin import Checkpoint

__all__ = ["Checkpoint", "find_checkpoints", "read_checkpoint"]
