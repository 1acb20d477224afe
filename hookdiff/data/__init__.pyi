from .batch import Batch as Batch
from .facts import Facts as Facts
from .feed import Feed as Feed
from .memory import (
    InMemory as InMemory,
    check_range as check_range,
    digits as digits,
    fashion_mnist as fashion_mnist,
    to_unit_range as to_unit_range,
)
from .remembered import Remembered as Remembered
from .source import Images as Images, Source as Source
