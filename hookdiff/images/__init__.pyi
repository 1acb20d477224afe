from .buckets import Buckets as Buckets, cut_off as cut_off, size_name as size_name
from .colour_profiles import profile_fault as profile_fault
from .decoding import (
    Unreadable as Unreadable,
    decode as decode,
    num_channels as num_channels,
    upright_size as upright_size,
)
from .folder import Folder as Folder
from .formats import PICTURE_FORMATS as PICTURE_FORMATS, suffixes as suffixes, usual_suffix as usual_suffix
from .items import parts_of as parts_of, seed_all as seed_all
from .labels import as_lines as as_lines, encode as encode, normal as normal, parse_json as parse_json, some as some
from .loader import Workers as Workers
from .parallel_reading import with_images as with_images
from .picture_reading import open_picture as open_picture
from .source_reader import feed_of as feed_of, reader_of_source as reader_of_source
from .store import Store as Store
from .survey import (
    Kind as Kind,
    left_out_text as left_out_text,
    passed_over_text as passed_over_text,
    refuse as refuse,
    texts_of_kinds as texts_of_kinds,
    unreadable_problems as unreadable_problems,
)
from .texts import (
    LARGEST_CAPTIONS as LARGEST_CAPTIONS,
    captions_of as captions_of,
    check_text as check_text,
    lines_in as lines_in,
    lines_of as lines_of,
)
from .transforms import Transforms as Transforms, size_text as size_text
