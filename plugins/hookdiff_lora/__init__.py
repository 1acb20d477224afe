"""Trains adapters of low rank beside frozen weights: LoRA."""

from hookdiff_lora.plugin import LoRA

__all__ = ["LoRA"]
