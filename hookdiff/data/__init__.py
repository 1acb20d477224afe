"""Sources of samples, and the steps that turn them into batches."""

from hookdiff.data.batch import Batch
from hookdiff.data.facts import Facts
from hookdiff.data.feed import Feed
from hookdiff.data.folder import Folder
from hookdiff.data.memory import InMemory, digits, fashion_mnist, to_unit_range
from hookdiff.data.remembered import Remembered
from hookdiff.data.source import Images, Source
from hookdiff.data.store import Store
from hookdiff.data.transforms import Transforms

__all__ = [
    "Batch",
    "Facts",
    "Feed",
    "Folder",
    "Images",
    "InMemory",
    "Remembered",
    "Source",
    "Store",
    "Transforms",
    "digits",
    "fashion_mnist",
    "to_unit_range",
]
