"""The captions that a text, a list of texts or the content of a file holds."""

import io
import re
import unicodedata

LARGEST_CAPTIONS = 1 << 20  # bytes of a file with the captions of one sample

_MARK = "\ufeff"  # the byte order mark; files that were joined have it inside, too
_CONTROLS = re.compile(r"[\x01-\x08\x0e-\x1f\x7f]")
_UNSEEN = ("Cc", "Cf", "Zl", "Zp", "Zs")  # categories of characters without a shape: controls and blanks


def is_text(value: object) -> bool:
    """Return whether `value` is a text, or a list of one or more texts."""
    if isinstance(value, (list, tuple)):
        return len(value) > 0 and all(isinstance(text, str) for text in value)
    return isinstance(value, str)


def captions_of(value: object) -> tuple[str, ...]:
    """Return the captions in a text or a list of texts, stripped, without blank captions. None: no captions.

    Raises:
        ValueError: for another value, and for a text that `check_text` refuses.
    """
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"expected a caption or a list of captions, got {repr(value)[:60]}")
    for text in texts:
        check_text(text)
    return tuple(caption for text in texts if (caption := _stripped(text)))


def check_text(text: str) -> None:
    """Raise ValueError for half a surrogate pair, which JSON may hold, and for NUL bytes or many control characters.

    Text in UTF-16 without a byte order mark has such characters when it is read as UTF-8.
    """
    text.encode()
    if "\0" in text or 4 * len(_CONTROLS.findall(text)) > len(text):
        raise ValueError("has NUL bytes or control characters, as UTF-16 without a mark has: save it as UTF-8")


def _stripped(text: str) -> str:
    text = text.replace(_MARK, "").strip()
    return text if any(unicodedata.category(letter) not in _UNSEEN for letter in text) else ""


def lines_in(content: bytes) -> list[str]:
    """Return the lines of a text in UTF-8, which end at line feed, carriage return, or both, without these ends.

    Raises:
        ValueError: unless `content` is UTF-8.
    """
    return [line.removesuffix("\n") for line in io.StringIO(content.decode("utf-8-sig"), newline=None)]


def lines_of(content: bytes) -> tuple[str, ...]:
    """Return the captions in a text file: its lines, stripped, without empty lines.

    Raises:
        ValueError: unless `content` is a text in UTF-8, of at most `LARGEST_CAPTIONS` bytes.
    """
    if len(content) > LARGEST_CAPTIONS:
        raise ValueError(f"is too large, expected captions of at most {LARGEST_CAPTIONS:,} bytes")
    return captions_of(lines_in(content))
