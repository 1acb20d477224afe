"""Facts about the tokens of texts: texts that are truncated, unknown, or the same as another text."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Sequence

from attrs import define, field

from hookdiff.encoding.encoder import EncodedTexts, TextNetwork

_AT_ONCE = 1024  # texts
_UNKNOWN = 0.9  # share of unknown words, from which a text counts as unknown


@define
class TokenFacts:
    """Facts about some texts, by row. For an encoder without `tokens`, `unknown` and `tokens` are empty."""

    cut: list[int] = field(factory=list)  # rows of texts that are truncated
    unknown: list[int] = field(factory=list)  # rows of texts with hardly a word that the tokenizer knows
    tokens: list[str] = field(factory=list)  # a hash of the tokens of each text

    @classmethod
    def of(cls, network: EncodedTexts | TextNetwork, texts: Sequence[str], limit: int | None) -> TokenFacts:
        """Return the facts about `texts` for the opened `network` of an encoder with this limit."""
        facts, opened = cls(), TextNetwork.of(network)
        tokens_of = opened.tokens
        empty: Sequence[int | None] = tokens_of([""])[0] if tokens_of else ()  # the tokens that are added to each text
        for start in range(0, len(texts), _AT_ONCE):
            part = texts[start : start + _AT_ONCE]
            lengths = opened.lengths(part) if limit and opened.lengths else ()
            facts.cut += [start + row for row, length in enumerate(lengths) if length > (limit or 0)]
            for row, tokens in enumerate(tokens_of(part) if tokens_of else ()):
                words = len(tokens) - len(empty)
                unknown = tokens.count(None) - empty.count(None)
                facts.unknown += [start + row] * (0 < words * _UNKNOWN <= unknown)
                facts.tokens.append(hashlib.sha256(repr(list(tokens)).encode()).hexdigest()[:16])
        return facts


def of_same_tokens(texts: Sequence[str], tokens: Sequence[str]) -> list[tuple[str, str]]:
    """Return pairs of texts with the same `tokens` that differ in more than case and blanks, the earlier text last."""
    plain = [" ".join(unicodedata.normalize("NFKC", text).casefold().split()) for text in texts]
    first: dict[str, int] = {}
    pairs = [(row, first.setdefault(token, row)) for row, token in enumerate(tokens)]
    return [(texts[row], texts[other]) for row, other in pairs if plain[row] != plain[other]]
