"""The Fréchet distance of generated images to the data, measured during training."""

from hookdiff_fid.frechet import Moments, frechet_distance
from hookdiff_fid.plugin import FID

__all__ = ["FID", "Moments", "frechet_distance"]
