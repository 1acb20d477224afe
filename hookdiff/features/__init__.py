"""Features of images: the spaces in which sets of images are compared, and the features of the data."""

from hookdiff.features.collected import ROWS, Collected
from hookdiff.features.moments import Gaussian, Moments
from hookdiff.features.neighbours import distances, nearest
from hookdiff.features.reference import data_features, shares
from hookdiff.features.space import Embedding, Features, Space, usual_features

__all__ = [
    "ROWS",
    "Collected",
    "Embedding",
    "Features",
    "Gaussian",
    "Moments",
    "Space",
    "data_features",
    "distances",
    "nearest",
    "shares",
    "usual_features",
]
