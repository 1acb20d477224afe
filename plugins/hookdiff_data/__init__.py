"""Reports on the data of a config, and writes it to tar files: `hookdiff data`."""
