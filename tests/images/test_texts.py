"""What is no text is refused, by one check for captions, prompts and names of classes."""

import pytest

from hookdiff.images.texts import captions_of, check_text, lines_of
from tests.conftest import refused

TEXTS = ("a red disc", "кот", "шар, круг", "ein Hündchen")


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("text", TEXTS)
def test_utf_16_without_a_mark_is_no_text(text: str, encoding: str) -> None:
    content = text.encode(encoding)
    with pytest.raises(ValueError, match=r"utf-8|UTF-16"):
        lines_of(content)


@pytest.mark.parametrize("text", ["a\0", "\x04:\x04>", "\ud800", "\x1b"])
def test_what_is_no_text(text: str) -> None:
    with refused(ValueError):
        check_text(text)
    with refused(ValueError):
        captions_of([text])


def test_all_else_is_a_text() -> None:
    others = ("e\u0301", "👩\u200d🚀", "\u0645\u06cc\u200c\u062e", "one\x0btwo", "a \x07 bell", "\ufffd", "\ue000")
    assert captions_of((*TEXTS, *others)) == (*TEXTS, *others)
    assert captions_of(["\u200b", "\ufeff", " \u2060 ", "\u3000", ""]) == ()
