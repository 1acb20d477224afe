"""The plugin that compares the config of a resumed run with the config in its checkpoint."""

import logging
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any

from attrs import define, field

from hookdiff.disk.tree import plain
from hookdiff.errors import UserError
from hookdiff.loop.counts import AUTO
from hookdiff.loop.hookspecs import hookimpl
from hookdiff.loop.loop import Loop
from hookdiff.run_dir.config_toml import flat

logger = logging.getLogger("hookdiff")

# The keys that cannot change on resume, by reason; a part can mark more keys as `Fixed`. All other keys can change,
# unless a plugin refuses its saved state.
_REASONS: Mapping[str, tuple[str, ...]] = {
    "all random numbers depend on it": ("run.seed",),
    "training samples would become held-out samples, or held-out samples training samples": ("data.held_out",),
    "it would change the order of the current epoch": ("data.balanced", "data.limit"),
    "the weights belong to the network as it was": (
        *("model.use", "model.in_channels", "model.image_size", "model.num_classes"),
    ),
    "the weights were trained with this meaning of inputs, times and outputs": (
        *("diffusion.process", "diffusion.prediction", "diffusion.conditional", "diffusion.conditions"),
        *("diffusion.data_mean", "diffusion.data_std"),
    ),
    "the saved state of the optimizer would not fit": ("optimizer.use",),
}
FIXED = {key: reason for reason, keys in _REASONS.items() for key in keys}
# Options of a fixed part that can still change, because they only decide which times are drawn.
FREE = {"diffusion.process.shift", "diffusion.process.sigma_min", "diffusion.process.sigma_max"}
# Keys that can change, but not be switched on or off, because the optimizer keeps tensors for them.
FIXED_SWITCHES = {f"optimizer.{key}": FIXED["optimizer.use"] for key in ("amsgrad", "centered", "momentum")}


@define(eq=False)
class Changes:
    """Logs the changes in the config of a resumed run since its checkpoint, and refuses changes of fixed keys.

    The configs are compared once, not at each rollback.
    """

    defaults: Mapping[str, Any]  # the default config, for keys that the checkpoint does not have
    fixed: Mapping[str, str] = field(factory=dict)  # keys that parts of the run mark as `Fixed`, with the reasons
    _done: bool = field(init=False, default=False)

    @hookimpl(wrapper=True)
    def restore(self, loop: Loop) -> Generator[None, Mapping[str, Any], Mapping[str, Any]]:
        """Compare the configs; raise UserError with all changes of fixed keys."""
        state = yield
        if not self._done and state and state.get("config"):
            changed, refused, fixed = [], [], {**self.fixed, **FIXED}
            for key, old, new in changes(state["config"], loop.hparams, self.defaults):
                changed.append(f"{key} {_change(key, old, new)}")
                switch = FIXED_SWITCHES.get(key) if bool(old) != bool(new) else None
                reason = switch or fixed.get(".".join(key.split(".")[:2]))  # of the key, or of its part
                if reason and key not in FREE:
                    refused.append(f"{changed[-1]}: {reason}")
            if refused:
                raise _refusal(refused)
            if changed:
                logger.info("changed since the checkpoint: %s", ", ".join(changed))
        self._done = True
        return state


def check_parts(settings: Iterable[str], config: Mapping[str, Any]) -> None:
    """Raise UserError for a setting that chooses another model, optimizer or process than the `config` of the run.

    Without this check, the new class would refuse each key of the config that it does not have.
    """
    for setting in settings:
        key, _, value = (part.strip() for part in setting.partition("="))
        part = key if key in FIXED else key.removesuffix(".use")
        table, _, name = part.partition(".")
        old = config.get(table, {}).get(name)
        old = old.get("use") if isinstance(old, Mapping) else old
        if part in FIXED and isinstance(old, str) and old != value:
            raise _refusal([f"{key} {old!r} -> {value!r}: {FIXED[part]}"])


def _refusal(refused: Iterable[str]) -> UserError:
    lines = "\n  ".join(refused)
    return UserError(
        f"these keys cannot change after the checkpoint:\n  {lines}\n"
        "restore their values, or start a new run from the weights alone (model.start_from)"
    )


def changes(
    old: Mapping[str, Any], new: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the keys in which two configs differ, as "table.key", with both values; None for a key that is not set.

    A key that only `new` has is no difference if its value is the default. If only one config has a plugin, only
    run.plugins is yielded, and no key of the plugin.
    """
    before, after, usual = (dict(flat(plain(config))) for config in (old, new, defaults))
    for key in dict.fromkeys((*after, *before)):
        was, now = before.get(key), after.get(key)
        # "auto" is replaced by its value later. A key that the old config lacks had its default.
        if now == AUTO or (was is None and usual.get(key) in (now, AUTO)):
            continue
        table, _, name = key.partition(".")
        plugin = name.partition(".")[0]
        one_sided = table == "plugins" and any(plugin not in config.get("plugins", {}) for config in (old, new))
        if was != now and not one_sided:
            yield key, was, now


def _change(key: str, old: Any, new: Any) -> str:
    if key != "run.plugins":
        return " -> ".join("(not set)" if value is None else repr(value) for value in (old, new))
    before, after = old or (), new or ()
    names = {"with": [n for n in after if n not in before], "without": [n for n in before if n not in after]}
    return " ".join(f"{word} {', '.join(some)}" for word, some in names.items() if some) or "in another order"
