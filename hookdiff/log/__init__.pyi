from .distribution import Distribution as Distribution
from .event import Event as Event
from .findings import (
    LOWER_RATE as LOWER_RATE,
    Raised as Raised,
    dead_layers as dead_layers,
    error_if as error_if,
    judge as judge,
    little_learned as little_learned,
    memory_short as memory_short,
    not_finite as not_finite,
    percent as percent,
    rate_too_high as rate_too_high,
    warning_if as warning_if,
)
from .log import MACHINE as MACHINE
from .panel import Panel as Panel, grid as grid, save_grid as save_grid, show as show
from .picture import Picture as Picture, read_info as read_info
from .pixels import (
    as_pictures as as_pictures,
    as_pillow as as_pillow,
    padded as padded,
    save_image as save_image,
    to_uint8 as to_uint8,
)
from .placement import PanelLayout as PanelLayout, panel_layouts as panel_layouts
