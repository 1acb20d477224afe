"""Objects that are given as data by mistake, and what to write instead."""

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
    """Return any data as a source with every member. Raises UserError for an object that is no source."""
    if isinstance(data, AnySource):
        return data
    given = without_loader(data)
    if instead := remedy(given):
        raise UserError(f"the data is of type {type(given).__name__}, which cannot be trained on: {instead}")
    return AnySource(given)


def without_loader(given: Any) -> Any:
    """Return the data set of a DataLoader, with a warning, and any other object as it is.

    A run resumes within an epoch and repeats any step, so the Loop must know the order of the samples.
    """
    if not isinstance(given, DataLoader) or remedy(given):
        return given
    logger.warning(
        "data: only the data set of the DataLoader is used; its order, batch size, workers and collate_fn are not: the "
        "Loop makes batches of LoopConfig.batch_size, and feed_of(loader.dataset, workers=2) loads them ahead"
    )
    return given.dataset


def remedy(given: object) -> str | None:
    """Return what to give in place of an object that is no data set; None for one that may be a data set."""
    if isinstance(given, DataLoader):
        return remedy(given.dataset)
    if isinstance(given, numpy.ndarray):
        return "give `torch.from_numpy(array)`: images n c h w, uint8 or floats in [-1, 1]"
    if isinstance(given, tuple):
        return "give `InMemory(images, labels)` of tensors, or a list of samples"
    if isinstance(given, Mapping):
        return 'give `InMemory(images, labels, conditions={"mask": masks})` of tensors'
    if isinstance(given, (str, Path)):
        return f"give `Folder({str(given)!r})`, from hookdiff.images, for a folder of images"
    if isinstance(given, (InMemory, Images, Source)) and not isinstance(given, IterableDataset):
        return None
    if hasattr(given, "__iter__"):
        return (
            "the samples are read in another order in each epoch: give `list(data)`, or a class with a length and [i]; "
            "to train on a stream, give a few samples, `Feed(samples, drop_last=False)`, and call "
            "`loop.run_step(batch)` for each batch"
        )
    return "give a tensor n c h w, an InMemory, or an object with a length and [i]"


def may_be_data(kind: type) -> bool:
    """Return whether objects of this class may be a data set: they have a length, and `[i]` or the methods of `Images`.

    Neither mappings nor tables nor arrays are data sets, nor are the sets of torchvision that read a pickle.
    """
    methods = {name for owner in kind.__mro__ for name in vars(owner)}
    is_source = "__len__" in methods and ("__getitem__" in methods or {"load", "describe"} <= methods)
    is_other = "keys" in methods or issubclass(kind, numpy.ndarray) or kind.__module__ == "torchvision.datasets.lsun"
    return not is_other and (is_source or issubclass(kind, (InMemory, Dataset)))
