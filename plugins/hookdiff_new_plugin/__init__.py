"""Writes a package with a small plugin or part, as a start for your own: `hookdiff new-plugin`."""
