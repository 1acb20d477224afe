from .collected import ROWS as ROWS, Collected as Collected
from .frechet import few_images as few_images, frechet_distance as frechet_distance
from .moments import Gaussian as Gaussian, Moments as Moments
from .neighbours import distances as distances, nearest_neighbours as nearest_neighbours
from .reference import data_features as data_features, shares as shares
from .space import (
    Embedding as Embedding,
    Features as Features,
    Space as Space,
    named_features as named_features,
    usual_features as usual_features,
)
