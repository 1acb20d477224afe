"""Findings about a training run: rules, the findings that several plugins share, and alarms."""

import math
from collections.abc import Sequence

from attrs import define, evolve, field

from hookdiff.errors import listed
from hookdiff.log.event import Finding, Severity
from hookdiff.terminal.words import byte_size

Rule = tuple[object, Finding]  # a condition, and the finding if it is true


def error_if(holds: object, what: str, remedy: str = "", why: str = "") -> Rule:
    """Return the rule that finds an error if `holds` is true."""
    return holds, Finding("error", what, why, remedy)


def warning_if(holds: object, what: str, remedy: str = "", why: str = "") -> Rule:
    """Return the rule that finds a warning if `holds` is true."""
    return holds, Finding("warning", what, why, remedy)


def judge(numbers: str, *rules: Rule) -> Finding:
    """Return the finding of the first rule with a true condition. Default: "ok".

    `numbers`, a text with the measured numbers, is the text of "ok", or the `why` of a finding without a `why`.
    """
    finding = next((finding for holds, finding in rules if holds), Finding("ok", numbers))
    return finding if finding.why or finding.severity == "ok" else evolve(finding, why=numbers)


Raised = dict[str, tuple[Severity, int, float]]  # the state of `Alarms`


@define(eq=False)
class Alarms:
    """Remembers the findings that were reported, by keys that the plugin chooses, so that each is reported once.

    A finding is news when it appears, when its severity changes, and when it comes back after it was over.
    `loop.log.report(alarms.news(step, key, finding))` reports a finding if it is news.
    """

    _raised: Raised = field(factory=dict, init=False)  # severity, last step and size, by key

    def __contains__(self, key: object) -> bool:
        return key in self._raised

    def news(
        self,
        step: int,
        key: str,
        finding: Finding | None,
        *,
        over: bool | None = None,
        quiet: float = math.inf,
        size: float = 0.0,
        growth: float = math.inf,
    ) -> Finding | None:
        """Return the finding of `step` if it is news, else None. None and "ok" do not count as findings.

        Args:
            step: the step of the finding.
            key: the subject of the finding; each key has one alarm.
            finding: the finding.
            over: whether an earlier finding is over, for a plugin with hysteresis. Default: if there is no finding now.
            quiet: an earlier finding is also over if it was absent for more than this many steps.
            size: the strength of the finding.
            growth: a finding is also news when its size is this many times the reported size.
        """
        holds = finding is not None and finding.severity != "ok"
        if over or (over is None and not holds):
            self._raised.pop(key, None)
        if finding is None or not holds:
            return None
        severity, last, reported = self._raised.get(key, ("ok", step, 0.0))
        is_news = severity != finding.severity or step - last > quiet or size >= growth * reported
        self._raised[key] = finding.severity, step, size if is_news else reported
        return finding if is_news else None

    def state_dict(self) -> Raised:
        """Return severity, last step and size of the present findings, by key."""
        return dict(self._raised)

    def load_state_dict(self, state: Raised) -> None:
        """Restore a saved state, so that a resumed run repeats no report."""
        self._raised = dict(state)


# Findings that several plugins share.

_GENTLER = "a longer warm-up, or clipping of gradients (see `hookdiff plugins`)"
LOWER_RATE = f"a tenth of the learning rate, {_GENTLER}"


def rate_too_high(why: str, rate: float | None = None, severity: Severity = "warning") -> Finding:
    """Return the finding that the learning rate, `rate`, is too high; as a warning it says "probably"."""
    remedy = f"optimizer.lr = {rate / 10:.1g}, then {rate / 100:.1g}, {_GENTLER}" if rate else LOWER_RATE
    what = "learning rate too high" if severity == "error" else "learning rate probably too high"
    return Finding(severity, what, why, remedy)


def not_finite(subject: str, share: float, remedy: str, where: Sequence[str] = ()) -> Finding:
    """Return the finding that a `share` (0 to 1) of the values of `subject` is NaN or infinite, in samples `where`."""
    why = f"{percent(share)} of the values are NaN or infinite" + (f", in {listed(where, 4)}" if where else "")
    return Finding("error", f"{subject} not finite", why, remedy)


def dead_layers(why: str, severity: Severity = "warning") -> Finding:
    """Return the finding that layers get no gradient; `why` names them."""
    return Finding(
        severity,
        "dead layers: their gradient is exactly zero, so they never learn",
        why,
        "another activation if one is zero for every input (a ReLU below 0), no factor that stays zero, and a loss "
        "that depends on all layers; in fp16 it may be an underflow (precision = 'bf16')",
    )


def little_learned(where: str, why: str) -> Finding:
    """Return the finding that a network has learned little at the noise levels `where`."""
    return Finding(
        "warning",
        f"the network has learned little at {where}",
        why,
        "a longer training, another learning rate, a diffusion.weighting or diffusion.times with more weight on these "
        "levels, or a network that uses its timestep",
    )


def memory_short(used: float, available: float, why: str = "") -> Finding:
    """Return the finding that `used` of the `available` bytes are in use at the peak."""
    what = f"memory nearly full: {byte_size(used)} of {byte_size(available)}"
    remedy = "a smaller run.micro_batch, model.gradient_checkpointing, or mixed precision (see `hookdiff plugins`)"
    return Finding("warning", what, why, remedy)


def percent(share: float) -> str:
    """Return a share, from 0 to 1, as text with three digits."""
    return "an unknown share" if math.isnan(share) else f"{100 * share:.3g}%"
