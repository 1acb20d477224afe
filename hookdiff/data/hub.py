"""Image data sets of Hugging Face: on the hub, or as the `datasets` library reads them from disk."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookdiff.data.labels import number
from hookdiff.errors import UserError, nearest


class HuggingFace:
    """The images of one column of a data set.

    path: a folder that `save_to_disk` wrote, a folder of images or of .parquet files, one .parquet, or a name on the
    hub. name: the configuration, of a set that has several. image_column and label_column: the first of images, and
    the first of class labels, unless given; label_column = "none" takes no labels.

    Raises ValueError when there is no such set, split or column, and UserError without the library.
    """

    def __init__(
        self,
        path: str,
        split: str = "train",
        name: str | None = None,
        image_column: str | None = None,
        label_column: str | None = None,
    ) -> None:
        try:
            import datasets
        except ImportError:
            raise UserError("source = 'huggingface' needs the datasets library: pip install 'hookdiff[hf]'") from None
        try:
            data = _open(path, split, name)
        except Exception as error:  # the library raises many kinds, of its own and of those below it
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(f"{path}: {first}") from error
        features, self.path = data.features, path
        images = [column for column, feature in features.items() if isinstance(feature, datasets.Image)]
        column = image_column or next(iter(images), None)
        if column not in features:
            told = f"no column {column!r}{nearest(column, features)}" if column else "no column of images"
            raise ValueError(f"{path}: has {told}; it has {', '.join(features)}: say image_column")
        try:
            # Not decoded, so that a header can be looked at alone, and draft can do its work.
            self.images = data.select_columns([column]).cast_column(column, datasets.Image(decode=False))
        except (KeyError, NotImplementedError, TypeError, ValueError):  # Arrow has kinds of its own of them
            raise ValueError(f"{path}: the column {column!r} holds {features[column]}, expected images") from None
        self.column = column
        self.labels, self.classes = _labels(path, data, label_column)

    def __len__(self) -> int:
        return len(self.images)

    def load(self, index: int) -> Any:
        """Open the image; Pillow reads its pixels when they are asked for."""
        from PIL import Image

        item = self.images[index][self.column]
        if item is None:
            raise ValueError("there is no image")
        return Image.open(item["path"] if item["bytes"] is None else io.BytesIO(item["bytes"]))

    def describe(self, index: int) -> str:
        """Return the name of the set and the position in it."""
        return f"{self.path}[{index}]"

    def fingerprint(self) -> str:
        """Return the library's own hash of the data and of what was done to it."""
        return str(self.images._fingerprint)


def _open(path: str, split: str, name: str | None) -> Any:
    import datasets

    place = Path(path).expanduser()
    if (place / "state.json").is_file():
        return datasets.load_from_disk(str(place))
    if (place / "dataset_dict.json").is_file():
        found = datasets.load_from_disk(str(place))
        if split not in found:
            raise ValueError(f"no split {split!r}{nearest(split, found)}; it has {', '.join(found)}")
        return found[split]
    if place.suffix == ".parquet" or (place.is_dir() and any(place.glob("*.parquet"))):
        files = [str(place)] if place.is_file() else sorted(map(str, place.glob("*.parquet")))
        return datasets.load_dataset("parquet", data_files={split: files}, split=split)
    if place.is_dir():
        return datasets.load_dataset("imagefolder", data_dir=str(place), split=split)
    if place.is_absolute() or path.startswith((".", "~")):
        parent = place.parent
        near = nearest(place.name, [p.name for p in parent.iterdir()]) if parent.is_dir() else ""
        raise ValueError(f"no such file or folder{near}")
    return datasets.load_dataset(path, name, split=split)


def _labels(path: str, data: Any, column: str | None) -> tuple[Tensor | None, Sequence[str] | None]:
    import datasets

    features = data.features
    if column is None:
        column = next((each for each, kind in features.items() if isinstance(kind, datasets.ClassLabel)), None)
    if column is None or column == "none":
        return None, None
    if column not in features:
        raise ValueError(f"{path}: has no column {column!r}{nearest(column, features)}; it has {', '.join(features)}")
    found = data[column][:]
    if any(not isinstance(label, (str, int, type(None))) or isinstance(label, bool) for label in found):
        raise ValueError(f"{path}: the column {column!r} holds {features[column]}, expected whole numbers or names")
    if isinstance(features[column], datasets.ClassLabel):
        return torch.tensor([-1 if label is None else label for label in found]), tuple(features[column].names)
    if lacking := sum(label is None for label in found):
        raise ValueError(
            f"{path}: {lacking} of {len(found)} have no label in {column!r}; label_column = 'none' takes none"
        )
    return number(found)
