"""All that is measured between two sets of features, by the names under which it is logged."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from hookdiff.authors import Collected, Gaussian, Moments, Space
from hookdiff_fid.frechet import frechet_distance
from hookdiff_fid.inception_score import inception_score
from hookdiff_fid.kid import kernel_distance
from hookdiff_fid.neighbourhoods import neighbourhoods

Metric = Literal["kid", "precision", "is"]
METRICS: tuple[Metric, ...] = ("kid", "precision", "is")

_FEWEST = 10  # samples with which each of them can be computed


def compare(
    space: Space, samples: Collected | Gaussian, reference: Collected | Gaussian, metrics: Collection[Metric] = METRICS
) -> dict[str, float]:
    """Return the distance of `samples` to `reference`, and those `metrics` that can be computed, by name.

    Published statistics (a Gaussian) and fewer than 10 samples have only the Fréchet distance. The Inception Score is
    that of `samples`, for a network with classes.
    """
    values = {space.distance: frechet_distance(_moments(samples), _moments(reference))}
    if not isinstance(samples, Collected) or samples.num < _FEWEST:
        return values
    if isinstance(reference, Collected) and reference.num >= _FEWEST:
        if "kid" in metrics:
            distance, error = kernel_distance(samples.rows, reference.rows)
            values |= {f"kid/{space.name}": distance, f"kid/{space.name}/error": error}
        if "precision" in metrics:
            found = neighbourhoods(samples.rows, reference.rows)
            values |= {f"{name}/{space.name}": value for name, value in found.items()}
    if "is" in metrics and samples.logits is not None:
        values[f"is/{space.name}"], values[f"is/{space.name}/deviation"] = inception_score(samples.logits)
    return values


def too_few(
    samples: Collected | Gaussian, reference: Collected | Gaussian, metrics: Collection[Metric] = METRICS
) -> str:
    """Return a text about those `metrics` that `compare` leaves out for too few images; "" if there are none."""
    if not isinstance(samples, Collected):
        return ""
    sets: dict[str, list[Collected | Gaussian]] = {"kid": [samples, reference], "precision": [samples, reference]}
    sets |= {"is": [samples]} if samples.logits is not None else {}
    needed = {name: [one for one in sets.get(name, ()) if isinstance(one, Collected)] for name in metrics}
    lacking = [name for name, given in needed.items() if any(one.num < _FEWEST for one in given)]
    return f"without {', '.join(lacking)}, for which {_FEWEST} images are needed" if lacking else ""


def _moments(one: Collected | Gaussian) -> Moments | Gaussian:
    return one.moments if isinstance(one, Collected) else one
