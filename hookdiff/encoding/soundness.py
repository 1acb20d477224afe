"""Tests an encoder on a few samples in float32: values may ignore the samples, or lose digits in float16.

An encoder is tested before it encodes all samples. The result is kept beside its table, so each start reports it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from attrs import define
from torch import Tensor

from hookdiff.encoding.encoder import INPUTS, STORED, Encoder, PictureEncoder
from hookdiff.encoding.tokens import TokenFacts
from hookdiff.errors import UserError, listed
from hookdiff.machine.ranks import rank

logger = logging.getLogger("hookdiff")

FEW = 64  # samples of the test
AT_ONCE = 16  # samples that are encoded together
_LEAST = 0.01  # the deviation of the means over pictures, in units of the posterior's deviation
_MOST = 0.01  # share of the values that float16 may change
_CHANGE = 0.1  # share of the deviation, above which values count as changed
_LISTED, _SHOWN = 8, 60  # channels, and characters of a text, in a message


def few_of(samples: Tensor) -> Tensor:
    """Return a few of `samples` (n), evenly spread."""
    num = min(FEW, len(samples))
    return samples[torch.arange(num) * len(samples) // max(1, num)]


def constant_channels(where: str, encoder: Encoder, channels: Sequence[int], of: str) -> UserError:
    """Return the error about `channels` that are constant; `of` names the samples."""
    return UserError(
        f"{where}: {_channels(channels)} of {encoder.origin} {'is' if len(channels) == 1 else 'are'} "
        f"constant in float16 on {of}, so no network can learn from {'it' if len(channels) == 1 else 'them'}; choose "
        "an encoder with channels that all depend on the picture"
    )


@define(frozen=True)
class Rounding:
    """How float16 changes latents."""

    constant: list[int]  # channels in which all values are the same
    changed: float  # share of the values that change by more than a tenth of the deviation of their channel


@define(frozen=True)
class Soundness:
    """The result of the test of an encoder on a few pictures."""

    num: int  # pictures
    over_pictures: list[float]  # by channel, the deviation of the means over pictures; empty if these are all the same
    posterior: list[float]  # by channel, the root mean square of the deviations; empty without deviations
    means: Rounding  # if the run trains on the means
    draws: Rounding  # if the run trains on samples of the posterior

    @classmethod
    def of(cls, mean: Tensor, std: Tensor | None, differ: bool) -> Soundness:
        """Return the result for means and deviations (n, channels, ...) of pictures.

        `differ`: the pictures are not all the same, so their latents should differ too.
        """
        over, posterior, constants, lost = list[float](), list[float](), (list[int](), list[int]()), [0, 0]
        for channel, values in enumerate(_by_channel(mean)):
            values = values.double()
            stored = values.to(STORED).float()
            is_constant = bool(stored.amin() == stored.amax())
            spread = 0.0 if values.amin() == values.amax() else float(values.var(correction=0))
            over.append(_rounded(values.var(0, correction=0).mean().sqrt()))
            if is_constant:
                constants[0].append(channel)
            lost[0] += _num_changed(values, spread)
            if std is None:
                continue
            widths = _by_channel(std)[channel].double()
            second, drawn = float(widths.square().mean()), widths.to(STORED).float()
            posterior.append(_rounded(second**0.5))
            if is_constant and bool((stored - drawn).amin() == (stored + drawn).amax()):
                constants[1].append(channel)
            lost[1] += _num_changed(values, spread + second) + _num_changed(widths, spread + second)
        means = Rounding(constants[0] if differ else [], _rounded(lost[0] / mean.numel()))
        draws = Rounding(constants[1] if differ else [], _rounded(lost[1] / (2 * mean.numel())))
        return cls(len(mean), over if differ else [], posterior, means, means if std is None else draws)

    def report(self, name: str, encoder: PictureEncoder) -> None:
        """Warn of faults of the encoder `name`.

        Raises:
            UserError: for latents with a constant channel.
        """
        where, facts = f"data.encode.{name}", self.draws if encoder.draws else self.means
        if name == INPUTS and facts.constant:
            raise constant_channels(where, encoder, facts.constant, f"{self.num} samples, evenly spread")
        pairs = [*zip(self.over_pictures, self.posterior, strict=False)]
        if noise := [channel for channel, (over, width) in enumerate(pairs) if over < _LEAST * width]:
            over, width = min((pairs[channel] for channel in noise), key=lambda pair: pair[0] / pair[1])
            _warn(
                f"{where}: {_channels(noise)} of {encoder.origin} is noise: over {self.num} pictures the "
                f"means deviate by {over:.3g}, {over / width:.2%} of the posterior's {width:.3g}, expected 1 % at "
                "least; has it all its weights?"
            )
        if facts.changed > _MOST:
            _warn(f"{where}: {_lost(encoder, facts.changed, 'deviation of their channel')}")


@define(frozen=True)
class TextSoundness:
    """The result of the test of an encoder on a few texts."""

    num: int  # texts
    changed: float  # share of the values that float16 changes by more than a tenth of their deviation
    alike: list[list[int]]  # groups of texts, by row, with the same conditions

    @classmethod
    def of(cls, texts: Mapping[int, str], facts: TokenFacts, conditions: Mapping[str, Tensor]) -> TextSoundness:
        """Return the result for the `conditions` (n rows each, float32, bool or int64) of `texts` (by row).

        Truncated texts and texts with the same tokens may have the same conditions. If the tokens are not known, so
        may texts that differ only in capitals and spaces.
        """
        shares, mask = [0.0], conditions.get("_mask")
        for values in conditions.values():
            if not values.is_floating_point():
                continue
            if mask is not None and mask.dtype == torch.bool and values.shape[: mask.dim()] == mask.shape:
                values = values[mask]  # the places without a token are not attended to
            values = values.double()
            if values.numel() and values.amin() < values.amax():
                shares.append(_num_changed(values, float(values.var(correction=0))) / values.numel())
        alike: dict[tuple[bytes, ...], dict[str, int]] = {}
        stored = [values.to(STORED) if values.is_floating_point() else values for values in conditions.values()]
        for place, (row, text) in enumerate(texts.items()):
            if place not in facts.cut:
                same = alike.setdefault(tuple(column[place].numpy().tobytes() for column in stored), {})
                same.setdefault(facts.tokens[place] if facts.tokens else " ".join(text.casefold().split()), row)
        groups = [[*group.values()] for group in alike.values() if len(group) > 1]
        return cls(len(texts), _rounded(max(shares)), groups)


def report_texts(where: str, encoder: Encoder, parts: Sequence[tuple[TextSoundness, Mapping[int, str]]]) -> None:
    """Warn of faults of the encoder with the key `where`.

    Args:
        where: the key of the encoder.
        encoder: the encoder.
        parts: the results of its tests, each with the tested texts of the run by row.
    """
    if (share := max((seen.changed for seen, _ in parts), default=0.0)) > _MOST:
        _warn(f"{where}: {_lost(encoder, share, 'deviation of all')}")
    alike = [[texts[row] for row in group if row in texts] for seen, texts in parts for group in seen.alike]
    if groups := [group for group in alike if len(group) > 1]:
        first, second = (repr(text[:_SHOWN]) for text in groups[0][:2])
        _warn(
            f"{where}: of {sum(seen.num for seen, _ in parts)} texts that were tried, {sum(map(len, groups))} become "
            f"the same as another, such as {first} and {second}: has {encoder.origin} all its weights, and does its "
            "tokenizer know their words?"
        )


def _warn(text: str) -> None:
    if rank() == 0:
        logger.warning("%s", text)


def _lost(encoder: Encoder, share: float, of: str) -> str:
    return (
        f"float16 changes {share:.1%} of the values of {encoder.origin} by more than a tenth of the {of}; scale them "
        "to a deviation near 1 around 0"
    )


def _channels(channels: Sequence[int]) -> str:
    return f"channel{'s' * (len(channels) > 1)} {listed(channels, _LISTED)}"


def _by_channel(values: Tensor) -> Tensor:
    """Return `values` (n, channels, ...) as channels n rest."""
    return values.reshape(len(values), values.shape[1] if values.dim() > 1 else 1, -1).transpose(0, 1)


def _num_changed(values: Tensor, variance: float) -> int:
    """Return how many of `values` (float64) float16 changes by more than a tenth of their deviation."""
    return int(((values.to(STORED).double() - values).abs() > _CHANGE * variance**0.5).sum()) if variance else 0


def _rounded(value: Tensor | float) -> float:
    """Return `value` with four digits. Later digits may differ when a stopped encoding goes on."""
    return float(f"{float(value):.4g}")
