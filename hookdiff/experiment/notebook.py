"""A run as a notebook shows it: its state, its newest picture and its curves, all from its files."""

from base64 import b64encode
from collections.abc import Iterator, Sequence
from html import escape

import numpy

from hookdiff.authors.thinning import thin_curve
from hookdiff.run_dir.history import History, asked_number
from hookdiff.run_dir.metrics_jsonl import is_distance
from hookdiff.terminal.words import step_label

_MOST = 8  # curves
_WIDTH, _HEIGHT = 210, 90  # pixels of a curve
_INK = "#3b82d6"  # readable on white and on black
_DOT = f'<circle cy="{_HEIGHT / 2}" r="3" fill="{_INK}"/>'


def run_html(run: History) -> str:
    """Return a run as HTML; values that are not finite are left out of the curves."""
    about = f"{run.state}, {step_label(run.step, asked_number(run.config, 'steps'))}"
    if run.outcome.message:
        about += f": {run.outcome.message}"
    parts = [f"<div><b>{escape(run.name)}</b>: {escape(about)}</div>", *_picture(run), *_curves(run)]
    return f"<div>{''.join(parts)}</div>"


def _picture(run: History) -> Iterator[str]:
    """Yield the newest picture of a run. Of several pictures of a step, take the outermost folder, then the fullest."""
    newest = [(max(files), -name.count("/"), len(files), name) for name, files in run.pictures.items()]
    if not newest:
        return
    step, _, _, name = max(newest)
    data = b64encode(run.pictures[name][step].read_bytes()).decode()
    caption = escape(f"{name}, step {step:,}")
    yield '<figure style="margin:.6em 0">'
    yield f'<img style="max-width:100%" alt="{caption}" src="data:image/png;base64,{data}"/>'
    yield f"<figcaption>{caption}</figcaption></figure>"


def _curves(run: History) -> Iterator[str]:
    """Yield the curves of the losses, the distances, and all values with a name without "/"."""
    ranks = [(_rank(name), name) for name in run.series]
    names = [name for rank, name in sorted(ranks, key=lambda pair: pair[0]) if rank < 4]
    for name in names[:_MOST]:
        steps, values = map(numpy.array, run.series[name])
        if (finite := numpy.isfinite(values)).any():
            # Two points for each pixel.
            x, y = thin_curve(steps[finite], values[finite], 2 * _WIDTH)
            yield _svg(name, list(zip(x.tolist(), y.tolist(), strict=True)))


def _rank(name: str) -> int:
    if name.rpartition("/")[2] == "loss":
        return "/" in name
    return 2 if is_distance(name) else 3 if "/" not in name else 4


def _svg(name: str, points: Sequence[tuple[int, float]]) -> str:
    (first, _), (last, newest) = points[0], points[-1]
    low, high = min(value for _, value in points), max(value for _, value in points)
    margin = 1.0 * (low == high)  # above and below a flat line
    bottom, top = low - margin, high + margin
    across, up = _WIDTH / ((last - first) or 1), _HEIGHT / (top - bottom)
    places = [f"{(step - first) * across:.1f},{(top - value) * up:.1f}" for step, value in points]
    title = escape(f"{name}: {newest:.4g}")
    texts = [
        f'<text x="0" y="-8" font-weight="bold">{title}</text>',
        f'<text x="{_WIDTH + 6}" y="{(top - high) * up + 4:.1f}">{high:.3g}</text>',
        f'<text x="{_WIDTH + 6}" y="{(top - low) * up + 4:.1f}">{low:.3g}</text>' * (low < high),
        f'<text x="0" y="{_HEIGHT + 15}">{first:,}</text>',
        f'<text x="{_WIDTH}" y="{_HEIGHT + 15}" text-anchor="end">step {last:,}</text>',
    ]
    box = f"-4 -24 {_WIDTH + 64} {_HEIGHT + 44}"
    return (
        f'<svg role="img" aria-label="{title}" viewBox="{box}" width="{_WIDTH + 64}" height="{_HEIGHT + 44}" '
        f'style="color:inherit" font-family="sans-serif" font-size="11" fill="currentColor">'
        f'<path d="M0 0V{_HEIGHT}H{_WIDTH}" fill="none" stroke="currentColor" opacity=".4"/>'
        f'<polyline points="{" ".join(places)}" fill="none" stroke="{_INK}" stroke-width="1.5" '
        f'stroke-linejoin="round"/>{_DOT * (first == last)}{"".join(texts)}</svg>'
    )
