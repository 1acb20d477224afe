from .plugin import EMA as EMA
from .profiles import NoWarmup as NoWarmup, Power as Power, Ratio as Ratio, Warmup as Warmup
