"""Writes a package with a plugin or a part to begin with: `hookdiff new-plugin`."""
