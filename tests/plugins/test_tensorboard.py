import io
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.hparams import metadata

from hookdiff import Loop, TrackedRun, builtin_plugins, hookimpl
from hookdiff.log import Distribution, Event
from hookdiff.testing import assert_tracks, toy_loop
from hookdiff_tensorboard import TensorBoard
from tests.conftest import Restores, RollsBack, StopAt, fill, free, warnings
from tests.forked import python

EVERYTHING = dict.fromkeys(("scalars", "images", "tensors", "histograms"), 0)  # 0: keep all of them


class Extras:
    """Logs something of each kind at even steps, in several calls."""

    @hookimpl
    def after_optimizer_step(self, loop: Loop) -> None:
        step = loop.progress.step
        if step % 2 == 0:
            loop.log({"fd/digits": math.nan if step == 2 else 1.0 / step})
            loop.log.images({"samples": torch.full((1, 1, 4, 6), step / 10), "colour": torch.ones(1, 3, 2, 2)})
            loop.log.texts({"prompt": f"# <b>cat</b> {step}\n* 100 % *furry*"})
            loop.log.distributions({"weights": torch.tensor([0.0, 0.0, 0.5, 1.0])})


def make_loop(plugins: Mapping[str, object], run_dir: Path, steps: int = 4, **options: Any) -> Loop:
    hparams = {"run": {"steps": steps, "plugins": ["tensorboard"]}, "optimizer": {"lr": 0.1, "fused": True}}
    everything = {**builtin_plugins(signals=False), **plugins, "extras": Extras()}
    return toy_loop(everything, run_dir=run_dir, steps=steps, log_every=1, hparams=hparams, **options)


def read(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), size_guidance=EVERYTHING)
    accumulator.Reload()
    return accumulator


def entries(folder: Path) -> list[tuple[str, int]]:
    """Return the name and the step of each value in the files, as a reader sees them that ignores session logs."""
    events = (event for path in sorted(folder.iterdir()) for event in EventFileLoader(str(path)).Load())
    return [(value.tag, event.step) for event in events for value in event.summary.value]


def values(read: EventAccumulator, name: str) -> dict[int, float]:
    events = read.Scalars(name)
    assert len({event.step for event in events}) == len(events)  # no step twice
    return {event.step: event.value for event in events}


def texts(read: EventAccumulator, name: str) -> dict[int, str]:
    return {event.step: event.tensor_proto.string_val[0].decode() for event in read.Tensors(name)}


def test_a_run_can_be_read_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_loop({"tensorboard": TensorBoard()}, tmp_path / "run").run()
    found = read(tmp_path / "run" / "tensorboard")
    assert not warnings(caplog)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines}
    assert values(found, "loss") == pytest.approx(losses)
    assert [event.wall_time for event in found.Scalars("loss")] == pytest.approx([line["time"] for line in lines])
    distances = values(found, "fd/digits")
    assert math.isnan(distances[2])
    assert distances[4] == 0.25
    grey, colour = found.Images("samples"), found.Images("colour")
    assert [event.step for event in grey] == [event.step for event in colour] == [2, 4]
    for event, mode in ((grey[0], "L"), (colour[0], "RGB")):
        with Image.open(io.BytesIO(event.encoded_image_string)) as image:
            assert (image.format, image.mode, image.size) == ("PNG", mode, (event.width, event.height))
            kept = tmp_path / "run" / ("samples" if mode == "L" else "colour") / "step-00000002.png"
            assert numpy.array_equal(numpy.asarray(image), numpy.asarray(Image.open(kept)))
    # Markdown shows indented lines as they are.
    assert texts(found, "prompt")[2] == "    # <b>cat</b> 2\n    * 100 % *furry*"
    assert "Linear" in texts(found, "model")[0]
    assert texts(found, "events/stop") == {4: "    done"}
    histogram = found.Histograms("weights")[0].histogram_value
    assert (histogram.min, histogram.max, histogram.num) == (0.0, 1.0, 4.0)
    distribution = Distribution.of(torch.tensor([0.0, 0.0, 0.5, 1.0]))
    assert histogram.bucket == list(distribution.counts)
    assert histogram.bucket_limit == pytest.approx(distribution.edges[1:])


def test_the_config_is_in_the_tab_of_hparams(tmp_path: Path) -> None:
    make_loop({"tensorboard": TensorBoard(dir=str(tmp_path / "elsewhere"))}, tmp_path / "run").run()
    assert not (tmp_path / "run" / "tensorboard").exists()
    found = read(tmp_path / "elsewhere" / "run").summary_metadata[metadata.SESSION_START_INFO_TAG]
    hparams = metadata.parse_session_start_info_plugin_data(found.plugin_data.content).hparams
    assert hparams["run.steps"].number_value == 4
    assert hparams["run.plugins"].string_value == "['tensorboard']"
    assert hparams["optimizer.lr"].number_value == 0.1
    assert hparams["optimizer.fused"].bool_value


