"""Trains on several devices, with a copy of the model on each."""

from hookdiff_ddp.plugin import DDP

__all__ = ["DDP"]
