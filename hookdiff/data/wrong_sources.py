"""Objects that are given as data by mistake, and the code to write in their place."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hookdiff.data.memory import InMemory
from hookdiff.data.source import AnySource, Images, Source
from hookdiff.errors import UserError

logger = logging.getLogger("hookdiff")


def adapted(data: Any) -> AnySource:
    """Return any data as an AnySource. Raises UserError for an object that is no source."""
    if isinstance(data, AnySource):
        return data
    source = without_loader(data)
    if instead := remedy(source):
        raise UserError(f"the data is of type {type(source).__name__}, which cannot be trained on: {instead}")
    return AnySource(source)


def without_loader(data: Any) -> Any:
    """Return the data set of a DataLoader, with a warning, and any other object as it is.

    A run resumes within an epoch and repeats any step, so the Loop must know the order of the samples.
    """
    if not isinstance(data, DataLoader) or remedy(data):
        return data
    logger.warning(
        "data: only the data set of the DataLoader is used; its order, batch size, workers and collate_fn are not: the "
        "Loop makes batches of LoopConfig.batch_size, and feed_of(loader.dataset, workers=2) loads them ahead"
    )
    return data.dataset


def remedy(data: object) -> str | None:
    """Return the way out for an object that is no data set; None for one that may be a data set."""
    if isinstance(data, DataLoader):
        return remedy(data.dataset)
    if isinstance(data, numpy.ndarray):
        return "give `torch.from_numpy(array)`: images n c h w, uint8 or floats in [-1, 1]"
    if isinstance(data, tuple):
        return "give `InMemory(images, labels)` of tensors, or a list of samples"
    if isinstance(data, Mapping):
        return 'give `InMemory(images, labels, conditions={"mask": masks})` of tensors'
    if isinstance(data, (str, Path)):
        return f"give `Folder({str(data)!r})`, from hookdiff.images, for a folder of images"
    if isinstance(data, (InMemory, Images, Source)) and not isinstance(data, IterableDataset):
        return None
    if hasattr(data, "__iter__"):
        return (
            "the samples are read in another order in each epoch: give `list(data)`, or a class with a length and [i]; "
            "to train on a stream, give a few samples, `Feed(samples, drop_last=False)`, and call "
            "`loop.run_step(batch)` for each batch"
        )
    return "give a tensor n c h w, an InMemory, or an object with a length and [i]"


def may_be_data(kind: type) -> bool:
    """Return whether objects of this class may be a data set: they have a length, and `[i]` or the methods of `Images`.

    Mappings, tables and arrays are no data sets, nor are the data sets of torchvision that read a pickle.
    """
    methods = {name for owner in kind.__mro__ for name in vars(owner)}
    is_source = "__len__" in methods and ("__getitem__" in methods or {"load", "describe"} <= methods)
    is_other = "keys" in methods or issubclass(kind, numpy.ndarray) or kind.__module__ == "torchvision.datasets.lsun"
    return not is_other and (is_source or issubclass(kind, (InMemory, Dataset)))
