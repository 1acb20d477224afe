"""Sources of samples, and how they become batches."""

from hookdiff.data.batch import Batch
from hookdiff.data.digits import digits
from hookdiff.data.feed import Feed
from hookdiff.data.memory import InMemory

__all__ = ["Batch", "Feed", "InMemory", "digits"]
