"""Prompts that are read from a file."""

from pathlib import Path

from hookdiff import UserError, why_missing
from hookdiff.disk import read_file, reason
from hookdiff.images import LARGEST_CAPTIONS, lines_of


def read_prompts(path: Path) -> tuple[str, ...]:
    """Return the prompts in a file, one in each line, read in the same way as captions.

    Raises:
        UserError: for a file that cannot be read, or has no prompt.
    """
    try:
        if (size := path.expanduser().stat().st_size) > LARGEST_CAPTIONS:
            raise UserError(f"{path}: has {size:,} bytes; name a file with a prompt in each line")
        prompts = lines_of(read_file(path.expanduser()))
    except FileNotFoundError:
        raise UserError(f"{path}: {why_missing(path) or 'no such file'}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is no text in UTF-8; write a prompt in each line, in UTF-8") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {reason(error)}") from None
    if not prompts:
        raise UserError(f"{path}: has no prompt; write a prompt in each line")
    return prompts
