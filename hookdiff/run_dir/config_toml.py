"""config.toml: the whole config of a run, from which the same run can be started again."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tomli
import tomli_w

from hookdiff.disk.reading import read_file
from hookdiff.errors import UserError, shown

CONFIG = "config.toml"


def config_bytes(hparams: Mapping[str, Any]) -> bytes:
    """Return the hparams of a Loop as TOML, in UTF-8; raise UserError for values that TOML cannot hold."""
    try:
        return tomli_w.dumps(hparams).encode()
    except TypeError as error:
        raise UserError(f"Loop(hparams=...): {error}; give numbers, text, and lists and dicts of them") from error
    except UnicodeEncodeError as error:
        before, after = error.object[: error.start], error.object[error.start :]
        line = shown(before.rpartition("\n")[2] + after.partition("\n")[0])
        raise UserError(f"{CONFIG} is UTF-8 and cannot hold this line: {line}; choose another name") from None


def read_config(run_dir: Path) -> dict[str, Any]:
    """Return the config of a run; raise UserError if it cannot be read."""
    path = run_dir / CONFIG
    try:
        return tomli.loads(read_file(path).decode("utf-8-sig"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None


def flat(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys of nested tables, such as "run.steps", with their values."""
    waiting = [*config.items()][::-1]  # no recursion: a damaged file may nest tables very deeply
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, dict) or isinstance(value, Mapping):  # noqa: SIM101 the test for a dict is fast
            waiting += [(f"{key}.{name}", inner) for name, inner in value.items()][::-1]
        else:
            yield key, value
