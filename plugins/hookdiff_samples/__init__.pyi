from .plugin import SampleGrid as SampleGrid
