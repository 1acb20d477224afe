from .inception_score import inception_score as inception_score
from .kid import kernel_distance as kernel_distance
from .neighbourhoods import neighbourhoods as neighbourhoods
from .plugin import FID as FID
