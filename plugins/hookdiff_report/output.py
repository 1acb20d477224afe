"""Writes the report. `hookdiff.disk.new_file` would import torch, which the command does not need."""

import os
from contextlib import suppress
from pathlib import Path

from hookdiff import UserError


def check_name(path: Path) -> None:
    """Raise UserError unless `path` is a name for a report."""
    if path.suffix not in (".html", ".htm"):
        raise UserError(f"--out {path}: expected a name that ends in .html")


def replace(path: Path, text: str) -> int:
    """Write `text` to `path`, whole or not at all, and return the number of bytes; raises UserError."""
    data = text.encode("utf-8", "replace")
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            partial.unlink()
        try:
            with partial.open("xb") as file:
                file.write(data)
            os.replace(partial, path)
        finally:
            with suppress(FileNotFoundError):
                partial.unlink()
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None
    return len(data)
