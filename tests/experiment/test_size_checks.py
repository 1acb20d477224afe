"""A network that refuses a size of the samples is refused before the run, with what fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image
from torch import Tensor, nn

from hookdiff import ConfigError, build_loop, load_config
from tests.conftest import write_small


class Picky(nn.Module):
    """Takes sides that are multiples of `multiple`."""

    def __init__(self, in_channels: int, multiple: int, takes_oblong: bool = True, most: int = 10**6) -> None:
        super().__init__()
        self.layer = nn.Conv2d(in_channels, in_channels, 1)
        self.multiple, self.takes_oblong, self.most = multiple, takes_oblong, most

    def forward(self, x: Tensor, timesteps: Tensor) -> Tensor:
        height, width = x.shape[2:]
        is_wrong = height % self.multiple or width % self.multiple or max(height, width) > self.most
        if is_wrong or (height != width and not self.takes_oblong):
            raise ValueError("does not fit")
        return self.layer(x)


STEP = "set data.bucket_step = {}, or a multiple of it; in a list of data.buckets, the nearest is {}"
LATENTS = {"image": {"use": "tests.encoding.test_latent_reader:Pooled"}}


@pytest.mark.parametrize(
    ("data", "network", "expected"),
    [
        ({"buckets": ["80x50"]}, {"multiple": 8}, STEP.format(8, "80x48")),  # 48 is a multiple of 16 by chance
        ({"buckets": ["50x80"]}, {"multiple": 2}, None),
        ({"buckets": ["80x50"]}, {"multiple": 4}, STEP.format(4, "80x48")),
        ({"bucket_step": 4}, {"multiple": 16}, STEP.format(16, "80x48")),
        ({"bucket_step": 8}, {"multiple": 8}, None),
        ({"bucket_step": 4, "encode": LATENTS}, {"multiple": 4}, STEP.format(8, "80x48")),  # 2 pixels a latent
        ({"bucket_step": 4}, {"multiple": 1, "takes_oblong": False}, "it takes squares alone: leave out data.buckets"),
        ({"bucket_step": 4}, {"multiple": 1, "most": 64}, "sides of 76 are too long for it: set a smaller"),
        ({"buckets": ["60x60"]}, {"multiple": 64}, STEP.format(64, "64x64")),
    ],
)
def test_a_refused_size_is_named_with_what_fits(
    tmp_path: Path, data: dict[str, Any], network: dict[str, Any], expected: str | None
) -> None:
    (tmp_path / "pictures").mkdir()
    for number in range(8):
        Image.fromarray(numpy.full((104, 152, 3), number, numpy.uint8)).save(tmp_path / "pictures" / f"{number}.png")
    data = {"source": "folder", "path": f"{tmp_path}/pictures", "image_size": 64, "buckets": True, **data}
    data["cache_dir"] = f"{tmp_path}/cache"
    model = {"use": "tests.experiment.test_size_checks:Picky", **network}
    path = write_small(tmp_path / "a.toml", data=data, model=model, run={"steps": 1, "batch_size": 4, "plugins": []})
    if expected is None:
        with build_loop(load_config(path), tmp_path / "run") as loop:
            assert [step.step for step in loop.steps()] == [1]
    else:
        with pytest.raises(ConfigError, match="(?s)does not fit.*" + expected):
            build_loop(load_config(path), tmp_path / "run")
