"""Image data sets of Hugging Face: from the hub, or from disk by the `datasets` library."""

import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from hookdiff import UserError, nearest, why_missing
from hookdiff.disk import check_kind, only_files, read_file, reason
from hookdiff.images import captions_of, encode, open_picture
from hookdiff.options import Connects, is_served


class HuggingFace:
    """The images in one column of a data set; needs `pip install 'hookdiff[hf]'`.

    Args:
        path: a folder that `save_to_disk` wrote, a folder of images or of .parquet files, a .parquet file, or a name
            on the hub
        split: split of the data set, such as "train"
        name: configuration, for a data set that has several
        image_column: column with the images; default: the first column of images
        label_column: column with the labels; "auto": the first column of class labels; "none": no labels
        caption_column: column with the captions of each image: a text or a list of texts

    Raises:
        ValueError: for a data set, split or column that does not exist.
        UserError: if the `datasets` library is not installed.
    """

    def __init__(
        self,
        path: Annotated[str, Connects(lambda path: isinstance(path, str) and not _is_here(path))],
        split: str = "train",
        name: str | None = None,
        image_column: str | None = None,
        label_column: str = "auto",
        caption_column: str | None = None,
    ) -> None:
        try:
            import datasets
        except ImportError:
            raise UserError("source = 'huggingface' needs the datasets library: pip install 'hookdiff[hf]'") from None
        try:
            with only_files():
                data = _open(path, split, name)
        except Exception as error:  # the library raises many kinds of error, also errors of its dependencies
            where = getattr(error, "filename", None) or path
            raise ValueError(f"{where}: {reason(error)}") from error
        column = image_column or _first_column(data, datasets.Image)
        if column is None:
            raise ValueError(f"{path}: no column has images: set image_column to one of {', '.join(data.features)}")
        try:
            # Not decoded here: hookdiff can then read only headers, and decode a large JPEG at a reduced size.
            self.images = data.select_columns([column]).cast_column(column, datasets.Image(decode=False))
        except (KeyError, NotImplementedError, TypeError, ValueError) as error:  # Arrow's own errors derive from these
            raise ValueError(f"{path}: image_column = {column!r}: {reason(error)}") from None
        self.path, self.column = path, column
        self.labels, self.classes = _labels(path, data, label_column)
        self.caption_column = caption_column
        self._captions = None if caption_column is None else _captions(path, data, caption_column)

    def __len__(self) -> int:
        return len(self.images)

    def load(self, index: int) -> Any:
        item = self.images[index][self.column]
        if item is None:
            raise ValueError("there is no image")
        return open_picture(item["path"] if item["bytes"] is None else io.BytesIO(item["bytes"]))

    def describe(self, index: int) -> str:
        return f"{self.path}[{index}]"

    @cached_property
    def texts(self) -> Mapping[str, Sequence[Sequence[str]]] | None:
        """The captions of each image as `text`, read at the first use; None without a `caption_column`.

        Raises:
            UserError: for a value that is not a text.
        """
        if self._captions is None:
            return None
        captions = list[Sequence[str]]()
        for index, value in enumerate(self._captions[self.caption_column][:]):
            try:
                captions.append(captions_of(value))
            except ValueError as error:
                raise UserError(f"{self.describe(index)}: {self.caption_column}: {error}") from None
        return {"text": captions}

    def fingerprint(self) -> str:
        return str(self.images._fingerprint)


def _is_here(path: str) -> bool:
    """Return whether `path` is a local path, and not a name on the hub."""
    place = Path(path).expanduser()
    return place.is_absolute() or path.startswith((".", "~")) or place.exists()


def _open(path: str, split: str, name: str | None) -> Any:
    import datasets

    place = Path(path).expanduser()
    if (place / "state.json").is_file() or (place / "dataset_dict.json").is_file():
        _check_saved(place)
        data = datasets.load_from_disk(str(place))
        if isinstance(data, dict) and split not in data:
            raise ValueError(f"no split {split!r}{nearest(split, data)}; it has {', '.join(data)}")
        return data[split] if isinstance(data, dict) else data
    if place.is_file():
        with _uncounted():
            return datasets.load_dataset("parquet", data_files={split: str(place)}, split=split)
    if path == "pandas":  # in versions before 5, the library would read pickles under this name
        raise ValueError("there is no data set of this name")
    if not place.exists() and _is_here(path):
        raise ValueError(why_missing(place))
    with _plain_urls(), _own_cache():
        if place.exists():
            with _uncounted():
                return datasets.load_dataset(str(place), name, split=split)
        return datasets.load_dataset(path, name, split=split)


