"""The captions that a text, a list of texts or the content of a file holds."""

import io

LARGEST_CAPTIONS = 1 << 20  # bytes of a file with the captions of one sample


def is_text(value: object) -> bool:
    """Return whether `value` is a text, or a list of one or more."""
    if isinstance(value, (list, tuple)):
        return len(value) > 0 and all(isinstance(text, str) for text in value)
    return isinstance(value, str)


def captions_of(value: object) -> tuple[str, ...]:
    """Return the captions in a text or a list of texts: each stripped, without empty ones. None has none.

    Raises:
        ValueError: for another value, and for half a character, which JSON may hold.
    """
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"expected a caption or a list of captions, got {repr(value)[:60]}")
    for text in texts:
        text.encode()
    return tuple(caption for text in texts if (caption := text.strip()))


def lines_of(content: bytes) -> tuple[str, ...]:
    """Return the captions in a text file: its lines, stripped, without empty ones.

    Raises:
        ValueError: unless it is UTF-8, of at most `LARGEST_CAPTIONS` bytes.
    """
    if len(content) > LARGEST_CAPTIONS:
        raise ValueError(f"is too large, expected captions of at most {LARGEST_CAPTIONS:,} bytes")
    return captions_of([*io.StringIO(content.decode("utf-8-sig"), newline=None)])
