"""Shows on a terminal a run that another process makes: `hookdiff watch`."""
