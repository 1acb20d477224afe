"""Proves on this machine that a run resumes exactly, and finds a known optimum: `hookdiff selftest`."""
