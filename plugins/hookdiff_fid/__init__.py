"""The plugin `fid`: the Fréchet distance of generated images to the data, while a run is under way."""

from hookdiff_fid.frechet import Moments, frechet_distance
from hookdiff_fid.plugin import FID

__all__ = ["FID", "Moments", "frechet_distance"]
