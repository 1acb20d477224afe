from .choices import Choice as Choice, chosen as chosen, name_of as name_of, parts as parts, published as published
from .connects import Connects as Connects
from .every import is_time as is_time
from .fields import (
    IS_FINITE as IS_FINITE,
    Fixed as Fixed,
    Handed as Handed,
    Writes as Writes,
    about as about,
    between as between,
    is_below as is_below,
    is_interval as is_interval,
    is_served as is_served,
    one_of as one_of,
)
from .fitted import Elsewhere as Elsewhere, Fitted as Fitted, fit_to as fit_to, fitted_by as fitted_by
from .help import Key as Key, argument_texts as argument_texts, keys as keys, summary as summary
from .imports import import_line as import_line, import_object as import_object
from .software import versions as versions
from .structure import (
    COUNT as COUNT,
    REST as REST,
    Problems as Problems,
    as_toml as as_toml,
    numbers as numbers,
    shaped as shaped,
    structured as structured,
)
