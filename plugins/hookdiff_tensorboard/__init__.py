"""Tracks runs in TensorBoard. Its folder is a copy of values in the run directory, and can be deleted."""

import importlib
import os
import socket
from collections.abc import Mapping
from io import BytesIO, FileIO
from pathlib import Path
from time import time as now, time_ns
from typing import Annotated, Any

from attrs import define, field

from hookdiff import Sink, TrackedRun, plugin
from hookdiff.authors import Call, earlier
from hookdiff.disk import folder_in
from hookdiff.log import Distribution, Event, Picture
from hookdiff.options import Writes, about
from hookdiff.run_dir import flat

_PREFIX = "events.out.tfevents."  # TensorBoard finds its files by this prefix
_SUFFIX = ".hookdiff"  # we find our own files by this suffix


@plugin(needs={"tensorboard": "hookdiff[tensorboard]"})
@define(eq=False)
class TensorBoard(Sink):
    """Tracks metrics, pictures, texts, histograms and the config for TensorBoard: `tensorboard --logdir runs`.

    A resumed or rolled-back run replaces its file by a new file, which begins with the values of the run directory.
    """

    dir: Annotated[str | None, Writes()] = field(
        default=None,
        metadata=about(
            "folder, with a sub-folder for each run by its name; default: `tensorboard` in the run directory"
        ),
    )
    _file: FileIO | None = field(init=False, default=None)
    _end: int = field(init=False, default=0)  # end of the last complete record, in bytes
    _folder: Path = field(init=False, default=Path("tensorboard"))

    @property
    def where(self) -> str:
        return f"{self._folder} (tensorboard --logdir {self._folder})"

    def place(self, run: TrackedRun) -> Path:
        if self.dir is None:
            return folder_in(run.run_dir or Path(), "tensorboard").resolve()
        return Path(self.dir, run.run_dir.resolve().name if run.run_dir else "").resolve()

    def clear(self, run: TrackedRun) -> None:
        for path in self.place(run).glob(f"{_PREFIX}*{_SUFFIX}"):
            path.unlink()

    def open(self, run: TrackedRun) -> list[Call]:
        self._folder = self.place(run)
        self._folder.mkdir(parents=True, exist_ok=True)
        if run.has_earlier_steps:
            self.clear(run)
        # TensorBoard reads files in the order of their names, so two files of the same second need an order too.
        seconds, rest = divmod(time_ns(), 10**9)
        name = f"{_PREFIX}{seconds}.{rest:09}.{socket.gethostname()}.{os.getpid()}{_SUFFIX}"
        self._file, self._end = (self._folder / name).open("xb", buffering=0), 0
        self._write(0, now(), file_version="brain.Event:2")
        # This makes a running TensorBoard forget the values of earlier files, which this file repeats.
        session = _events().SessionLog
        first = 0 if run.has_earlier_steps else run.step + 1
        self._write(first, now(), session_log=session(status=session.START))
        if run.hparams:
            # HParams holds only these types.
            pairs = flat(run.hparams)
            values = {key: each if isinstance(each, bool | int | float) else str(each) for key, each in pairs}
            summary = _module("tensorboard.plugins.hparams.summary_v2").hparams_pb(values)
            self._write(run.step, now(), summary=summary)
        return earlier(run, self)

    def scalars(self, step: int, time: float, values: Mapping[str, float]) -> None:
        self._write_all(step, time, {name: {"simple_value": value} for name, value in values.items()})

    def images(self, step: int, time: float, images: Mapping[str, Picture]) -> None:
        self._write_all(step, time, {name: {"image": _image(picture)} for name, picture in images.items()})

    def texts(self, step: int, time: float, texts: Mapping[str, str]) -> None:
        self._write_all(step, time, {name: _text(text) for name, text in texts.items()})

    def distributions(self, step: int, time: float, distributions: Mapping[str, Distribution]) -> None:
        self._write_all(step, time, {name: {"histo": _histogram(each)} for name, each in distributions.items()})

    def event(self, step: int, time: float, event: Event) -> None:
        self._write_all(step, time, {f"events/{event.kind}": _text(event.text)})

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _write_all(self, step: int, time: float, values: Mapping[str, Mapping[str, Any]]) -> None:
        summaries = _module("tensorboard.compat.proto.summary_pb2")
        parts = [summaries.Summary.Value(tag=name, **value) for name, value in values.items()]
        self._write(step, time, summary=summaries.Summary(value=parts))

    def _write(self, step: int, time: float, **content: Any) -> None:
        """Append a record. A repeated call replaces the broken record of a call that failed, as on a full disk."""
        assert self._file is not None
        record = BytesIO()
        event = _events().Event(step=step, wall_time=time, **content)
        _module("tensorboard.summary.writer.record_writer").RecordWriter(record).write(event.SerializeToString())
        data = record.getvalue()
        self._file.seek(self._end)
        self._file.truncate()
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._end += len(data)


def _module(name: str) -> Any:
    # These modules of TensorBoard need no TensorFlow. They have no type hints.
    return importlib.import_module(name)


def _events() -> Any:
    return _module("tensorboard.compat.proto.event_pb2")


def _image(picture: Picture) -> Any:
    height, width, *channels = picture.pixels.shape
    png = BytesIO()
    picture.as_pillow().save(png, "PNG")
    kind = _module("tensorboard.compat.proto.summary_pb2").Summary.Image
    return kind(height=height, width=width, colorspace=3 if channels else 1, encoded_image_string=png.getvalue())


def _text(text: str) -> dict[str, Any]:
    # TensorBoard reads Markdown, which shows indented lines unchanged.
    shown = "\n".join(f"    {line}" for line in text.splitlines())
    tensor = _module("tensorboard.compat.proto.tensor_pb2").TensorProto
    shape = _module("tensorboard.compat.proto.tensor_shape_pb2").TensorShapeProto
    text_type = _module("tensorboard.compat.proto.types_pb2").DT_STRING
    metadata = _module("tensorboard.plugins.text.metadata").create_summary_metadata(display_name="", description="")
    held = tensor(dtype=text_type, string_val=[shown.encode()], tensor_shape=shape(dim=[shape.Dim(size=1)]))
    return {"tensor": held, "metadata": metadata}


def _histogram(distribution: Distribution) -> Any:
    # TensorBoard does not show the sums, so they are computed from the middles of the bins.
    middles = [(low + high) / 2 for low, high in zip(distribution.edges, distribution.edges[1:], strict=False)]
    weighted = list(zip(middles, distribution.counts, strict=True))
    return _module("tensorboard.compat.proto.summary_pb2").HistogramProto(
        min=distribution.low,
        max=distribution.high,
        num=sum(distribution.counts),
        sum=sum(middle * count for middle, count in weighted),
        sum_squares=sum(middle * middle * count for middle, count in weighted),
        bucket_limit=distribution.edges[1:],
        bucket=distribution.counts,
    )
