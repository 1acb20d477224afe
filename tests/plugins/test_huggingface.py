"""Test data sets of Hugging Face with the real library and without the network."""

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image

from hookdiff import UserError
from hookdiff.images import Store, Transforms, feed_of
from hookdiff.testing import assert_same
from hookdiff_huggingface import HuggingFace
from tests.conftest import as_list, pixels, refused

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def picture(seed: int, side: int = 10) -> Image.Image:
    return Image.fromarray(pixels(seed, side))


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    datasets.disable_progress_bars()
    return datasets


@pytest.fixture
def made(alone: Any) -> Any:
    """Return a data set of nine pictures in three classes, with captions and counts."""
    columns = {
        "caption": (alone.Value("string"), [("even", "odd")[k % 2] for k in range(9)]),
        "pixels": (alone.Image(), [picture(k) for k in range(9)]),
        "kind": (alone.ClassLabel(names=["ant", "bee", "cat"]), [k % 3 for k in range(9)]),
        "count": (alone.Value("int64"), list(range(9))),
    }
    features = alone.Features({name: kind for name, (kind, _) in columns.items()})
    return alone.Dataset.from_dict({name: values for name, (_, values) in columns.items()}, features=features)


def assert_is(data: HuggingFace, labels: Any, classes: Any) -> None:
    assert len(data) == 9
    assert (as_list(data.labels), data.classes) == (labels, classes)
    for index in range(9):
        assert numpy.array_equal(numpy.array(data.load(index)), pixels(index))


def test_a_saved_set_is_read(tmp_path: Path, made: Any) -> None:
    made.save_to_disk(str(tmp_path / "saved"))
    data = HuggingFace(str(tmp_path / "saved"))
    assert_is(data, [k % 3 for k in range(9)], ("ant", "bee", "cat"))
    assert data.describe(4) == f"{tmp_path}/saved[4]"
    assert data.fingerprint() == HuggingFace(str(tmp_path / "saved")).fingerprint()
    assert HuggingFace(str(tmp_path / "saved"), label_column="none").labels is None
    assert_is(HuggingFace(str(tmp_path / "saved"), label_column="count"), list(range(9)), None)
    words = HuggingFace(str(tmp_path / "saved"), label_column="caption", image_column="pixels")
    assert_is(words, [k % 2 for k in range(9)], ("even", "odd"))


def test_a_split_of_a_saved_set_is_read(tmp_path: Path, alone: Any, made: Any) -> None:
    alone.DatasetDict({"train": made, "test": made.select(range(3))}).save_to_disk(str(tmp_path / "saved"))
    assert_is(HuggingFace(str(tmp_path / "saved")), [k % 3 for k in range(9)], ("ant", "bee", "cat"))
    assert len(HuggingFace(str(tmp_path / "saved"), split="test")) == 3
    with refused(ValueError, "'tets'", "'test'", "train, test"):
        HuggingFace(str(tmp_path / "saved"), split="tets")


@pytest.mark.parametrize("where", ["set", "set/part-0.parquet"])
def test_parquet_files_are_read(tmp_path: Path, made: Any, where: str) -> None:
    (tmp_path / "set").mkdir()
    made.to_parquet(str(tmp_path / "set" / "part-0.parquet"))
    assert_is(HuggingFace(str(tmp_path / where)), [k % 3 for k in range(9)], ("ant", "bee", "cat"))


def test_splits_of_parquet_files_are_read(tmp_path: Path, made: Any) -> None:
    for split, num in (("train", 9), ("test", 4)):
        made.select(range(num)).to_parquet(str(tmp_path / "set" / f"{split}-00000-of-00001.parquet"))
    assert (len(HuggingFace(str(tmp_path / "set"))), len(HuggingFace(str(tmp_path / "set"), split="test"))) == (9, 4)


def test_a_folder_of_images_is_read(tmp_path: Path) -> None:
    for k in range(9):
        path = tmp_path / "set" / ("ant", "bee", "cat")[k % 3] / f"{k}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(k).save(path)
    data = HuggingFace(str(tmp_path / "set"))
    assert (data.classes, sorted(as_list(data.labels))) == (("ant", "bee", "cat"), [0, 0, 0, 1, 1, 1, 2, 2, 2])
    assert len(data) == 9
    assert {data.load(index).tobytes() for index in range(9)} == {picture(k).tobytes() for k in range(9)}


