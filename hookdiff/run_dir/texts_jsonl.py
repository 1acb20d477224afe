"""texts.jsonl: the logged texts, by name.

{"step": 0, "time": 1764236235.125, "texts": {"model": "UNet(...)"}}
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hookdiff.run_dir.lines import Logged, at_step, read_lines, step_and_time

TEXTS = "texts.jsonl"


def texts_line(step: int, texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the line with the `texts` of `step`."""
    return {**at_step(step), "texts": dict(texts)}


def read_texts(path: Path) -> list[Logged[str]]:
    """Return the lines of the file at `path`, as `read_lines` does."""
    return read_lines(path, _parse)


def _parse(line: dict[str, Any]) -> Logged[str]:
    texts = {name: text for name, text in line["texts"].items() if isinstance(text, str)}
    return Logged(*step_and_time(line), texts)
