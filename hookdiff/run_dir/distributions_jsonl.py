"""distributions.jsonl: the logged histograms, by name, with the fields of a `Distribution`.

{"step": 50, "time": 1764236235.125, "distributions": {"w": {"low": 0.0, "high": 1.0, "counts": [3], "nonfinite": 0}}}
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import asdict

from hookdiff.log.distribution import Distribution
from hookdiff.run_dir.lines import Logged, at_step, number, read_lines, step_and_time

DISTRIBUTIONS = "distributions.jsonl"


def distributions_line(step: int, distributions: Mapping[str, Distribution]) -> dict[str, Any]:
    """Return the line with the `distributions` of `step`."""
    return {**at_step(step), "distributions": {name: asdict(one) for name, one in distributions.items()}}


def read_distributions(path: Path) -> list[Logged[Distribution]]:
    """Return the lines of the file at `path`, as `read_lines` does."""
    return read_lines(path, _parse)


def _parse(line: dict[str, Any]) -> Logged[Distribution]:
    found = {}
    for name, one in line["distributions"].items():
        counts = [int(number(count)) for count in one["counts"]]
        found[name] = Distribution(number(one["low"]), number(one["high"]), tuple(counts), int(one["nonfinite"]))
    return Logged(*step_and_time(line), found)
