"""JSON that begins with a digest of itself."""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

_STAMP = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n')


def stamped(values: Mapping[str, Any]) -> bytes:
    """Return `values` as JSON; its first line has the SHA-256 of all other lines."""
    text = json.dumps(values, indent=1).encode().removeprefix(b"{\n")
    return b'{"sha256": "%s",\n' % hashlib.sha256(text).hexdigest().encode() + text


def is_intact(data: bytes) -> bool | None:
    """Return whether the SHA-256 of stamped JSON is right; None if there is no SHA-256."""
    stamp = _STAMP.match(data)
    return hashlib.sha256(data[stamp.end() :]).hexdigest().encode() == stamp[1] if stamp else None
