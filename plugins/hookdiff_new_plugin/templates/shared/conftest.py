"""Fixtures that hookdiff has for tests of a package."""

pytest_plugins = ["hookdiff.cli.fixtures"]
