"""What tokenizers make of texts: which of them they cut, do not know, or take for the same."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Sequence

from attrs import define, field

from hookdiff.encoding.encoder import EncodedTexts, TextNetwork

_AT_ONCE = 1024  # texts
_UNKNOWN = 0.9  # of the words of a text: so many that it says nothing


@define
class TokenFacts:
    """Facts about some texts, in their order. Without `tokens` of an encoder, the last two are empty."""

    cut: list[int] = field(factory=list)  # those that are cut
    unknown: list[int] = field(factory=list)  # those of which the tokenizer knows hardly any word
    tokens: list[str] = field(factory=list)  # a hash of the tokens of each

    @classmethod
    def of(cls, network: EncodedTexts | TextNetwork, texts: Sequence[str], limit: int | None) -> TokenFacts:
        """Return the facts about `texts` for the opened `network` of an encoder with this limit."""
        found, opened = cls(), TextNetwork.of(network)
        tokens_of = opened.tokens
        empty: Sequence[int | None] = tokens_of([""])[0] if tokens_of else ()  # what is added to any text
        for start in range(0, len(texts), _AT_ONCE):
            part = texts[start : start + _AT_ONCE]
            lengths = opened.lengths(part) if limit and opened.lengths else ()
            found.cut += [start + row for row, length in enumerate(lengths) if length > (limit or 0)]
            for row, tokens in enumerate(tokens_of(part) if tokens_of else ()):
                words = len(tokens) - len(empty)
                unknown = tokens.count(None) - empty.count(None)
                found.unknown += [start + row] * (0 < words * _UNKNOWN <= unknown)
                found.tokens.append(hashlib.sha256(repr(list(tokens)).encode()).hexdigest()[:16])
        return found


def of_same_tokens(texts: Sequence[str], tokens: Sequence[str]) -> list[tuple[str, str]]:
    """Return each of `texts` with the `tokens` of an earlier one, and that. Case and blanks make no other text."""
    plain = [" ".join(unicodedata.normalize("NFKC", text).casefold().split()) for text in texts]
    first: dict[str, int] = {}
    pairs = [(row, first.setdefault(own, row)) for row, own in enumerate(tokens)]
    return [(texts[row], texts[other]) for row, other in pairs if plain[row] != plain[other]]
