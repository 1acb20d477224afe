"""Lists the runs below a folder: `hookdiff runs`."""
