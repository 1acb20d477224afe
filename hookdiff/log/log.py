"""The log of a run: collects values without waiting for the device, and sends them to the sinks as numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookdiff.log.event import STEP, TIME, Event, Finding, as_json
from hookdiff.machine.ranks import rank

if TYPE_CHECKING:
    from hookdiff.log.distribution import Distribution
    from hookdiff.log.picture import Picture

logger = logging.getLogger("hookdiff")

Value = float | Tensor  # a tensor is a scalar on any device
Mean = tuple[Value, Value]  # a sum and a count

MACHINE = ("memory/", "time/")  # prefixes of values that depend on the machine, and differ from run to run


class Log:
    """Collects values: `loop.log({...})` logs values of this step, which the sinks get when the step is over.

    From `make_batch` to `optimizer_step`, this step is the update that the batch will make. Values logged there wait
    for the update, and are dropped if it is not made. Other values, and all events and findings, are sent at once.
    Before the first step everything waits until the run is ready.

    With several ranks, only the first rank logs, and only its plugins get the values. Use `loop.reduce`
    before, to combine the measurements of all ranks.

    step: returns the number of updates so far. every: steps between two logs. call: calls the hook "on_log",
    "on_event", "on_images", "on_texts" or "on_distributions" with `step` and the logged values.
    """

    def __init__(self, step: Callable[[], int], every: int, call: Callable[..., object]) -> None:
        self._updates = step
        self._every = every
        self._call = call
        self._is_main = rank() == 0
        self._records: dict[int, dict[str, Value | Mean]] = {}
        self._window: dict[str, list[Value]] = {}  # values of `average` that may still be on the device
        self._sums: dict[str, tuple[float, int]] = {}  # sum and count of the earlier values of `average`
        self._batch: list[Callable[[], object]] | None = None  # calls that wait for the update; None: no batch
        self._closed = 0  # the step of the last means, which a void step after it must not log again
        self._kinds: dict[str, str] = {}  # "number", "picture" ..., by name
        self._early: list[Callable[[], object]] | None = []  # calls that wait until the run is ready; then None
        self.details: set[str] = set()  # names of values that are not shown to people

    @property
    def _step(self) -> int:
        return self._updates() + (self._batch is not None)

    @property
    def due(self) -> bool:
        """Whether the current step is a multiple of `log_every`; costly values are logged only then."""
        return self._step % self._every == 0

    def begin_batch(self) -> None:
        """From now on, `due` and logged values belong to the update that a batch will make."""
        self._batch = []

    def end_batch(self, has_updated: bool) -> None:
        """Log the waiting values if the update was made and counted; else drop them."""
        waiting, self._batch = self._batch, None
        for call in waiting or () if has_updated else ():
            call()

    @contextmanager
    def ending(self, error: BaseException | None) -> Iterator[None]:
        """Drop the values of a failed batch, and send the last values after the `with`, even if a plugin fails.

        A run that was refused before it was ready sends none, because it must write nothing.
        """
        self._batch = None
        try:
            yield
        finally:
            if error is None or self._early is None:
                self.flush()

    @property
    def names(self) -> set[str]:
        """The names of the values that wait for the next flush."""
        return {*self._window, *(name for values in self._records.values() for name in values)}

    def __call__(self, values: Mapping[str, Value | Mean], *, detail: bool = False) -> None:
        """Log `values`, numbers or scalar tensors, of the current step.

        A pair (sum, count) is logged as their ratio, and left out if the count is 0. A `detail` goes to metrics.jsonl
        and the other sinks, but is not printed. Raises ValueError for the names "step" and "time", for
        the name of a picture, text or distribution, and for a value that is no number.
        """
        for name, value in values.items():
            for part in value if isinstance(value, tuple) and len(value) == 2 else (value,):
                _check_number(name, part, "a number, a scalar tensor or a pair (sum, count) of them")
        self._claim("number", values)
        if detail:
            self.details.update(values)
        self._once_updated(partial(self._add, dict(values)))

    def _add(self, values: Mapping[str, Value | Mean]) -> None:
        self._records.setdefault(self._updates(), {}).update(values)

    def average(self, values: Mapping[str, Value], *, detail: bool = False) -> None:
        """Log the mean of `values`, numbers or scalar tensors, over all steps since the last log, when the next is due.

        For `detail` see `__call__`. Raises ValueError as `__call__` does, and for a pair.
        """
        for name, value in values.items():
            _check_number(name, value, "a number or a scalar tensor")
        self._claim("number", [name for name in values if name not in self._window])
        if detail:
            self.details.update(values)
        self._once_updated(partial(self._collect, dict(values)))

    def _collect(self, values: Mapping[str, Value]) -> None:
        for name, value in values.items():
            self._window.setdefault(name, []).append(value)

    def _once_updated(self, call: Callable[[], object]) -> None:
        if self._batch is None:
            call()
        else:
            self._batch.append(call)

    def images(self, images: Mapping[str, Tensor | Picture]) -> None:
        """Log pictures by name, such as "samples": a `Picture`, or images (n c h w in [-1, 1]), which become a grid.

        A folder of this name in the run directory keeps the PNG file of each step. Raises ValueError for a name that is
        no relative path of plain names.
        """
        self._claim("picture", images)
        for name in images:
            _check_name(name)
        if not self._is_main:
            return
        from hookdiff.log.panel import grid
        from hookdiff.log.picture import Picture

        ready = {name: image if isinstance(image, Picture) else grid(image) for name, image in images.items()}
        self._send("on_images", self._step, images=ready)

    def texts(self, texts: Mapping[str, str]) -> None:
        """Log texts by name, such as the prompts of samples. Raises ValueError for a value that is no string."""
        for name, text in texts.items():
            if not isinstance(text, str):
                raise ValueError(f"{name!r} is logged as {shortened(text)}, expected a text")
        self._claim("text", texts)
        self._send("on_texts", self._step, texts=as_json(texts))

    def distributions(self, tensors: Mapping[str, Tensor | Distribution]) -> None:
        """Log the distribution of the values of each tensor, of any shape, by name; wait for the device."""
        self._claim("distribution", tensors)
        if not self._is_main:
            return
        from hookdiff.log.distribution import Distribution

        ready = {k: v if isinstance(v, Distribution) else Distribution.of(v) for k, v in tensors.items()}
        self._send("on_distributions", self._step, distributions=ready)

    def event(self, event: Event, step: int | None = None) -> None:
        """Log an event of the current step, or of `step`."""
        self._send("on_event", self._step if step is None else step, event=event)

    def report(self, finding: Finding | None, step: int | None = None) -> None:
        """Log `finding`, if any, as an event and a message; an error is a warning here, because the run goes on."""
        if finding is None or self._call is _drop:
            return
        step = self._step if step is None else step
        if self._is_main:
            level = logging.INFO if finding.severity == "info" else logging.WARNING
            logger.log(level, "step %s: %s", f"{step:,}", finding)
        self.event(Event.of(finding), step)

    def open(self) -> None:
        """Send the waiting values, and from now on send values at once."""
        waiting, self._early = self._early, None
        for call in waiting or ():
            call()

    def _claim(self, kind: str, names: Iterable[str]) -> None:
        for name in names:
            if not isinstance(name, str):
                raise ValueError(f"the name of a {kind} is {name!r}, expected a string")
            if kind == "number" and name in (STEP, TIME):
                raise ValueError(f"each line of metrics.jsonl has a {name!r} already; log the value by another name")
            known = self._kinds.setdefault(name, kind)
            if known != kind:  # trackers keep one kind under a name
                raise ValueError(f"{name!r} is the name of a {known} already; give the {kind} another name")

    def _send(self, hook: str, step: int, **what: object) -> None:
        if not self._is_main:
            return
        call = partial(self._call, hook, step=step, **what)
        if self._early is not None:
            self._early.append(call)
        elif hook == "on_event":
            call()
        else:
            self._once_updated(call)

    def flush(self) -> None:
        """Send the logged values to the sinks."""
        if not self._is_main:
            self._records, self._window = {}, {}
            return
        is_due = self._updates() % self._every == 0  # not `due`, which may be that of a new batch
        if is_due and self._closed != self._updates() and (self._window or self._sums):
            self(self.open_means())
            self._sums, self._closed = {}, self._updates()
        if not self._records:
            return
        records, self._records = self._records, {}
        numbers = iter(
            _to_host(part for values in records.values() for value in values.values() for part in _parts(value))
        )
        for step, values in records.items():
            if ready := dict(_ratios(values, numbers)):  # pairs with a count of 0 are left out
                self._call("on_log", step=step, values=ready)

    def open_means(self) -> dict[str, float]:
        """Return the means of `average` over the steps since the last log, before the next log is due."""
        self._sum_window()
        return {name: total / count for name, (total, count) in self._sums.items()}

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Drop all logged values during the `with`, for a trial step."""
        state = self._records, self._window, self._sums, self._batch, self._closed, self.details, self._call
        self._records, self._window, self._sums, self._batch, self.details, self._call = {}, {}, {}, [], set(), _drop
        try:
            yield
        finally:
            self._records, self._window, self._sums, self._batch, self._closed, self.details, self._call = state

    def state_dict(self) -> dict[str, Any]:
        """Flush, and return the sums since the last means, so that a resumed run logs the same means."""
        self.flush()
        self._sum_window()
        return {name: list(pair) for name, pair in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._records, self._window, self._closed = {}, {}, self._updates()  # values of undone steps
        self._sums = {name: (float(total), int(count)) for name, (total, count) in state.items()}

    def _sum_window(self) -> None:
        # Add the numbers in order, in float64, so that a checkpoint in between does not change the sum.
        numbers = iter(_to_host(value for values in self._window.values() for value in values))
        for name, values in self._window.items():
            total, count = self._sums.get(name, (0.0, 0))
            for _ in values:
                total += next(numbers)
            self._sums[name] = total, count + len(values)
        self._window = {}


def _drop(hook: str, **what: object) -> None:
    """Take the place of the hooks while the log is muted."""


def _check_number(name: str, value: Any, expected: str) -> None:
    """Raise ValueError unless `value` is a number, so early that the traceback shows the plugin."""
    if not _is_number(value):
        is_array = hasattr(value, "shape") and hasattr(value, "dtype")
        got = f"an array of shape {tuple(value.shape)}, {value.dtype}" if is_array else shortened(value)
        raise ValueError(f"{name!r} is logged as {got}, expected {expected}")


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not (value.dim() or value.is_complex())
    if isinstance(value, str | bytes) or len(getattr(value, "shape", ())):  # float may take an array of one
        return False
    try:
        float(value)
        return True
    except (TypeError, ValueError, OverflowError):
        return False


def _check_name(name: str) -> None:
    parts = name.split("/")
    if not all(part and part[0] != "." and part.isprintable() and not set(part) & set('\\:*?"<>|') for part in parts):
        raise ValueError(f"{name!r} is no name of a folder to keep pictures in; use letters, digits, -, _ and /")


def _parts(value: Value | Mean) -> Mean | tuple[Value]:
    return value if isinstance(value, tuple) else (value,)


def _ratios(values: Mapping[str, Value | Mean], numbers: Iterator[float]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        number, *count = [next(numbers) for _ in _parts(value)]
        if count != [0]:
            yield as_json(name), number / count[0] if count else number


def _to_host(values: Iterable[Value]) -> list[float]:
    """Return `values` as floats, all tensors of a device in one transfer."""
    listed = list(values)
    tensors: dict[torch.device, list[Tensor]] = {}
    for value in listed:
        if isinstance(value, Tensor):
            tensors.setdefault(value.device, []).append(value.detach().float())
    moved = {device: iter(torch.stack(group).tolist()) for device, group in tensors.items()}
    return [next(moved[value.device]) if isinstance(value, Tensor) else float(value) for value in listed]
