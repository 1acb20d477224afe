"""The plugin `ddp` alone; tests/test_training_on_ranks.py has what it shares with `fsdp`."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import check_facts
from tests.on_ranks import apart, done, started, train

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch was built without gloo")


def test_it_follows_parameters_that_are_thawed_and_frozen(tmp_path: Path) -> None:
    spec: dict[str, Any] = {"plugins": {"thaws": {}, "ddp": {}, "ema": {"decay": 0.9}}}
    assert apart(train(spec), done(tmp_path, 2, train, spec)) < 1e-5


def test_it_names_a_parameter_without_a_part_in_the_loss(tmp_path: Path) -> None:
    with started(tmp_path, 2, train, {"plugins": {"ddp": {}}, "unused": True}) as processes:
        ends = [process.finish() for process in processes]
    assert [code for code, *_ in ends] == [1, 1]
    check_facts(ends[0][2], "UserError", "unused.weight", "unused.bias", "plugins.ddp.find_unused_parameters = true")
    spec = {"plugins": {"ddp": {"find_unused_parameters": True}}, "unused": True, "config": {"steps": 3}}
    assert apart(train(spec), done(tmp_path, 2, train, spec)) < 1e-5
