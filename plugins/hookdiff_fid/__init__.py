"""Measures the Fréchet distance of generated images to the data, which is FID for features of Inception, and more."""

from hookdiff_fid.frechet import frechet_distance
from hookdiff_fid.inception_score import inception_score
from hookdiff_fid.kid import kernel_distance
from hookdiff_fid.neighbourhoods import neighbourhoods
from hookdiff_fid.plugin import FID

__all__ = ["FID", "frechet_distance", "inception_score", "kernel_distance", "neighbourhoods"]
