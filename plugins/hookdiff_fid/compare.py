"""All that is measured between two sets of features, by the names under which it is logged."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from hookdiff.features import Collected, Gaussian, Moments, Space, frechet_distance
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


def floor_of(target: Collected, num: int) -> float | None:
    """Return the distance that `num` images of a perfect model would have; None for fewer than 4 images of the data.

    It is measured with images of the data, at most `num` and half of them. They are among those to which they are
    compared, so the distance is in proportion to 1/part - 1/total, and that of new images is to 1/num + 1/total.
    """
    part = min(num, target.num // 2, len(target.rows))
    if part < 2:
        return None
    distance = frechet_distance(Moments.of(target.rows[:part]), target.moments)
    return distance * (1 / num + 1 / target.num) / (1 / part - 1 / target.num)


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
