"""Writes a config that fits a folder of images and this machine: `hookdiff init`."""
