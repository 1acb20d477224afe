"""The plugins that keep logged numbers, texts and distributions in files of the run directory."""

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import define, field

from hookdiff.log.distribution import Distribution
from hookdiff.loop.hookspecs import hookimpl
from hookdiff.loop.loop import Loop
from hookdiff.loop.saved import saved
from hookdiff.options.structure import COUNT
from hookdiff.run_dir.distributions_jsonl import DISTRIBUTIONS, distributions_line
from hookdiff.run_dir.lines import Lines, earlier_file
from hookdiff.run_dir.metrics_jsonl import METRICS, metrics_line
from hookdiff.run_dir.texts_jsonl import TEXTS, texts_line


@define(eq=False)
class LinesOfLoop(Lines):
    """A file of JSON lines in the run directory of a Loop, which its main rank writes."""

    name: str = field(kw_only=True)

    def add(self, loop: Loop, line: Mapping[str, Any]) -> None:
        """Append a line; raises StorageError when the disk fails, but not when it is full."""
        if loop.run_dir and loop.is_main:
            if not self.is_open:
                self._begin(loop)
            self.append(line)

    def resume(self, loop: Loop) -> None:
        """Begin with the lines of the run that is continued."""
        path = loop.run_dir / self.name if loop.run_dir and loop.is_main else None
        if path and (self.length or path.exists() or earlier_file(loop.resume, self.name)):
            self._begin(loop)

    def _begin(self, loop: Loop) -> None:
        assert loop.run_dir
        loop.resources.callback(self.close)
        self.open(loop.run_dir / self.name, loop.progress.step, loop.first_step, loop.resume, loop.is_branch)


@define(eq=False)
class _KeepsLines:
    """The base of plugins that keep what is logged in a file.

    A checkpoint holds the length of the file. A resumed run cuts the file to this length, so that no step appears
    twice. A branch begins with the lines of the run that it continues.
    """

    file_name: ClassVar[str]
    _lines: LinesOfLoop = saved(key="bytes", validator=COUNT)

    def __attrs_post_init__(self) -> None:
        self._lines = LinesOfLoop(is_cut=True, name=self.file_name)

    @hookimpl(trylast=True)
    def on_ready(self, loop: Loop, resumed: bool) -> None:
        """Cut the lines that an earlier process wrote after the state that was loaded."""
        if resumed:
            self._lines.resume(loop)


@define(eq=False)
class Metrics(_KeepsLines):
    """Writes logged values to `metrics.jsonl`; NaN and infinities, which JSON lacks, become null."""

    file_name = METRICS

    @hookimpl
    def on_log(self, loop: Loop, step: int, values: Mapping[str, float]) -> None:
        """Append one line; raises StorageError when the disk fails, but not when it is full."""
        self._lines.add(loop, metrics_line(step, values))


@define(eq=False)
class Texts(_KeepsLines):
    """Writes logged texts to `texts.jsonl`, and the structure of the network as the first of them."""

    file_name = TEXTS

    @hookimpl(trylast=True)
    def on_ready(self, loop: Loop, resumed: bool) -> None:
        """Cut the file of a resumed run, or begin with the network."""
        if resumed:
            self._lines.resume(loop)
        else:
            loop.log.texts({"model": str(loop.model)})

    @hookimpl
    def on_texts(self, loop: Loop, step: int, texts: Mapping[str, str]) -> None:
        """Append one line."""
        self._lines.add(loop, texts_line(step, texts))


@define(eq=False)
class Distributions(_KeepsLines):
    """Writes logged distributions to `distributions.jsonl`."""

    file_name = DISTRIBUTIONS

    @hookimpl
    def on_distributions(self, loop: Loop, step: int, distributions: Mapping[str, Distribution]) -> None:
        """Append one line."""
        self._lines.add(loop, distributions_line(step, distributions))
