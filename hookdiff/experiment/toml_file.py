"""Reads the TOML file of a config. A command checks its path with this module, before it imports torch."""

from pathlib import Path
from typing import Any

import tomli

from hookdiff.disk.paths import why_missing
from hookdiff.disk.reading import read_file
from hookdiff.errors import ConfigError
from hookdiff.experiment import windows_paths


def read_toml(path: Path) -> dict[str, Any]:
    """Parse the file at `path`. Raises ConfigError, with the line that is not TOML."""
    return read_with_bytes(path)[0]


def read_with_bytes(path: Path) -> tuple[dict[str, Any], bytes]:
    """Parse the file at `path`, and return its bytes too; raises ConfigError as `read_toml` does."""
    text = ""
    try:
        data = read_file(path)
        table = tomli.loads(text := data.decode("utf-8-sig"))  # Windows editors add a byte order mark
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
    except RecursionError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    except ValueError as error:  # of tomli, or of Python for a number that is too long
        way_out = windows_paths.spelling_remedy(text, error)
        raise ConfigError(f"{path}: not TOML: {error}" + (way_out and f"; {way_out}")) from None
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file: {why_missing(path)}") from None
    except IsADirectoryError:
        inside = "".join(f"; did you mean {file}?" for file in sorted(path.glob("*.toml"))[:1])
        raise ConfigError(f"{path}: give a TOML file, not a directory{inside}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if wrong := windows_paths.misread(table):
        raise ConfigError(f"{path}: a backslash was read as an escape: {'; '.join(wrong)}")
    return table, data
