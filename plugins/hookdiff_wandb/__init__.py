"""Tracks runs in Weights & Biases."""

from hookdiff_wandb.plugin import WandB

__all__ = ["WandB"]
