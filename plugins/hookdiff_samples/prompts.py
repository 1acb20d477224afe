"""Prompts that are read from a file."""

from pathlib import Path

from hookdiff import UserError, why_missing
from hookdiff.disk import read_file

_LARGEST = 1 << 20  # bytes of a file


def read_prompts(path: Path) -> tuple[str, ...]:
    """Return the lines of a file that are not empty, UTF-8.

    Raises:
        UserError: for a file that cannot be read, or has no prompt.
    """
    try:
        if (size := path.expanduser().stat().st_size) > _LARGEST:
            raise UserError(f"{path}: has {size:,} bytes, expected a file with a prompt in each line")
        text = read_file(path.expanduser()).decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: {why_missing(path) or 'no such file'}") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is no text in UTF-8, expected a prompt in each line") from None
    prompts = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not prompts:
        raise UserError(f"{path}: has no prompt, expected one in each line")
    return prompts
