from .animation import FORMATS as FORMATS, save_animation as save_animation
from .picture import Picture as Picture, read_info as read_info
from .pixels import (
    as_pictures as as_pictures,
    as_pillow as as_pillow,
    save_image as save_image,
    to_uint8 as to_uint8,
)
from .place import Place as Place, places as places
from .sheet import Panel as Panel, by_class as by_class, grid as grid, save_grid as save_grid, sheet as sheet
