"""Rebuilds what a tracker has of a run: `hookdiff mirror`."""
