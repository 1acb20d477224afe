"""Trains a toy loop, and records all that two runs are compared by."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import numpy as np
import safetensors.torch
import torch
from attrs import define, field

from hookdiff.disk.files import write_tensors
from hookdiff.disk.tree import State, flatten, unflatten
from hookdiff.dispatch import PASS, Watch
from hookdiff.hookspecs import hookimpl
from hookdiff.log import MACHINE
from hookdiff.loop import Loop
from hookdiff.pictures import Picture
from hookdiff.testing.compare import differences, leaves, weights
from hookdiff.testing.toy import toy_loop

PLUGIN = "plugin"  # the name of the tested plugin in its runs

# A loop changes these; of a Feed it changes the attributes, and not the samples.
_COPIES: Mapping[str, Callable[[Any], Any]] = {"model": copy.deepcopy, "objective": copy.deepcopy, "data": copy.copy}


@define(eq=False)
class Record:
    """Records a run, also over several processes: it saves and stops the run after an update, and restores it.

    It is the last plugin of the list, so that all others have had their turn.
    """

    name: str  # in messages
    until: int | None = None  # the update after which the run is saved and stopped
    saved: State | None = field(default=None, init=False)
    steps: dict[int, dict[str, Any]] = field(factory=dict, init=False)  # by step: weights and logged values by name
    end: dict[str, Any] = field(factory=dict, init=False)  # values of the state at the end, by path
    texts: set[str] = field(factory=set, init=False)  # paths in `end` that are not compared, as they are names or times

    @hookimpl
    def restore(self) -> State:
        return PASS if self.saved is None else self.saved

    @hookimpl
    def on_log(self, step: int, values: Mapping[str, float]) -> None:
        self._note(step, {f"the logged {k}": v for k, v in values.items() if not k.startswith(MACHINE)})

    @hookimpl
    def on_images(self, step: int, images: Mapping[str, Picture]) -> None:
        self._note(step, {f"the logged picture {k}": torch.from_numpy(v.pixels) for k, v in images.items()})

    @hookimpl(trylast=True)
    def between_steps(self, loop: Loop) -> None:
        self._note(loop.progress.step, {f"the weight {k}": v for k, v in weights(loop).items()})
        # After the last batch of an epoch this hook fires once more, when the epoch is counted.
        if self.until and loop.progress.step >= self.until and not loop.feed.exhausted(loop.progress.samples):
            self.saved = _round_trip(loop.state_dict())
            self.until = None
            loop.stop()

    def _note(self, step: int, values: Mapping[str, Any]) -> None:
        self.steps.setdefault(step, {}).update(values)

    def shared(self, other: Record) -> Record:
        """Return the steps, and in them the values, that `other` has too; without the state at the end."""
        record = Record(self.name)
        for step in self.steps.keys() & other.steps.keys():
            record.steps[step] = {name: v for name, v in self.steps[step].items() if name in other.steps[step]}
        return record

    def differences(self, other: Record) -> Iterator[str]:
        """Yield a sentence about each value that is not the same in `other`, the earliest step first."""
        names = self.name, other.name
        for step in sorted({*self.steps, *other.steps}):
            for difference in differences(self.steps.get(step, {}), other.steps.get(step, {}), names):
                yield f"after step {step}, {difference}"
        one, two = ({path: v for path, v in record.end.items() if path not in self.texts} for record in (self, other))
        for difference in differences(one, two, names):
            yield f"in the state at the end, {difference}"


def _round_trip(state: State) -> dict[str, Any]:
    """Return `state` as it comes back from files, which share nothing with the run.

    Raises TypeError, with its place, for a value that a checkpoint cannot hold.
    """
    tensors, tree = flatten(state)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        write_tensors(path, tensors)
        return unflatten(safetensors.torch.load(path.read_bytes()), json.loads(json.dumps(tree)))


@contextmanager
def _generators(seed: int) -> Iterator[None]:
    """Give the global generators of python, numpy and torch the state of another process during the `with`."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


@define
class Runs:
    """Trains toy loops with a tested plugin among the `others`, each in a new folder."""

    make_plugin: Callable[[], object]
    others: Mapping[str, Callable[[], object]]
    options: Mapping[str, Any]  # of toy_loop
    _folder: TemporaryDirectory[str] = field(init=False)

    def __attrs_post_init__(self) -> None:
        if self.make_plugin() is self.make_plugin():
            raise ValueError("make_plugin has to make a new plugin in each call, as `lambda: MyPlugin()` does")

    def __enter__(self) -> Runs:
        self._folder = TemporaryDirectory()
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def new_folder(self) -> Path:
        return Path(mkdtemp(dir=self._folder.name))

    def train(
        self,
        record: Record,
        *,
        place: int | None = 0,
        process: int = 0,
        run_dir: Path | None = None,
        fresh: bool = False,
        watch: Watch | None = None,
    ) -> None:
        """Train a loop from the start, or from what `record` has saved.

        place: of the plugin among the others; None leaves it out. process: each number has other states of the global
        generators. fresh: the plugin ignores its saved state.
        """
        copies = {key: copying(self.options[key]) for key, copying in _COPIES.items() if key in self.options}
        plugins = [(name, make()) for name, make in self.others.items()]
        if place is not None:
            plugins.insert(place, (PLUGIN, self.make_plugin()))
        with _generators(process):
            loop = toy_loop(
                dict([*plugins, ("record", record)]),
                run_dir=run_dir or self.new_folder(),
                resume=record.saved is not None,
                fresh=[PLUGIN] if fresh else (),
                **{**self.options, **copies},
            )
            loop.plugins.instrument(watch)
            loop.run()
            tensors, tree = flatten(loop.state_dict())
        record.end = dict(leaves(tree)) | {name: tensor.detach().clone() for name, tensor in tensors.items()}
