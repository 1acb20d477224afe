"""Reads samples from tar files, on disk or by URL: `source = "shards"`."""

from hookdiff_shards.conditions import Items
from hookdiff_shards.samples import Shards
from hookdiff_shards.source import shards

__all__ = ["Items", "Shards", "shards"]
