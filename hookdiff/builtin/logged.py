"""The plugins that keep logged numbers, texts and distributions in files of the run directory."""

from collections.abc import Generator, Mapping
from typing import Any, ClassVar

from attrs import define

from hookdiff.log.distribution import Distribution
from hookdiff.loop.hookspecs import hookimpl
from hookdiff.loop.loop import Loop
from hookdiff.loop.saved import saved
from hookdiff.options.structure import COUNT
from hookdiff.run_dir.distributions_jsonl import DISTRIBUTIONS, distributions_line
from hookdiff.run_dir.lines import Lines
from hookdiff.run_dir.metrics_jsonl import METRICS, metrics_line
from hookdiff.run_dir.texts_jsonl import TEXTS, texts_line


@define(eq=False)
class _KeepsLines:
    """The base of plugins that keep logged values in a file.

    A checkpoint holds the length of the file. A resumed run truncates the file to this length, so that no step appears
    twice. A run that continues another in a new directory (a branch) begins with the lines of that run.
    """

    file_name: ClassVar[str]
    _lines: Lines = saved(key="bytes", validator=COUNT)

    def __attrs_post_init__(self) -> None:
        self._lines = Lines(self.file_name, is_cut=True)

    @hookimpl(trylast=True)
    def on_ready(self, loop: Loop, resumed: bool) -> None:
        """Remove the lines that an earlier process wrote after the checkpoint."""
        if resumed:
            self._lines.resume(loop)


@define(eq=False)
class Metrics(_KeepsLines):
    """Writes logged values to `metrics.jsonl`; NaN and infinities, which JSON lacks, become null.

    A run that is done between two logs gets a last line, with the means of the steps since the last log. The line is
    written after the last checkpoint. So a resume that makes the run longer removes the line, and the file is the same
    as after one long run.
    """

    file_name = METRICS

    @hookimpl
    def on_log(self, loop: Loop, step: int, values: Mapping[str, float]) -> None:
        self._lines.add(loop, metrics_line(step, values))

    @hookimpl(wrapper=True, tryfirst=True)  # after the plugins that write checkpoints
    def on_stop(self, loop: Loop) -> Generator[None, Any, Any]:
        """Write the last line of a run that this process has completed."""
        result = yield
        is_last = loop.end.reason == "done" and loop.progress.step > loop.first_step and not loop.log.due
        if is_last and (means := loop.log.open_means()):
            length = self._lines.length
            self._lines.add(loop, metrics_line(loop.progress.step, means))
            self._lines.length = length  # a checkpoint that is saved now does not include the line
        return result


@define(eq=False)
class Texts(_KeepsLines):
    """Writes logged texts to `texts.jsonl`; the first text is the structure of the network."""

    file_name = TEXTS

    @hookimpl(trylast=True)
    def on_ready(self, loop: Loop, resumed: bool) -> None:
        """Truncate the file of a resumed run, or begin a new file with the structure of the network."""
        if resumed:
            self._lines.resume(loop)
        else:
            loop.log.texts({"model": str(loop.model)})

    @hookimpl
    def on_texts(self, loop: Loop, step: int, texts: Mapping[str, str]) -> None:
        self._lines.add(loop, texts_line(step, texts))


@define(eq=False)
class Distributions(_KeepsLines):
    """Writes logged distributions to `distributions.jsonl`."""

    file_name = DISTRIBUTIONS

    @hookimpl
    def on_distributions(self, loop: Loop, step: int, distributions: Mapping[str, Distribution]) -> None:
        self._lines.add(loop, distributions_line(step, distributions))
