"""A report on the data of a config: `hookdiff data`."""
