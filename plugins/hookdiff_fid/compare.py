"""Compares two sets of features; the values have the names under which they are logged."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from hookdiff.features import Collected, Gaussian, Moments, Space, frechet_distance
from hookdiff_fid.inception_score import inception_score
from hookdiff_fid.kid import kernel_distance
from hookdiff_fid.neighbourhoods import neighbourhoods

Metric = Literal["kid", "precision", "is"]
METRICS: tuple[Metric, ...] = ("kid", "precision", "is")

_FEWEST = 10  # samples of a metric


def compare(
    space: Space, samples: Collected | Gaussian, reference: Collected | Gaussian, metrics: Collection[Metric] = METRICS
) -> dict[str, float]:
    """Return the distance of `samples` to `reference`, and the `metrics` that can be computed, by name.

    Published statistics (a Gaussian) and fewer than 10 samples allow only the Fréchet distance. The Inception Score is
    computed for `samples`, if the network has classes.
    """
    values = {space.distance: frechet_distance(_moments(samples), _moments(reference))}
    if not isinstance(samples, Collected) or samples.num < _FEWEST:
        return values
    if isinstance(reference, Collected) and reference.num >= _FEWEST:
        if "kid" in metrics:
            distance, error = kernel_distance(samples.rows, reference.rows)
            values |= {f"kid/{space.name}": distance, f"kid/{space.name}/error": error}
        if "precision" in metrics:
            shares = neighbourhoods(samples.rows, reference.rows)
            values |= {f"{name}/{space.name}": value for name, value in shares.items()}
    if "is" in metrics and samples.logits is not None:
        values[f"is/{space.name}"], values[f"is/{space.name}/deviation"] = inception_score(samples.logits)
    return values


def floor_of(target: Collected, num: int) -> float | None:
    """Return the distance that `num` images of a perfect model would have; None for fewer than 4 images of the data.

    A distance is measured from a part of the data, at most `num` images and at most half, to all of the data. Because
    the part belongs to the data, this distance is proportional to 1/part - 1/total. It is scaled to the distance of
    new images, which is proportional to 1/num + 1/total.
    """
    part = min(num, target.num // 2, len(target.rows))
    if part < 2:
        return None
    distance = frechet_distance(Moments.of(target.rows[:part]), target.moments)
    return distance * (1 / num + 1 / target.num) / (1 / part - 1 / target.num)


def too_few(
    samples: Collected | Gaussian, reference: Collected | Gaussian, metrics: Collection[Metric] = METRICS
) -> str:
    """Return a text about the `metrics` that `compare` leaves out for too few images; "" for none."""
    if not isinstance(samples, Collected):
        return ""
    sets: dict[str, list[Collected | Gaussian]] = {"kid": [samples, reference], "precision": [samples, reference]}
    sets |= {"is": [samples]} if samples.logits is not None else {}
    needed = {name: [side for side in sets.get(name, ()) if isinstance(side, Collected)] for name in metrics}
    lacking = [name for name, collected in needed.items() if any(side.num < _FEWEST for side in collected)]
    return f"without {', '.join(lacking)}, which need at least {_FEWEST} images" if lacking else ""


def _moments(features: Collected | Gaussian) -> Moments | Gaussian:
    return features.moments if isinstance(features, Collected) else features
