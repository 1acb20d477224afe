"""Published weights in torch's cache, of which each machine of a run may have its own."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.conftest import two_ranks

CACHES = """
from pathlib import Path
from hookdiff_features.weights import Published, read_weights

folder = Path({folder!r})
torch.hub.set_dir(str(folder / f"cache {{rank}}"))
published = Published((folder / "there" / "w.safetensors").as_uri(), {sha256!r})
if {missing} is not None and rank != {missing}:
    published.path.parent.mkdir(parents=True)
    published.path.write_bytes((folder / "there" / "w.safetensors").read_bytes())
read = read_weights(published, None, None, "features")
result = read.is_published, read.state["x"].tolist(), published.path.is_file()
"""


@pytest.mark.parametrize("missing", [None, 0, 1])
def test_each_machine_fetches_what_its_own_cache_lacks(missing: int | None, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    save_file({"x": torch.arange(3.0)}, tmp_path / "there" / "w.safetensors")
    digest = hashlib.sha256((tmp_path / "there" / "w.safetensors").read_bytes()).hexdigest()
    code = CACHES.format(folder=str(tmp_path), sha256=digest, missing=missing)
    assert two_ranks(code, tmp_path) == [(True, [0.0, 1.0, 2.0], True)] * 2