def _check_saved(place: Path) -> None:
    """Raise OSError if a saved data set names a pipe, a socket or a device, which the library would map into memory.

    Files of a wrong format are left to the library, which refuses them.
    """
    with suppress(ValueError, KeyError, TypeError):
        split = place / "dataset_dict.json"
        splits = json.loads(read_file(split))["splits"] if split.is_file() else ["."]
        for name in splits:
            if (state := place / name / "state.json").is_file():
                for entry in json.loads(read_file(state))["_data_files"]:
                    check_kind(place / name / entry["filename"])


@contextmanager
def _uncounted() -> Iterator[None]:
    """Keep the library from reporting to its server that local files were opened."""
    from datasets import config

    counts, config.HF_UPDATE_DOWNLOAD_COUNTS = config.HF_UPDATE_DOWNLOAD_COUNTS, False
    try:
        yield
    finally:
        config.HF_UPDATE_DOWNLOAD_COUNTS = counts


@contextmanager
def _plain_urls() -> Iterator[None]:
    """Raise ValueError if the README of a data set names files by a URL that is not plain.

    For such a URL, the library would open any file system of fsspec, even one that runs templates or asks other hosts.
    """
    from datasets import data_files

    resolve = data_files.resolve_pattern

    def checked(pattern: str, *others: Any, **options: Any) -> list[str]:
        if ("::" in pattern or "://" in pattern) and not is_served(pattern):
            raise ValueError(f"its README names {pattern!r}, expected files or plain URLs")
        files: list[str] = resolve(pattern, *others, **options)
        return files

    data_files.resolve_pattern = checked
    try:
        yield
    finally:
        data_files.resolve_pattern = resolve


@contextmanager
def _own_cache() -> Iterator[None]:
    """Raise ValueError if a data set, such as by the version in its README, would be written outside of the cache.

    The library joins its cache, the name of the data set, the version and a hash, without a check of their values.
    """
    from datasets import DatasetBuilder

    build = DatasetBuilder._build_cache_dir

    def checked(self: Any) -> str:
        folder = str(build(self))
        if not Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(self._cache_dir_root)):
            named = f"the version {str(self.config.version)!r}"
            raise ValueError(f"its README names {named}, with which it would be written outside of the cache")
        return folder

    DatasetBuilder._build_cache_dir = checked
    try:
        yield
    finally:
        DatasetBuilder._build_cache_dir = build


def _labels(path: str, data: Any, given: str) -> tuple[Tensor | None, Sequence[str] | None]:
    import datasets

    column = _first_column(data, datasets.ClassLabel) if given == "auto" else given
    if column is None or column == "none":
        return None, None
    try:
        values = data.select_columns([column])[column][:]
        if not isinstance(data.features[column], datasets.ClassLabel):
            return encode(values)
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path}: label_column = {column!r}: {reason(error)}") from None
    return torch.tensor([-1 if label is None else label for label in values]), tuple(data.features[column].names)


def _captions(path: str, data: Any, column: str) -> Any:
    """Return the column with the captions. Raises ValueError unless they are texts or lists of texts."""
    where, known = f"{path}: caption_column = {column!r}", data.features
    if column not in known:
        raise ValueError(f"{where}: there is no such column{nearest(column, known)}; it has {', '.join(known)}")
    kind = known.arrow_schema.field(column).type
    if str(getattr(kind, "value_type", kind)) not in ("string", "large_string"):
        raise ValueError(f"{where}: expected texts or lists of texts, it has {kind}")
    return data.select_columns([column])


def _first_column(data: Any, kind: type) -> str | None:
    return next((column for column, feature in data.features.items() if isinstance(feature, kind)), None)
