"""The plugin `tensorboard`. It copies what stands in the run directory, so its files can be deleted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from attrs import define, field

from hookdiff import Loop, Sink, TrackedRun, UserError
from hookdiff.distribution import Distribution
from hookdiff.events import Event
from hookdiff.options import about
from hookdiff.pictures import Picture

_FLUSH = 10  # seconds between two writes to the disk


@define(eq=False)
class TensorBoard(Sink):
    """Writes metrics, pictures, histograms, texts, events and the config for TensorBoard: `tensorboard --logdir runs`.

    A resumed run goes on in the same folder; TensorBoard drops the values of the steps that are repeated.
    """

    needs: ClassVar[Mapping[str, str]] = {"tensorboard": "hookdiff[tensorboard]"}

    dir: str | None = field(
        default=None, metadata=about("folder of the event files; without it tensorboard/ in the run directory")
    )
    _writer: Any = field(init=False, default=None)

    def check(self, loop: Loop) -> None:
        if self.dir is None and loop.run_dir is None:
            raise UserError("plugins.tensorboard.dir: a Loop without a run directory has no folder for the event files")

    def open(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        purge = run.step + 1 if run.step and not run.is_branch else None
        self._writer = SummaryWriter(str(self._folder(run)), purge_step=purge, flush_secs=_FLUSH)
        if run.hparams:
            # Not add_hparams, which writes them as a second run.
            for summary in hparams(dict(_flat(run.hparams)), {}):
                self._writer.file_writer.add_summary(summary)

    def clear(self, run: TrackedRun) -> None:
        for path in self._folder(run).glob("events.out.tfevents.*"):
            path.unlink()

    def scalars(self, step: int, time: float, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=time)

    def images(self, step: int, time: float, images: Mapping[str, Picture]) -> None:
        for name, picture in images.items():
            form = "HW" if picture.pixels.ndim == 2 else "HWC"
            self._writer.add_image(name, picture.pixels, step, walltime=time, dataformats=form)

    def texts(self, step: int, time: float, texts: Mapping[str, str]) -> None:
        for name, text in texts.items():
            self._writer.add_text(name, _as_code(text), step, walltime=time)

    def distributions(self, step: int, time: float, distributions: Mapping[str, Distribution]) -> None:
        for name, found in distributions.items():
            edges, counts, num = found.edges, found.counts, sum(found.counts)
            middles = [(low + high) / 2 for low, high in zip(edges, edges[1:], strict=False)]
            total = sum(middle * count for middle, count in zip(middles, counts, strict=True))
            squares = sum(middle**2 * count for middle, count in zip(middles, counts, strict=True))
            self._writer.add_histogram_raw(
                name, found.low, found.high, num, total, squares, edges[1:], list(counts), step, walltime=time
            )

    def event(self, step: int, time: float, event: Event) -> None:
        self._writer.add_text(f"events/{event.kind}", _as_code(event.text), step, walltime=time)

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _folder(self, run: TrackedRun) -> Path:
        if self.dir is not None:
            return Path(self.dir)
        assert run.run_dir
        return run.run_dir / "tensorboard"


def _as_code(text: str) -> str:
    """Return text for TensorBoard, which reads it as Markdown: four spaces before a line keep it as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | float | str]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, bool | int | float | str) else str(value)
