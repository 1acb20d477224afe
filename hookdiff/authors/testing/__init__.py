"""Helpers for tests of plugins: a small real Loop, and the promises that every plugin keeps."""
