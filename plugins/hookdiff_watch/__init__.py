"""Shows on a terminal a run that another process trains: `hookdiff watch`."""
