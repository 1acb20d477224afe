"""The tracker `example_sink`: the logged numbers in a text file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, TextIO

from attrs import define, field

from hookdiff import Loop, Sink, TrackedRun, UserError, plugin
from hookdiff.authors import Call, earlier
from hookdiff.disk import check_place
from hookdiff.options import Writes, about


@plugin(hooks_version=1)
@define(eq=False)  # a plugin equals only itself
class ExampleSink(Sink):
    """Writes the logged numbers to a text file: a line has a step, a name and a number."""

    path: Annotated[str, Writes(in_run_dir=True)] = field(default="numbers.txt", metadata=about("file to write"))
    _file: TextIO | None = field(default=None, init=False)

    def check(self, loop: Loop) -> None:
        if loop.run_dir is None and not Path(self.path).is_absolute():
            raise UserError(f"plugins.example_sink.path: {self.path!r} must be absolute: the run has no directory")

    @property
    def where(self) -> str:
        return f"the file {self.path}"

    def place(self, run: TrackedRun) -> Path:
        return (run.run_dir or Path()) / self.path

    def clear(self, run: TrackedRun) -> None:
        self.place(run).unlink(missing_ok=True)

    def open(self, run: TrackedRun) -> Sequence[Call]:
        path = self.place(run)
        check_place(path)  # a link must not lead out of the run directory
        self._file = path.open("w", encoding="utf-8")
        return earlier(run, self)  # the numbers of earlier steps are written again, from the run directory

    def scalars(self, step: int, time: float, values: Mapping[str, float]) -> None:
        if self._file:
            check_place(Path(self._file.name))
            self._file.write("".join(f"{step} {name} {value!r}\n" for name, value in values.items()))
            self._file.flush()

    def close(self) -> None:
        if self._file:
            self._file.close()
