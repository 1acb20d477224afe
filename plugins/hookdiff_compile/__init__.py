"""Compiles the model in place."""

from hookdiff_compile.plugin import Compile

__all__ = ["Compile"]
