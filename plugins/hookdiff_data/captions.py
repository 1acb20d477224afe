"""Statistics of the captions of a data set: how often each occurs, and how many tokens it has for each encoder."""

from collections import Counter
from contextlib import closing
from typing import Any

import torch

from hookdiff import Batch, Feed
from hookdiff.data import find_reader
from hookdiff.encoding import CaptionedReader, TextEncoder, TokenFacts, of_same_tokens
from hookdiff.log import as_pictures
from hookdiff.terminal import paced

_AT_ONCE = 1024  # texts
_FREQUENT = 5  # captions that are listed


def captions(feed: Feed) -> dict[str, Any]:
    """Return statistics, ready for JSON, of the captions that encoders take, by the name of the captions.

    Each encoder is opened on the CPU. Raises UserError for an encoder that cannot be opened.
    """
    facts: dict[str, Any] = {}
    if (reader := find_reader(feed, CaptionedReader)) is None:
        return facts
    for name, captions_of_name in reader.captions.items():
        counts = Counter(captions_of_name.every())
        takers = {key: encoder for key, encoder in reader.encoders.items() if encoder.texts == name}
        facts[name] = {
            "count": counts.total(),
            "unique": len(counts),
            "empty": counts[""],
            "frequent": [[text, count] for text, count in counts.most_common(_FREQUENT)],
            "tokens": {key: lengths for key, encoder in takers.items() if (lengths := _tokens(key, encoder, counts))},
        }
    return facts


def captions_below(feed: Feed, batch: Batch) -> list[str]:
    """Return the captions that are drawn for a `batch` of epoch 0, one line for each of its pictures."""
    if not (named := feed.reader.captions):
        return []
    assert batch.indices is not None
    texts = zip(*(source.drawn(batch.indices, feed.seed, 0) for source in named.values()), strict=True)
    times = len(as_pictures(batch.inputs)) // len(batch)  # the channels of latents are shown one by one
    return [" ".join(" | ".join(of_picture).split()) for of_picture in texts for _ in range(times)]


def _tokens(name: str, encoder: TextEncoder, counts: Counter[str]) -> dict[str, Any]:
    """Return statistics of the lengths of texts in tokens, and of lost words; {} for an encoder without tokens.

    In the lengths and in the number of truncated texts, a text counts as often as it occurs. It counts once among texts
    with hardly a known word, and among texts with the same tokens as another text.
    """
    network, lengths, texts = encoder.opened(torch.device("cpu")), Counter[int](), list(counts)
    if not network.lengths:
        return {}
    parts = (texts[start : start + _AT_ONCE] for start in range(0, len(texts), _AT_ONCE))
    with closing(paced(parts, len(texts), f"data: data.encode.{name}", "captions")) as paced_parts:
        for part in paced_parts:
            for text, length in zip(part, network.lengths(part), strict=True):
                lengths[length] += counts[text]
    limit, every = encoder.limit, sorted(lengths.elements())
    cut = sum(count for length, count in lengths.items() if limit is not None and length > limit)
    facts = TokenFacts.of(network, texts, None)
    lost = {"unknown": len(facts.unknown), "same": len(of_same_tokens(texts, facts.tokens)) if facts.tokens else 0}
    return {"min": every[0], "median": every[len(every) // 2], "max": every[-1], "limit": limit, "cut": cut, **lost}
