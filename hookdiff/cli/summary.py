"""The summary that a run prints at its end: the reason for the end, and a table of its files."""

from collections import Counter
from collections.abc import Container
from pathlib import Path

from hookdiff.errors import shown
from hookdiff.loop.loop import Loop
from hookdiff.run_dir.config_toml import CONFIG
from hookdiff.run_dir.metrics_jsonl import METRICS, read_metrics
from hookdiff.run_dir.outcome_json import OUTCOME
from hookdiff.terminal.words import duration

_VISIBLE = "[!.]*"  # files that are not hidden; there are none if the run stopped before it made its directory
_ENDS = {"plugin": "stopped by a plugin", "on_nan": "stopped by on_nan", "signal": "stopped by a signal"}


def run_summary(loop: Loop, reason: str, name: str, seconds: float) -> str:
    """Return the summary of the run called `name`, which took `seconds`."""
    assert loop.run_dir
    end = "out of time" if reason == "time" else _ENDS.get(reason, reason)
    if loop.end.message:
        end = f"{end} ({loop.end.message})"
    step, epoch = loop.progress.step, loop.progress.epoch
    done = f"{end} after {step:,} step{'s' * (step != 1)}, {epoch:,} epoch{'s' * (epoch != 1)}, in {duration(seconds)}"
    files = [path for path in sorted(loop.run_dir.glob(_VISIBLE)) if path.name != OUTCOME]  # `done` has the same facts
    rows = [(shown(path), _describe(path, loop.log.details)) for path in files]
    width = max((len(path) for path, _ in rows), default=0)
    return "\n".join([f"{name}: {done}", *(f"  {path:<{width}}  {text}" for path, text in rows)])


def _describe(path: Path, details: Container[str]) -> str:
    if path.is_dir():
        inside = sorted(path.glob(_VISIBLE), key=lambda file: (file.lstat().st_mtime, file.name))
        return f"{len(inside):,}, newest {shown(inside[-1].name)}" if inside else "empty"
    if path.name == CONFIG:
        return "the whole config; running it again gives the same run"
    try:
        return "; ".join(_measured(path, details)) if path.name == METRICS else f"{path.lstat().st_size:,} bytes"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"


def _measured(path: Path, details: Container[str], most: int = 5, names: int = 4) -> list[str]:
    """Return the number of lines, the last loss with its step, and the last values of names that are logged rarely."""
    lines = read_metrics(path)
    records = [line.values for line in lines]
    counts = Counter(name for record in records for name in record if name not in details)
    facts = [f"{len(records):,} line" + "s" * (len(records) != 1)]
    facts += [f"loss {line.values['loss']:.3g} at step {line.step:,}" for line in lines if "loss" in line.values][-1:]
    usual = counts.get("loss", len(records))  # a plugin may log at other steps, which gives lines without a loss
    rare = sorted((name for name, count in counts.items() if count < usual / 2), key=counts.__getitem__)
    for name in rare[:names]:
        values = [f"{record[name]:.3g}" for record in records if name in record]
        facts.append(f"{name} {'... ' * (len(values) > most)}{', '.join(values[-most:])}")
    return facts + [f"and {len(rare) - names} more"] * (len(rare) > names)
