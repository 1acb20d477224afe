import hashlib
from pathlib import Path

import pytest

from hookdiff import UserError
from hookdiff_checkpoint.folder import verify
from tests.conftest import refused


@pytest.mark.parametrize(("now", "fact"), [(b"the stave", "SHA-256"), (b"the states", "10 bytes")])
def test_a_file_of_another_size_or_content_is_damaged(tmp_path: Path, now: bytes, fact: str) -> None:
    path, written = tmp_path / "states.safetensors", b"the state"
    path.write_bytes(written)
    expected = len(written), hashlib.sha256(written).hexdigest()
    verify(path, *expected)
    path.write_bytes(now)
    with refused(UserError, tmp_path, path.name, fact):
        verify(path, *expected)
