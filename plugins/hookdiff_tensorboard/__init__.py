"""Tracks runs in TensorBoard."""

from hookdiff_tensorboard.plugin import TensorBoard

__all__ = ["TensorBoard"]
