"""texts.jsonl: the logged texts, by name.

{"step": 0, "time": 1764236235.125, "texts": {"model": "UNet(...)"}}
"""

from collections.abc import Mapping
from typing import Any

from hookdiff.run_dir.lines import Logged, at_step, step_and_time

TEXTS = "texts.jsonl"


def texts_line(step: int, texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the line with the `texts` of `step`."""
    return {**at_step(step), "texts": dict(texts)}


def parse_texts(line: dict[str, Any]) -> Logged[str]:
    """Return the texts in a line."""
    texts = {name: text for name, text in line["texts"].items() if isinstance(text, str)}
    return Logged(*step_and_time(line), texts)
