"""Records the values of runs, to compare them, and trains toy loops that are recorded."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import pickle
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import attrs
import numpy as np
import safetensors.torch
import torch
from attrs import define, field
from torch import Tensor, nn

from hookdiff.authors.seeding import seeded
from hookdiff.disk.tensors import write_tensors
from hookdiff.disk.tree import State, flatten, unflatten
from hookdiff.log.log import MACHINE
from hookdiff.log.picture import Picture
from hookdiff.loop.dispatch import PASS
from hookdiff.loop.hookspecs import hookimpl
from hookdiff.loop.loop import Loop
from hookdiff.loop.saved import keeps_state, saved_fields, state_of
from hookdiff.testing.calls import Calls
from hookdiff.testing.compare import ValueKey, digest, escaped, of_state, weights
from hookdiff.testing.toy import toy_loop

_MOST = 10_000  # larger mappings and lists, and longer strings, are not recorded
_DEPTH = 4  # of mappings and lists in a field
PLUGIN = "plugin"  # the name of the tested plugin in its runs

# How to copy the arguments that a loop changes. It changes attributes of a Feed, but no samples.
_COPIES: Mapping[str, Callable[[Any], Any]] = {"model": copy.deepcopy, "objective": copy.deepcopy, "data": copy.copy}


@define(eq=False)
class Record:
    """Records a run, even one of several processes: it saves and stops the run after an update, and restores it.

    This plugin is the last of the list, so that all other plugins have run before it.
    """

    name: str  # in messages
    until: int | None = None  # the update after which the run is saved and stopped
    saved: State | None = field(default=None, init=False)
    values: dict[ValueKey, Any] = field(factory=dict, init=False)  # of each step, and the state at the end
    fields: dict[str, Any] = field(factory=dict, init=False)  # of the tested plugin at the end, if not saved

    @hookimpl
    def restore(self) -> State:
        return PASS if self.saved is None else self.saved

    @hookimpl
    def on_log(self, step: int, values: Mapping[str, float]) -> None:
        numbers = {name: value for name, value in values.items() if not name.startswith(MACHINE)}
        self.values |= {ValueKey("logged number", name, step): value for name, value in numbers.items()}

    @hookimpl
    def on_images(self, step: int, images: Mapping[str, Picture]) -> None:
        pixels = {name: torch.from_numpy(picture.pixels) for name, picture in images.items()}
        self.values |= {ValueKey("logged picture", name, step): value for name, value in pixels.items()}

    @hookimpl(trylast=True)
    def between_steps(self, loop: Loop) -> None:
        self.values |= {ValueKey("weight", name, loop.progress.step): value for name, value in weights(loop).items()}
        progress = loop.progress
        # After the last batch of an epoch this hook fires once more, when the epoch is counted.
        is_over = loop.feed.exhausted(progress.epoch, progress.samples)
        if self.until and progress.step >= self.until and not is_over:
            self.saved = round_trip(loop.state_dict())
            self.until = None
            loop.stop()

    @property
    def steps(self) -> dict[ValueKey, Any]:
        """The values of steps, without the state at the end."""
        return {key: value for key, value in self.values.items() if key.step < inf}


def snapshot(loop: Loop) -> dict[ValueKey, Any]:
    """Return the state of a run and all plain fields of its plugins, with a digest in place of each tensor."""
    values = of_state(loop.state_dict())
    for name, plugin in loop.plugins.items():
        values |= {ValueKey("field", path): value for path, value in _plain(_fields(plugin), escaped(name))}
    return {key: digest(value) if isinstance(value, Tensor) else value for key, value in values.items()}


def _fields(plugin: object) -> dict[str, Any]:
    kind = type(plugin)
    names = [each.name for each in attrs.fields(kind)] if attrs.has(kind) else []
    return {name: getattr(plugin, name) for name in names if hasattr(plugin, name)} | getattr(plugin, "__dict__", {})


def _plain(value: Any, path: str, depth: int = -1) -> Iterator[tuple[str, Any]]:
    """Yield the tensors, generators, numbers and texts in `value`, each with its path."""
    if isinstance(value, torch.Generator):
        value = value.get_state()
    elif isinstance(value, np.ndarray | np.generic | random.Random | np.random.Generator):
        has_objects = isinstance(value, np.ndarray) and value.dtype.hasobject
        value = object() if has_objects else hashlib.sha256(pickle.dumps(value)).hexdigest()
    elif isinstance(value, list | tuple | deque):
        value = dict(enumerate(value))
    elif keeps_state(value) and not isinstance(value, nn.Module):  # a module is most likely the loop's own model
        value = state_of(value)
    if isinstance(value, Mapping) and len(value) <= _MOST and depth < _DEPTH:
        for key, inner in value.items():
            if isinstance(key, str | int):
                yield from _plain(inner, f"{path}/{escaped(str(key))}", depth + 1)
    elif isinstance(value, Tensor):
        yield from [(path, value)] if value.layout == torch.strided else []
    elif value is None or isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) < _MOST):
        yield path, value


def round_trip(state: State) -> dict[str, Any]:
    """Return a copy of `state` that was written to files and read, so that it shares no memory with the run.

    Raises TypeError, with the place, for a value that a checkpoint cannot hold.
    """
    tensors, tree = flatten(state)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        write_tensors(path, tensors)
        return unflatten(safetensors.torch.load(path.read_bytes()), json.loads(json.dumps(tree)))


@contextmanager
def quiet() -> Iterator[list[str]]:
    """Hide the log messages of hookdiff during the `with`; yield a list that gets the warnings."""
    messages: list[str] = []
    handler, logger = logging.Handler(logging.WARNING), logging.getLogger("hookdiff")
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    before, others, logger.propagate, logger.handlers = logger.propagate, logger.handlers, False, [handler]
    try:
        yield messages
    finally:
        logger.propagate, logger.handlers = before, others


@define
class Runs:
    """Trains toy loops with a tested plugin and the `others` in new folders. An error names the plugin's class."""

    make_plugin: Callable[[], object]
    others: Mapping[str, Callable[[], object]]
    options: Mapping[str, Any]  # of toy_loop
    _resources: ExitStack = field(init=False, factory=ExitStack)
    _folder: str = field(init=False)

    def __attrs_post_init__(self) -> None:
        if self.make_plugin() is self.make_plugin():
            raise ValueError("make_plugin has to make a new plugin in each call, as `lambda: MyPlugin()` does")

    def __enter__(self) -> Runs:
        self._folder = self._resources.enter_context(TemporaryDirectory())
        self._resources.enter_context(quiet())
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._resources.close()
        if isinstance(error, AssertionError):
            error.args = (f"{type(self.make_plugin()).__name__}: {error}",)

    def new_folder(self) -> Path:
        return Path(mkdtemp(dir=self._folder))

    def train(
        self,
        record: Record,
        *,
        place: int | None = 0,
        process: int = 0,
        run_dir: Path | None = None,
        fresh: bool = False,
        is_watched: bool = False,
    ) -> Calls:
        """Train a loop from the start, or from the state in `record`; return its calls, if it `is_watched`.

        place: position of the plugin among the others; None: no plugin. process: seed of the global generators. fresh:
        the plugin ignores its saved state.
        """
        copies = {key: copying(self.options[key]) for key, copying in _COPIES.items() if key in self.options}
        plugins = [(name, make()) for name, make in self.others.items()]
        if place is not None:
            plugins.insert(place, (PLUGIN, self.make_plugin()))
        with seeded(process, torch.device("cpu")):
            loop = toy_loop(
                dict([*plugins, ("record", record)]),
                run_dir=run_dir or self.new_folder(),
                resume=record.saved is not None,
                fresh=[PLUGIN] if fresh else (),
                **{**self.options, **copies},
            )
            calls = Calls(loop)
            loop.plugins.instrument(calls if is_watched else None)
            loop.run()
        state = of_state(loop.state_dict()).items()
        # Copies, because a plugin may share a tensor with the next run.
        end = {key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in state}
        record.values = record.steps | end
        record.fields = _unsaved(loop.plugins[PLUGIN]) if PLUGIN in loop.plugins else {}
        return calls


def _unsaved(plugin: object) -> dict[str, Any]:
    """Return digests of the plain fields of a plugin, by name, except for fields made by `saved`."""
    saved = {each.name for each in saved_fields(plugin).values()}
    fields = {name: value for name, value in _fields(plugin).items() if name not in saved}
    digests: dict[str, Any] = {}
    for name, value in fields.items():
        parts = {path: digest(part) if isinstance(part, Tensor) else part for path, part in _plain(value, name)}
        if parts:
            digests[name] = parts
    return digests
