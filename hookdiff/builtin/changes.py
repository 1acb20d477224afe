"""The differences between the config of a run and that of the checkpoint it goes on from."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from attrs import define, field

from hookdiff.disk.tree import plain
from hookdiff.errors import UserError
from hookdiff.hookspecs import hookimpl
from hookdiff.progress import AUTO

if TYPE_CHECKING:
    from hookdiff.loop import Loop

log = logging.getLogger("hookdiff")

_RANDOMNESS = "all randomness follows from it"
_SPLIT = "samples that were trained on would be held out, or the other way round"
_NETWORK = "the weights are of the network as it was"
_MEANING = "the weights have learned this meaning of inputs, times and outputs"
_OPTIMIZER = "the state of the optimizer is of another kind"

# The keys that cannot change, and why. All others may; a plugin refuses on its own what it cannot go on with.
FIXED = {
    "run.seed": _RANDOMNESS,
    "data.held_out": _SPLIT,
    "data.balanced": "the epoch under way has another order",
    **dict.fromkeys(
        (
            *("model.use", "model.in_channels", "model.image_size", "model.num_classes"),
            *("model.channels", "model.channel_mults", "model.num_res_blocks", "model.attention_resolutions"),
            *("model.head_dim", "model.num_heads", "model.patch_size", "model.hidden_size", "model.depth"),
            "model.mlp_ratio",
        ),
        _NETWORK,
    ),
    **dict.fromkeys(
        (
            "diffusion.process",
            "diffusion.prediction",
            "diffusion.conditional",
            "diffusion.data_mean",
            "diffusion.data_std",
        ),
        _MEANING,
    ),
    "optimizer.use": _OPTIMIZER,
    "optimizer.adamw": "weights would go from one optimizer to the other, without their state",
}
# Of a part that is fixed, the options that may change: they say which times are drawn.
FREE = {"diffusion.process.shift", "diffusion.process.sigma_min", "diffusion.process.sigma_max"}
# Cannot be switched on or off, since an optimizer keeps something for it; another number may do.
FIXED_SWITCHES = dict.fromkeys(("optimizer.amsgrad", "optimizer.centered", "optimizer.momentum"), _OPTIMIZER)

_NOT_SET = "(not set)"


@define(eq=False)
class Changes:
    """Logs what has changed since the checkpoint that a run goes on from, and refuses what cannot change.

    A rollback is not compared.
    """

    defaults: Mapping[str, Any]  # of the config, table by table: a key that an older hookdiff did not know had these
    _done: bool = field(init=False, default=False)

    @hookimpl(wrapper=True)
    def restore(self, loop: Loop) -> Generator[None, Mapping[str, Any], Mapping[str, Any]]:
        """Compare the configs; raises UserError that lists every change that is refused."""
        state = yield
        if state and not self._done:
            self._compare(loop, state)
        self._done = True
        return state

    def _compare(self, loop: Loop, state: Mapping[str, Any]) -> None:
        before, refused, changed = state.get("config"), [], []
        for key, old, new in changes(before, loop.hparams, self.defaults) if before else ():
            line = (
                f"{key} {_difference_of_names(old, new) if key == 'run.plugins' else f'{_text(old)} -> {_text(new)}'}"
            )
            changed.append(line)
            if reason := _why_fixed(key, bool(old) != bool(new)):
                refused.append(f"\n  {line}: {reason}")
        if refused:
            raise _refusal(refused)
        if changed:
            log.info("changed since the checkpoint: %s", ", ".join(changed))


def _why_fixed(key: str, switched: bool) -> str | None:
    """Return why `key`, or the part that it is an option of, cannot change; None if it can."""
    if key in FREE:
        return None
    part = ".".join(key.split(".")[:2])
    return FIXED.get(key) or FIXED.get(part) or (FIXED_SWITCHES.get(key) if switched else None)


def check_parts(settings: Iterable[str], table: Mapping[str, Any]) -> None:
    """Raise UserError for a setting that names another model or optimizer than `table`, the config of a run.

    Read together, every key that the other one does not know would be reported as wrong.
    """
    for setting in settings:
        key, _, value = (part.strip() for part in setting.partition("="))
        part, _, name = key.partition(".")
        was = table.get(part, {}).get(name)
        if name == "use" and key in FIXED and was not in (None, value):
            raise _refusal([f"\n  {key} {was!r} -> {value!r}: {FIXED[key]}"])


def _refusal(refused: Iterable[str]) -> UserError:
    return UserError(
        "the config differs from that of the checkpoint in what cannot change:" + "".join(refused) + "\n"
        "set it back, or start another run from the weights alone (model.start_from)"
    )


def changes(
    old: Mapping[str, Any], new: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the keys in which two configs differ, as "table.key", with both values; None is a key that is not set.

    A key that only `new` has does not differ where it has its default. A plugin that only one has shows in run.plugins
    alone.
    """
    before, now, usual = (dict(_flat(plain(config))) for config in (old, new, defaults))
    for key in dict.fromkeys((*now, *before)):
        was, is_now = before.get(key), now.get(key)
        if (was is None and is_now == usual.get(key)) or is_now == AUTO:  # it is reported when it has been found
            continue
        table, _, name = key.partition(".")
        plugin = name.partition(".")[0]
        one_sided = table == "plugins" and any(plugin not in config.get("plugins", {}) for config in (old, new))
        if was != is_now and not one_sided:
            yield key, was, is_now


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _difference_of_names(old: Any, new: Any) -> str:
    """Return in words which names a list has more, and which less."""
    before, now = old or (), new or ()
    parts = {"with": [name for name in now if name not in before], "without": [n for n in before if n not in now]}
    return " ".join(f"{word} {', '.join(names)}" for word, names in parts.items() if names) or "in another order"


def _text(value: Any) -> str:
    return _NOT_SET if value is None else repr(value)
