from .plugin import Debug as Debug
