"""Rebuilds a run in a tracker from its run directory: `hookdiff mirror`."""
