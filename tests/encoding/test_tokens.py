"""Warnings about texts that lose something as tokens: those cut, unknown, or the same as others."""

from collections.abc import Mapping, Sequence

import pytest
from torch import Tensor

from hookdiff.encoding.tokens import TokenFacts, of_same_tokens

KNOWN = {"a": 1, "red": 2, "disc": 3}


class Words:
    """The tokenizer of three words, which begins with a token and looks at three."""

    def encode(self, texts: Sequence[str]) -> Mapping[str, Tensor]:
        return {}

    def lengths(self, texts: Sequence[str]) -> Sequence[int]:
        return [1 + len(text.split()) for text in texts]

    def tokens(self, texts: Sequence[str]) -> Sequence[Sequence[int | None]]:
        return [[0, *map(KNOWN.get, text.casefold().split()[:3])] for text in texts]


@pytest.mark.parametrize(
    ("texts", "cut", "unknown", "same"),
    [
        (["", "a red disc", "a Red  disc", "red"], [], [], []),
        (["a кот", "кот", "шар", "кот шар"], [], [1, 2, 3], [("шар", "кот")]),
        (["a red disc", "a red disc disc", "zorp"] * 700, [*range(1, 2100, 3)], [*range(2, 2100, 3)], None),
        (["", "a", "a "], [], [], []),
    ],
)
def test_what_tokens_lose(
    texts: list[str], cut: list[int], unknown: list[int], same: list[tuple[str, str]] | None
) -> None:
    facts = TokenFacts.of(Words(), texts, 4)
    assert (facts.cut, facts.unknown) == (cut, unknown)
    pairs = of_same_tokens(texts, facts.tokens)
    assert pairs == ([("a red disc disc", "a red disc")] * 700 if same is None else same)
