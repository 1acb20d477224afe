"""The lines of a run on a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from attrs import define

from hookdiff import shown
from hookdiff.terminal import Work, bar_line, flow, step_label, work_lines

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

FIRST = "loss", "lr", "grad_norm"
_BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_LINES = 2  # lines of values


@define(frozen=True)
class Facts:
    """What a terminal shows of a run."""

    step: int
    total: int | None
    pace: Sequence[str]  # such as "12 img/s" and "ETA 12 s"
    values: Mapping[str, str]  # texts by name, in the order of display
    losses: Sequence[float]  # the newest losses
    notes: Sequence[str]  # on memory and checkpoints
    works: Sequence[Work] = ()


def picture(facts: Facts, width: int, has_blocks: bool) -> list[RenderableType]:
    """Return the bar of a run, its values, and the bars of what takes long, in lines of at most `width` columns."""
    from rich.text import Text

    *others, eta = facts.pace or [""]
    if facts.total is None:
        head: list[RenderableType] = [
            *flow([Text(text) for text in (step_label(facts.step, None), *facts.pace)], width, 1)
        ]
    else:
        share = f"{facts.step / facts.total:.0%}" if facts.total else "100%"
        parts = [step_label(facts.step, facts.total), share, *([eta] if eta else []), *others]
        head = [bar_line(parts, 1, facts.step, facts.total, width)]
    usual = [value(name, facts.values[name]) for name in FIRST if name in facts.values]
    if facts.losses and has_blocks:
        room = max(0, width - usual[0].cell_len - 1)  # a part that does not fit would be left out whole
        usual[0].append(" " if room else "").append(sparkline(facts.losses[max(0, len(facts.losses) - room) :]), "cyan")
    rare = [value(name, text) for name, text in facts.values.items() if name not in FIRST]
    notes = [Text(note) for note in facts.notes]
    return [*head, *flow([*usual, *notes, *rare], width, _LINES), *work_lines(facts.works, width)]


def value(name: str, text: str) -> Text:
    """Return a name with its value."""
    from rich.text import Text

    return Text.assemble((shown(name), "dim"), " ", text)


def sparkline(values: Iterable[float]) -> str:
    """Return a character for each value, from the lowest to the highest; "x" for NaN and infinity."""
    values = list(values)
    finite = [number for number in values if math.isfinite(number)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    size = (high / 2 - low / 2) or 1.0  # halved first, so that the difference cannot overflow
    return "".join(
        _BLOCKS[round((number / 2 - low / 2) / size * (len(_BLOCKS) - 1))] if math.isfinite(number) else "x"
        for number in values
    )
