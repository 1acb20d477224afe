"""Writes numbers, times and long texts for readers."""

import math
from datetime import UTC, datetime


def number(value: float) -> str:
    """Return a value with four digits."""
    return "not a number" if math.isnan(value) else f"{value:.4g}"


def count(value: float) -> str:
    """Return a count with commas between thousands."""
    return f"{value:,.0f}" if abs(value) < 1e15 else "very many"


def moment(time: float) -> str:
    """Return a time, in seconds since 1970, as date and minute of UTC."""
    try:
        return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError, OSError):
        return "unknown"


def shortened(text: str, most: int) -> str:
    """Return the text, truncated to `most` characters."""
    return text if len(text) <= most else f"{text[:most]}..."
