"""The plugin `csv`: the logged numbers as a table."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from attrs import define, field

from hookdiff import Loop, Sink, TrackedRun, UserError
from hookdiff.authors import Call, earlier
from hookdiff.disk import new_file
from hookdiff.options import Writes, about


@define(eq=False)
class Csv(Sink):
    """Writes the logged numbers to a CSV file: a row for each logged step, a column for each name.

    A name that is logged later adds a column, empty in earlier rows. A resumed run keeps its earlier rows.
    """

    path: Annotated[str, Writes(in_run_dir=True)] = field(default="metrics.csv", metadata=about("file to write"))
    file: Path = field(init=False)
    columns: list[str] = field(factory=list, init=False)
    newest: int = field(default=0, init=False)  # the last step in the file

    def check(self, loop: Loop) -> None:
        if loop.run_dir is None and not Path(self.path).is_absolute():
            raise UserError(f"plugins.csv.path: {self.path!r} must be absolute, because the run has no directory")

    def open(self, run: TrackedRun) -> Sequence[Call]:
        self.file = (run.run_dir or Path()) / self.path
        self.write([])
        return earlier(run, self)  # in a resumed run, the rows of the steps before the resume

    def scalars(self, step: int, time: float, values: Mapping[str, float]) -> None:
        row: dict[str, str | float] = {"step": step, **values}
        if step > self.newest and row.keys() <= set(self.columns):
            self.newest = step  # set first: if this write fails, the next call writes the whole file
            with self.file.open("a", newline="") as file:
                csv.DictWriter(file, self.columns, lineterminator="\n").writerow(row)
        else:  # a new column, more values of the same step, or a step that is repeated after a rollback
            rows = self.rows(step)
            if rows and int(rows[-1]["step"]) == step:
                row = rows.pop() | row
            self.write([*rows, row])

    def rows(self, last: int) -> list[dict[str, str | float]]:
        """Return the complete rows of the file up to the step `last`."""
        lines = [line for line in self.file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [row for row in csv.DictReader(lines) if int(row["step"]) <= last]

    def write(self, rows: list[dict[str, str | float]]) -> None:
        self.columns = list(dict.fromkeys(["step", *(name for row in rows for name in row)]))
        with new_file(self.file) as path, path.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        self.newest = int(rows[-1]["step"]) if rows else 0
