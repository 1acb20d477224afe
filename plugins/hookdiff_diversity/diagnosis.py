"""Says in words what is wrong with the diversity of samples."""

from __future__ import annotations

from typing import Literal, get_args

from attrs import define

from hookdiff_diversity.copies import Copies
from hookdiff_diversity.modes import Modes
from hookdiff_diversity.spread import Spread

# Images that were never trained on have ratios of 1 within some percent, cover all modes, and are copies in 1 of 100.
FAR = 1.5  # times the distance of held-out images to the nearest training image
COVERED = 0.7  # of the modes
DOMINANT = 0.3  # share of the samples in their most frequent mode, minus the mode's share of the data
COPIED = 0.1  # share of the samples; lower if only some training images are compared, but chance gives 1%
FEWEST_COPIES = 0.04
VARIANCE = 0.8  # ratio to the variance of the data
DISTANCE = 0.9  # ratio to the mean distance of two images of the data

Kind = Literal["healthy", "unlike the data", "collapsed to few modes", "copies of the training set", "too uniform"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@define(frozen=True)
class Diagnosis:
    """What is wrong with the samples, the numbers that show it, and a remedy."""

    kind: Kind
    why: str
    remedy: str = ""  # "": the samples are healthy


def diagnose_samples(spread: Spread, modes: Modes, copies: Copies) -> Diagnosis:
    """Return the diagnosis.

    Samples far from all data come first, since their modes and neighbours mean nothing. A collapse comes before copies,
    since the images of a collapsed model are often copies, too.
    """
    if copies.nearest_ratio > FAR:
        why = f"samples are {copies.nearest_ratio:.2g} times as far from the training images as held-out images are"
        return Diagnosis("unlike the data", why, "to train for longer: diversity counts once the samples look right")
    excess = modes.dominant - modes.dominant_in_data
    if modes.coverage < COVERED or excess > DOMINANT:
        dominant = f"{modes.dominant:.0%} of the samples are in one of them (of the data: {modes.dominant_in_data:.0%})"
        why = f"{modes.covered} of {modes.judged} modes are covered, {dominant}"
        remedy = "guidance closer to 1, a lower learning rate, or balanced = true if the data has rare classes"
        return Diagnosis("collapsed to few modes", why, remedy)
    if copies.memorised > max(FEWEST_COPIES, COPIED * copies.searched):
        why = f"{copies.memorised:.0%} of the samples are copies of a training image (of held-out images: 1%)"
        return Diagnosis("copies of the training set", why, "more data, augmentation, dropout, or to stop earlier")
    if spread.variance_ratio < VARIANCE or spread.distance_ratio < DISTANCE:
        less = f"the variance is {spread.variance_ratio:.2g} of the data's"
        why = f"{less}, two samples are {spread.distance_ratio:.2g} times as far apart as two images of the data"
        return Diagnosis("too uniform", why, "guidance closer to 1, more steps of the sampler, or to train for longer")
    good = f"{modes.covered} of {modes.judged} modes are covered, variance {spread.variance_ratio:.2g} of the data's"
    return Diagnosis("healthy", f"{good}, {copies.memorised:.1%} of the samples are copies")
