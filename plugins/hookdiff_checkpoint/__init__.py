"""Checkpoints in safetensors and JSON, written atomically."""

from hookdiff_checkpoint.files import read_checkpoint, write_checkpoint
from hookdiff_checkpoint.plugin import Checkpoint

__all__ = ["Checkpoint", "read_checkpoint", "write_checkpoint"]
