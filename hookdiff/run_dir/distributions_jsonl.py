"""distributions.jsonl: the logged histograms, by name, with the fields of a `Distribution`.

{"step": 50, "time": 1764236235.125, "distributions": {"w": {"low": 0.0, "high": 1.0, "counts": [3], "nonfinite": 0}}}
"""

from collections.abc import Mapping
from typing import Any

from attrs import asdict

from hookdiff.log.distribution import Distribution
from hookdiff.run_dir.lines import Logged, at_step, number, step_and_time

DISTRIBUTIONS = "distributions.jsonl"


def distributions_line(step: int, distributions: Mapping[str, Distribution]) -> dict[str, Any]:
    """Return the line with the `distributions` of `step`."""
    return {**at_step(step), "distributions": {name: asdict(values) for name, values in distributions.items()}}


def parse_distributions(line: dict[str, Any]) -> Logged[Distribution]:
    """Return the distributions in a line."""
    distributions = {}
    for name, values in line["distributions"].items():
        low, high, counts = number(values["low"]), number(values["high"]), map(number, values["counts"])
        distributions[name] = Distribution(low, high, tuple(map(int, counts)), int(values["nonfinite"]))
    return Logged(*step_and_time(line), distributions)