def test_a_column_has_captions(tmp_path: Path, alone: Any, made: Any) -> None:
    lists = [[" one", "two"], [], None, ["", "three"], *[["x"]] * 5]
    made = made.add_column("lists", lists).add_column("mixed", [["x", None]] * 9)
    made.add_column("large", ["a"] * 9, feature=alone.Value("large_string")).save_to_disk(str(tmp_path / "saved"))
    for column, expected in [
        ("caption", [(("even", "odd")[k % 2],) for k in range(9)]),
        ("lists", [("one", "two"), (), (), ("three",), *[("x",)] * 5]),
        ("large", [("a",)] * 9),
    ]:
        data = HuggingFace(str(tmp_path / "saved"), caption_column=column)
        assert data.texts == {"text": expected}
        assert data.fingerprint() == HuggingFace(str(tmp_path / "saved")).fingerprint()
    assert HuggingFace(str(tmp_path / "saved")).texts is None
    with refused(UserError, "saved[0]", "mixed", "['x', None]"):
        HuggingFace(str(tmp_path / "saved"), caption_column="mixed").texts  # noqa: B018


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"image_column": "pixel"}, ("'pixel'", "'pixels'", "image_column")),
        ({"image_column": "count"}, ("'count'",)),
        ({"label_column": "kidn"}, ("'kidn'", "'kind'")),
        ({"label_column": "pixels"}, ("'pixels'",)),
        ({"caption_column": "captoin"}, ("caption_column", "'captoin'", "did you mean 'caption'", "count")),
        ({"caption_column": "count"}, ("caption_column", "'count'", "int64")),
        ({"caption_column": "kind"}, ("caption_column", "'kind'", "int64")),
    ],
)
def test_missing_columns_are_refused(tmp_path: Path, made: Any, options: Any, facts: Any) -> None:
    made.save_to_disk(str(tmp_path / "saved"))
    with refused(ValueError, *facts):
        HuggingFace(str(tmp_path / "saved"), **options)


def test_missing_sets_are_refused(tmp_path: Path, made: Any) -> None:
    made.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "empty").mkdir()
    for path, fact in ((tmp_path / "savde", "'saved'"), ("nobody/nothing", "nothing"), (tmp_path / "empty", "empty")):
        with refused(ValueError, path, fact):
            HuggingFace(str(path))


@pytest.mark.wide
def test_every_store_gives_the_same_batch(tmp_path: Path, made: Any) -> None:
    made.save_to_disk(str(tmp_path / "saved"))
    batches = []
    store: Any
    for store, workers in (("memory", 0), ("disk", 0), ("none", 2)):
        settings = Store(store=store, cache_dir=str(tmp_path / "cache"))
        transforms = Transforms(image_size=6, flip=True)
        feed = feed_of(HuggingFace(str(tmp_path / "saved")), transforms=transforms, store=settings, workers=workers)
        (batch,) = feed.bind(9).batches(0)
        batches.append({"inputs": batch.inputs, "labels": batch.labels})
    for other in batches[1:]:
        assert_same(other, batches[0])


def test_missing_images_are_refused(tmp_path: Path, alone: Any) -> None:
    rows = {"image": [picture(0, 4), None, picture(2, 4)]}
    alone.Dataset.from_dict(rows, features=alone.Features({"image": alone.Image()})).save_to_disk(str(tmp_path / "set"))
    with refused(UserError, 1, 3, "set[1]"):
        feed_of(HuggingFace(str(tmp_path / "set")))


def test_a_missing_label_is_minus_one_or_refused(tmp_path: Path, alone: Any) -> None:
    image, label = alone.Image(), alone.ClassLabel(names=["ant", "bee"])
    rows = {"image": [picture(k, 4) for k in range(3)], "label": [1, None, 0], "name": ["a", None, "b"]}
    features = alone.Features({"image": image, "label": label, "name": alone.Value("string")})
    alone.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "set"))
    assert as_list(HuggingFace(str(tmp_path / "set")).labels) == [1, -1, 0]
    with refused(ValueError, "set", "'name'", None):
        HuggingFace(str(tmp_path / "set"), label_column="name")


@pytest.mark.parametrize("key", ["version", "config_name", "data_files"])
def test_a_readme_names_no_folder_outside_of_the_cache(tmp_path: Path, made: Any, key: str) -> None:
    folder = tmp_path / "set"
    (folder / "data").mkdir(parents=True)
    made.to_parquet(str(folder / "data" / "part-0.parquet"))
    for name in ("x", "hf"):  # an empty folder there would be removed
        (tmp_path / name).mkdir()
    configs = {"config_name": "default", "data_files": "data/*.parquet", "version": "1.0.0"}
    configs |= {"version": {key: "../../../x"}, "config_name": {key: "../../x"}}.get(
        key, {key: [{"split": "../../x", "path": "data/*.parquet"}]}
    )
    (folder / "README.md").write_text(f"---\nconfigs:\n- {json.dumps(configs)}\n---\n")
    with refused(ValueError, "set"):
        HuggingFace(str(folder))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "set", "x"]
    assert not list((tmp_path / "x").iterdir())
