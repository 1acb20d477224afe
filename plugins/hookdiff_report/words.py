"""Numbers, times and long texts for people."""

from __future__ import annotations

import math
from datetime import UTC, datetime


def number(value: float) -> str:
    """Return a value with four digits."""
    return "not a number" if math.isnan(value) else f"{value:.4g}"


def count(value: float) -> str:
    """Return a count with its thousands."""
    return f"{value:,.0f}" if abs(value) < 1e15 else "very many"


def duration(seconds: float) -> str:
    """Return a time with its two largest units, such as "3 d 4 h" or "5 min 6 s"."""
    if not 0 <= seconds < 1e12:
        return "unknown"
    rest = round(seconds)
    parts: list[str] = []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        amount, rest = divmod(rest, size)
        if amount or parts or unit == "s":
            parts.append(f"{amount} {unit}")
    return " ".join(parts[:2])


def moment(time: float) -> str:
    """Return a time, in seconds since 1970, as date and minute of UTC."""
    try:
        return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError, OSError):
        return "unknown"


def shortened(text: str, most: int) -> str:
    """Return the text, cut to `most` letters."""
    return text if len(text) <= most else f"{text[:most]}..."
