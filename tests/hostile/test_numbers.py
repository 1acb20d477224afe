"""Absurd numbers and names in a config: one message with the key, and no endless loop."""

from typing import Any

import pytest
from hypothesis import given, strategies as st

from hookdiff import UserError, load_config
from hookdiff.experiment.build import build_feed
from tests.conftest import check_facts, check_refused, mostly_wide, refused, write_small
from tests.hostile.mutations import HERE, in_time

MOST = 2**63 - 1


@pytest.mark.parametrize(
    ("use", "key"),
    [
        *mostly_wide(
            1, [("unet", key) for key in ("channels", "num_res_blocks", "head_dim", "num_classes", "in_channels")]
        ),
        *mostly_wide(1, [("dit", key) for key in ("hidden_size", "depth", "num_heads", "num_classes", "patch_size")]),
    ],
)
def test_a_network_of_an_absurd_size_is_refused(hookdiff: Any, write_config: Any, use: str, key: str) -> None:
    path = write_config(model={"use": use, key: MOST})
    with in_time():
        check_refused(hookdiff("check", path), "model", f"{key}={MOST}")


def test_more_threads_than_any_machine_has_are_refused(load_small: Any) -> None:
    with refused(UserError, "run.threads", "1024"):  # a library of C would end the process
        load_small("run.threads=1000000000")


@pytest.mark.parametrize("value", mostly_wide(1, ["a\0b", "x" * 5000, "\udcff", "~nobody-here/x", "\x1b[31m"]))
@pytest.mark.parametrize(
    ("table", "key"),
    [
        *(({"source": "folder"}, "path"), ({"source": "array"}, "path")),
        ({"source": "folder", "path": "set"}, "labels"),
        ({"source": "folder", "path": "set", "store": "disk"}, "cache_dir"),
        ({"source": "fashion-mnist"}, "root"),
    ],
)
def test_a_path_that_no_file_can_have_is_refused(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, pictures: Any, table: dict[str, Any], key: str, value: str
) -> None:
    (pictures / "pictures").rename(pictures / "set")
    path = write_small(tmp_path / "c.toml", data=table)
    try:
        with in_time():
            build_feed(load_config(path, settings=[f"data.{key}={value}"]))
    except UserError as error:
        check_facts(error, "data")
    else:
        assert key == "cache_dir"  # which is made


def test_a_long_name_of_a_file_with_weights_is_refused(hookdiff: Any, write_config: Any) -> None:
    check_refused(hookdiff("check", write_config(), "--set", f"model.start_from={'x' * 5000}"), "model.start_from")


KEYS = {
    "run": ["steps", "epochs", "seed", "batch_size", "log_every", "max_time", "micro_batch", "threads"],
    "data": ["image_size", "resize", "held_out", "workers", "prefetch", "flip", "memory_limit"],
    "sampling": ["steps", "batch_size"],
    "plugins.loss": ["window", "plateau", "bins", "patience", "every"],
    "plugins.samples": ["every", "num", "seed", "columns", "scale"],
}


@given(
    place=st.sampled_from([(table, key) for table, keys in KEYS.items() for key in keys]),
    number=st.integers() | st.sampled_from([MOST, 2**63, 2**64, -(2**63), 10**400, -1, 0]) | st.floats(),
)
@HERE
def test_any_number_is_taken_or_refused_with_its_key(load_small: Any, place: tuple[str, str], number: float) -> None:
    key = ".".join(place)
    settings = [f"{key}={number}", *(["run.steps=none"] if key == "run.epochs" else [])]
    try:
        with in_time():
            config = load_small(*settings, plugins=("loss", "samples"))
            config.resolved()
            for part in config.plugins.values():
                part.build()
            build_feed(config)
    except UserError as error:
        check_facts(error, place[1] if place[0] == "data" else key.rpartition(".")[0])