def test_after_a_resume_no_step_stands_twice(tmp_path: Path) -> None:
    state = Restores(at=2)
    make_loop({"tensorboard": TensorBoard(), "state": state}, tmp_path / "run", steps=4).run()
    make_loop({"tensorboard": TensorBoard(), "state": Restores(state.state)}, tmp_path / "run", 5, resume=True).run()
    found = read(tmp_path / "run" / "tensorboard")
    assert list(values(found, "loss")) == [1, 2, 3, 4, 5]
    assert [event.step for event in found.Images("samples")] == [2, 4]
    assert [event.step for event in found.Histograms("weights")] == [2, 4]
    assert list(texts(found, "events/resume")) == [2]
    made = entries(tmp_path / "run" / "tensorboard")
    assert len(set(made)) == len(made)

    # A run that had no TensorBoard before, or a branch, begins with the earlier steps.
    shutil.rmtree(tmp_path / "run" / "tensorboard")
    plugins = {"tensorboard": TensorBoard(), "state": Restores(state.state)}
    make_loop(plugins, tmp_path / "branch", steps=3, resume=tmp_path / "run").run()
    found = read(tmp_path / "branch" / "tensorboard")
    assert list(values(found, "loss")) == [1, 2, 3]
    assert [event.step for event in found.Images("samples")] == [2]


def numbers(folder: Path) -> dict[tuple[int, str], float]:
    (run,) = folder.iterdir()
    found = read(run)
    return {(step, name): value for name in found.Tags()["scalars"] for step, value in values(found, name).items()}


def test_it_has_the_numbers_of_each_run_and_costs_none_when_it_fails() -> None:
    assert_tracks(lambda path: TensorBoard(dir=str(path)), numbers)


def test_runs_share_a_folder_with_others(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    (shared / "a").mkdir(parents=True)
    foreign = shared / "a" / "events.out.tfevents.1.of.another.program"
    foreign.write_bytes(b"precious")
    state = Restores(at=2)
    make_loop({"tensorboard": TensorBoard(dir=str(shared)), "state": state}, tmp_path / "a", steps=4).run()
    plugins = {"tensorboard": TensorBoard(dir=str(shared)), "state": Restores(state.state)}
    make_loop(plugins, tmp_path / "b", steps=3, resume=tmp_path / "a").run()
    assert foreign.read_bytes() == b"precious"
    foreign.unlink()
    assert [list(values(read(shared / name), "loss")) for name in "ab"] == [[1, 2, 3, 4], [1, 2, 3]]


def test_after_a_rollback_no_step_stands_twice(tmp_path: Path) -> None:
    loop = make_loop({"tensorboard": TensorBoard(), "back": RollsBack(at=1, position=3)}, tmp_path / "run", steps=4)
    assert loop.run() == "done"
    found = read(tmp_path / "run" / "tensorboard")
    assert list(values(found, "loss")) == [1, 2, 3, 4]
    assert list(texts(found, "events/rollback")) == [1]
    assert [event.step for event in found.Images("samples")] == [2, 4]
    made = entries(tmp_path / "run" / "tensorboard")
    assert len(set(made)) == len(made)


def test_a_write_that_failed_is_not_doubled(disk: Path) -> None:
    sink = TensorBoard(dir=str(disk / "tensorboard"))
    sink.open(TrackedRun(None, {}, is_branch=False, step=0))
    sink.scalars(1, 1.0, {"loss": 1.0})
    sink.event(1, 1.0, Event("note", "x" * 4000))
    fill(disk)
    with pytest.raises(OSError, match="No space left"):
        sink.event(2, 2.0, Event("note", "y" * 40_000))
    free(disk)
    sink.scalars(3, 3.0, {"loss": 3.0})
    sink.close()
    assert values(read(disk / "tensorboard"), "loss") == {1: 1.0, 3: 3.0}


def test_a_second_run_of_the_loop_goes_on(tmp_path: Path) -> None:
    loop = make_loop({"tensorboard": TensorBoard(), "stop": StopAt(2)}, tmp_path / "run", steps=4)
    loop.run()
    loop.run()
    assert list(values(read(tmp_path / "run" / "tensorboard"), "loss")) == [1, 2, 3, 4]


QUIET = """
import sys
from hookdiff.testing.toy import toy_loop
from hookdiff_tensorboard import TensorBoard
toy_loop({"tensorboard": TensorBoard(dir=sys.argv[1])}, steps=2).run()
print(*sorted({"tensorflow", "torch.utils.tensorboard"} & set(sys.modules)))
"""


def test_it_prints_nothing_and_needs_no_tensorflow(tmp_path: Path) -> None:
    assert python(QUIET, tmp_path) == (0, "\n", "")
