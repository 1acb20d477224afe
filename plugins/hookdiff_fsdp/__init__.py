"""Trains on several devices, with a part of the model on each."""

from hookdiff_fsdp.plugin import FSDP

__all__ = ["FSDP"]
