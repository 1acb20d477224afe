"""What a run leaves its user with: the table of what was made and where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING

from hookdiff.builtin.metrics import METRICS, read_metrics
from hookdiff.disk.paths import CONFIG

if TYPE_CHECKING:
    from hookdiff.loop import Loop

_TOLD = {
    "plugin": "stopped by a plugin",
    "on_nan": "stopped: not finite",
    "signal": "stopped by a signal",
    "time": "out of time",
}


def summary(loop: Loop, reason: str, name: str, seconds: float) -> str:
    """Return the table of the run called `name`, which took `seconds`."""
    assert loop.run_dir
    took = f"{int(seconds) // 60}:{int(seconds) % 60:02}"
    done = f"{_TOLD.get(reason, reason)} after {loop.progress.step} steps, {loop.progress.epoch} epochs, in {took}"
    rows = [(f"{path}", _what(path, loop.log.details)) for path in _made(loop.run_dir)]
    width = max((len(path) for path, _ in rows), default=0)
    return "\n".join([f"{name}: {done}", *(f"  {path:<{width}}  {what}" for path, what in rows)])


def _made(folder: Path) -> list[Path]:
    if not folder.is_dir():  # a run that was stopped before its first step
        return []
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _what(path: Path, details: Container[str]) -> str:
    if path.is_dir():
        inside = _made(path)
        return f"{len(inside)}, newest {inside[-1].name}" if inside else "empty"
    if path.name == CONFIG:
        return "every key; running it again gives the same run"
    return "; ".join(_measured(path, details)) if path.name == METRICS else f"{path.stat().st_size:,} bytes"


def _measured(path: Path, details: Container[str], most: int = 5, names: int = 4) -> list[str]:
    """Return the number of lines, the last loss, and the last values of what was measured less often than the loss."""
    records = read_metrics(path)
    times = Counter(name for record in records for name in record if name not in details)
    told = [f"{len(records)} line" + "s" * (len(records) != 1)]
    told += [f"loss {record['loss']:.3g}" for record in records if "loss" in record][-1:]
    usual = times.get("loss", len(records))  # who looks at steps of its own makes lines, too
    rare = sorted((name for name, count in times.items() if count < usual / 2), key=times.__getitem__)
    for name in rare[:names]:
        values = [f"{record[name]:.3g}" for record in records if name in record]
        told.append(f"{name} {'... ' * (len(values) > most)}{', '.join(values[-most:])}")
    return told + [f"and {len(rare) - names} more"] * (len(rare) > names)
