from .absent_data import FeedWithoutData as FeedWithoutData
from .arrays import array_in as array_in, names_in as names_in, open_array as open_array
from .batch import Batch as Batch
from .datasets import digits as digits, fashion_mnist as fashion_mnist
from .feed import Feed as Feed
from .feed_state import Facts as Facts
from .memory import InMemory as InMemory, check_range as check_range, to_unit_range as to_unit_range
from .memory_reader import PlainReader as PlainReader
from .picture_sizes import (
    Size as Size,
    labels_for as labels_for,
    picture_shapes as picture_shapes,
    size_name as size_name,
    size_of as size_of,
    trained_sizes as trained_sizes,
    untrained_text as untrained_text,
)
from .reader import Reader as Reader, find_reader as find_reader
from .source import Images as Images, Source as Source, SourceOptions as SourceOptions
from .table import locked as locked
