"""From measured numbers to what a person should be told: pure functions, one a check."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from attrs import define, evolve
from torch import Tensor

from hookdiff_debug.measure import Inputs, Layer, Level, Outputs
from hookdiff_debug.trial import Trial

Verdict = Literal["OK", "look", "broken"]

_IMAGES_PAGE = "`hookdiff data CONFIG` shows what is read"


@define(frozen=True)
class Finding:
    """What came of one check."""

    level: Verdict  # look: unusual, and may be meant
    name: str  # of the check
    seen: str
    advice: str = ""  # what to do, unless all is well

    def __str__(self) -> str:
        return f"{self.name}: {self.seen}" + (f"\n  {self.advice}" if self.advice else "")


def cause(findings: Sequence[Finding]) -> Finding | None:
    """Return the first that is broken: findings are listed with the most basic first."""
    return next((finding for finding in findings if finding.level == "broken"), None)


def following(findings: Sequence[Finding], found: Finding | None) -> list[Finding]:
    """Return `findings`, where those that are not OK refer to the cause `found`: their own advice would mislead."""
    if found is None:
        return list(findings)
    start = findings.index(found) + 1 if found in findings else 0
    advice = f"it may follow from {found.name}: mend that first"
    return [
        evolve(finding, advice=advice) if place >= start and finding.level != "OK" else finding
        for place, finding in enumerate(findings)
    ]


def check_inputs(
    inputs: Inputs, standardised: bool = False, sigma_data: float | None = None, spoiled: Sequence[str] = ()
) -> Finding:
    """Judge the range and distribution of the images, which the process and the sampler take to be in [-1, 1].

    `standardised`: the objective has a data_mean or data_std, so any range will do; `sigma_data` is that of EDM, if it
    is read; `spoiled` are the names of samples that are not finite, where they are known.
    """
    low, high, name = inputs.low, inputs.high, "inputs"
    span = f"values from {low:.3g} to {high:.3g}"
    seen = f"{span}, mean {inputs.mean:.2g}, std {inputs.std:.2g}"
    if inputs.nonfinite:
        where = f", in {', '.join(spoiled[:4])}" if spoiled else ""
        more = f" and {len(spoiled) - 4} more" if len(spoiled) > 4 else ""
        return Finding(
            "broken",
            name,
            f"{_share(inputs.nonfinite)} of the values are NaN or infinite{where}{more}",
            f"look for a division by zero or a broken file in the source; {_IMAGES_PAGE}",
        )
    if inputs.constant == 1:
        return Finding(
            "broken",
            name,
            f"every image is constant: one value in all its pixels ({span})",
            f"the source reads or scales its images wrongly; {_IMAGES_PAGE}",
        )
    if not standardised:
        if low >= 0 and 2 < high <= 255.5:
            return Finding(
                "broken",
                name,
                f"{span}, as of [0, 255]; expected [-1, 1]",
                "scale them in the source, image / 127.5 - 1, or hand out uint8, which is scaled for you",
            )
        if -0.01 <= low < 0.1 and 0.9 < high <= 1.01:
            return Finding(
                "broken",
                name,
                f"{span}, as of [0, 1]; expected [-1, 1]",
                "scale them in the source, image * 2 - 1, or hand out uint8, which is scaled for you",
            )
        if inputs.std > 4 or abs(inputs.mean) > 4:
            return Finding(
                "broken", name, f"{seen}; expected [-1, 1]", "scale them; for latents set diffusion.data_mean, data_std"
            )
        if low < -1.01 or high > 1.01:
            return Finding(
                "look",
                name,
                f"{seen}; images are in [-1, 1]",
                "scale to [-1, 1]; for latents set diffusion.data_mean, data_std and sampling.clip_sample = false",
            )
    elif abs(inputs.told_mean) > 0.5 or not 0.5 < inputs.told_std < 2:
        return Finding(
            "look",
            name,
            f"after data_mean and data_std the mean is {inputs.told_mean:.2g}, the std {inputs.told_std:.2g}",
            f"set them to those of the data: mean {inputs.mean:.2g}, std {inputs.std:.2g}",
        )
    if inputs.num > 1 and inputs.channels:
        which = ", ".join(map(str, inputs.channels[:4]))
        return Finding("look", name, f"channel {which} is constant in a whole batch", f"is it read? {_IMAGES_PAGE}")
    if inputs.num > 1 and inputs.same > 0.5:
        return Finding("look", name, f"{_share(inputs.same)} of a batch are the same image", f"{_IMAGES_PAGE}")
    if inputs.constant > 0.1:
        return Finding("look", name, f"{_share(inputs.constant)} of the images are constant", f"{_IMAGES_PAGE}")
    if inputs.told_std < 0.1 or abs(inputs.told_mean) > 0.9:
        return Finding(
            "look",
            name,
            f"{seen}: hardly any contrast beside noise of variance 1",
            f"{_IMAGES_PAGE}; where it is right, set diffusion.data_mean and data_std to these",
        )
    if sigma_data and not 0.6 < inputs.told_std / sigma_data < 1.67:
        return Finding(
            "look",
            name,
            f"{seen}, but sigma_data is {sigma_data:g}",
            f"set diffusion.sigma_data = {inputs.told_std:.2g}",
        )
    return Finding("OK", name, seen)


def check_labels(counts: Sequence[int] | None, unknown: int, conditional: bool) -> Finding:
    """Judge how many samples each class has; `unknown` have none of them."""
    name = "labels"
    if not conditional or counts is None:
        return Finding("OK", name, "not told to the network")
    total, absent = sum(counts), [label for label, count in enumerate(counts) if not count]
    if not total:
        return Finding("broken", name, "no sample has a label, and the network is told of classes", "give labels")
    if len(counts) - len(absent) == 1:
        return Finding("look", name, "all samples are of one class", "leave out model.num_classes")
    if absent:
        some = ", ".join(map(str, absent[:5]))
        return Finding("look", name, f"no sample of class {some}", "classes without samples are never learned")
    if unknown > total:
        return Finding("look", name, f"{_share(unknown / (unknown + total))} have no label", f"{_IMAGES_PAGE}")
    if max(counts) > 20 * min(counts):
        return Finding(
            "look",
            name,
            f"the largest class has {max(counts)} samples, the smallest {min(counts)}",
            "data.balanced = true shows each class equally often",
        )
    return Finding("OK", name, f"{len(counts)} classes of {min(counts)} to {max(counts)} samples")


def check_schedule(log_snr: Sequence[float], std: float) -> Finding:
    """Judge a process by its log-SNR on the way from image to noise; `std` is the deviation of the images."""
    name = "schedule"
    if any(after > before for before, after in itertools.pairwise(log_snr)):
        return Finding("broken", name, "an image gets cleaner on its way to noise", "see the options of [diffusion]")
    first, last = math.exp(log_snr[0]) * std**2, math.exp(log_snr[-1]) * std**2
    seen = f"signal to noise from {first:.2g} to {last:.2g}"
    if last > 0.01:
        left = f"{seen}: at the end {_share(last / (1 + last))} of the variance is still image"
        way_out = (
            'sampling begins with pure noise, which the network never saw: more timesteps, schedule = "cosine", or '
            'rescale_betas_zero_snr with prediction_type = "v_prediction"'
        )
        return Finding("broken" if last > 0.1 else "look", name, left, way_out)
    if first < 20:
        return Finding(
            "look", name, f"{seen}: the cleanest images have noise one can see", "lower beta_start, or more timesteps"
        )
    return Finding("OK", name, seen)


def check_start(outputs: Outputs) -> Finding:
    """Judge what a network answers before the trial."""
    name = "first output"
    if outputs.nonfinite:
        return Finding(
            "broken",
            name,
            f"{_share(outputs.nonfinite)} of it is NaN or infinite before any update",
            "a division by zero, a root or logarithm of what is not positive, or weights that were never initialised",
        )
    seen = f"mean {outputs.mean:.2g}, std {outputs.std:.2g}"
    if outputs.std > 10 or abs(outputs.mean) > 10:
        return Finding(
            "broken",
            name,
            f"{seen}, where about 1 is expected: it explodes",
            "weights that start too large, or a layer without normalisation; a last layer of zeros is a good start",
        )
    if outputs.largest == 0:
        return Finding("OK", name, "zero, as of a last layer that starts as zero")
    return Finding("OK", name, seen)


def check_learning(trial: Trial, trained: bool = False) -> Finding:
    """Judge whether the loss falls; of a network that is `trained` already, whether it stays."""
    name, losses = "learning rate", trial.losses
    rate = max(trial.rates, default=0.0)
    tenth = f"try lr = {rate / 10:.1g}, then {rate / 100:.1g}; a warm-up and clip help"
    if bad := [index for index, loss in enumerate(losses) if not math.isfinite(loss)]:
        when = f"the loss is not finite at step {bad[0] + 1}"
        if trial.inputs.nonfinite:
            return Finding("broken", "loss", f"{when}, as the inputs are not", "mend the data first")
        if bad[0] == 0:
            return Finding("broken", "loss", f"{when}, before any update", "the data, the network or the loss made it")
        return Finding("broken", name, f"too high: {when}, with lr {rate:.3g}", tenth)
    if trial.outcome == "stopped":
        return Finding("broken", name, f"too high: a gradient is not finite at step {len(losses)}", tenth)
    if len(losses) < 8:
        return Finding("OK", name, f"{len(losses)} steps tell nothing of it")
    first = trial.mean_loss(slice(4)) if trained else losses[0]
    width = min(8, max(4, len(losses) // 4))
    means = [trial.mean_loss(slice(start, start + width)) for start in range(len(losses) - width + 1)]
    peak, end = max(losses), means[-1]
    # At once, and at the end of a warm-up: later on, weights have grown with what changes them.
    change = max(statistics.median(part or [math.nan]) for part in (trial.changes[:8], trial.changes[-8:]))
    moved = f"an update changes the weights by {_share(change)}"
    fell = f"loss {first:.3g} to {end:.3g} in {len(losses)} steps with lr {rate:.3g}"
    # Batches of a trained network differ by more than what it still learns.
    back = end > 0.9 * first and (peak > 1.5 * first or change > 0.1)
    wild = end > 0.75 * first and change > 0.15
    rose = end > 2 * min(means) and end > first / 2
    if (not trained and (back or wild or rose)) or (peak > 3 * first and end > first / 2):
        where = losses.index(peak) + 1
        return Finding(
            "broken",
            name,
            f"too high: lr {rate:.3g} took the loss from {first:.3g} to {peak:.3g} at step {where}",
            tenth,
        )
    if trained and end > 1.5 * first:
        return Finding("broken", name, f"too high for the trained network: {fell}", tenth)
    if peak > 3 * first or change > 0.1:
        return Finding("look", name, f"high: {fell}, {moved}, with a peak of {peak:.3g}", tenth)
    if not trained and end > 0.98 * first and trial.rates[-1] > trial.rates[-2]:
        return Finding("OK", name, f"it is still being warmed up; {fell}, {moved}")
    if not trained and end > 0.98 * first:
        way_out = (
            "a longer trial (--steps), a higher rate" if change < 3e-3 else "a lower rate, a longer trial (--steps)"
        )
        return Finding("look", name, f"the loss does not fall: {fell}, {moved}", f"try {way_out}; a warm-up is slow")
    return Finding("OK", name, f"{fell}; {moved}")


def check_gradients(
    layers: Mapping[str, Layer], silent: Collection[str] = (), outputs: Outputs | None = None
) -> Finding:
    """Judge the gradients of all layers; `silent` are those in which they have been exactly zero for several steps.

    While the `outputs` are next to nothing, so are all gradients but those of the last layer, and sizes tell nothing.
    """
    name = "gradients"
    if dead := [layer for layer in layers if layer in silent]:
        return Finding(
            "broken",
            name,
            f"no gradient reaches {_some(dead, len(layers))}: it is exactly zero, so they never learn",
            "what follows multiplies by zero, its activation is off for all inputs (a ReLU below 0), or is a constant",
        )
    if unused := [layer for layer, found in layers.items() if found.norm is None]:
        return Finding(
            "look",
            name,
            f"the loss does not depend on {_some(unused, len(layers))}",
            "they are not called, or behind a detach(); remove or freeze them (requires_grad_(False))",
        )
    sizes = {layer: found.rms for layer, found in layers.items() if found.norm}
    if not sizes:
        return Finding("OK", name, "none yet")
    middle, (top, most) = statistics.median(sizes.values()), max(sizes.items(), key=lambda item: item[1])
    if most > 1e5 * middle and (outputs is None or outputs.std > 0.1):
        return Finding(
            "look",
            name,
            f"those of {top} are {most / middle:.0e} times the usual ones",
            "is its input or its output scaled as those of the others?",
        )
    return Finding("OK", name, f"in all {len(sizes)} layers")


def check_outputs(outputs: Outputs | None, settled: bool = True) -> Finding:
    """Judge what the network answers; `settled`: it has been trained for some steps, so it should not be silent."""
    name = "output"
    if outputs is None:
        return Finding("OK", name, "the objective does not call the network in a way that is known")
    seen = f"mean {outputs.mean:.2g}, std {outputs.std:.2g}"
    if outputs.nonfinite:
        return Finding(
            "broken", name, f"{_share(outputs.nonfinite)} of it is NaN or infinite", "see the gradients and the rate"
        )
    if settled and (outputs.std == 0 or outputs.largest == 0):
        return Finding(
            "broken",
            name,
            f"constant: {outputs.mean:.2g} in every pixel",
            "a last layer of zeros, or one not called",
        )
    if outputs.std > 10 or abs(outputs.mean) > 10:
        return Finding(
            "broken" if outputs.std > 100 else "look",
            name,
            f"{seen}, where about 1 is expected: it explodes",
            "a lower learning rate, clip, or a normalisation before the last layer",
        )
    return Finding("OK", name, seen)


def check_response(outputs: Outputs | None, settled: bool = True) -> Finding:
    """Judge whether the answer changes with what the network is told."""
    name = "response"
    if outputs is None or not settled:
        return Finding("OK", name, "not known yet")
    told = {"image": outputs.by_image, "time": outputs.by_time, "label": outputs.by_label}
    known = {what: value for what, value in told.items() if not math.isnan(value)}
    if known.get("image", 1.0) <= 1e-6:
        return Finding(
            "broken", name, "the same for every image: the network does not look at it", "does forward use its input?"
        )
    if deaf := [what for what in ("time", "label") if known.get(what, 1.0) <= 1e-6]:
        which = " and the ".join(deaf)
        return Finding(
            "look",
            name,
            f"does not change with the {which}",
            f"does forward use the {which}? is it multiplied by zero?",
        )
    changes = ", ".join(f"{_share(value)} with the {what}" for what, value in known.items())
    return Finding("OK", name, f"changes by {changes}" if changes else "not known")


def check_levels(levels: Sequence[Level], trained: bool) -> Finding:
    """Judge the errors from clean to noisy, beside those of who knows only mean and variance of the images."""
    name = "error by time"
    ratios = [level.error / level.mean_error if level.mean_error else math.nan for level in levels]
    seen = "clean to noisy, over that of predicting the mean: " + " ".join(f"{ratio:.2f}" for ratio in ratios)
    if not all(map(math.isfinite, ratios)):
        return Finding("broken", name, seen, "the network fails at these times; see its output and the schedule")
    if trained and min(ratios) > 0.97:
        return Finding(
            "broken",
            name,
            f"nothing is predicted that the mean would not; {seen}",
            "see the learning rate and the output",
        )
    if trained and (worse := [level for level in levels if level.error > 1.1 * level.floor + 0.02 * level.mean_error]):
        times = ", ".join(f"{level.time:.4g}" for level in worse)
        return Finding(
            "look",
            name,
            f"at time {times} worse than who knows only mean and variance of the images; {seen}",
            "these noise levels count little in the loss (diffusion.weighting, diffusion.times), or train longer",
        )
    young = "" if trained or min(ratios) <= 0.97 else "; the trial is too short to judge them"
    return Finding("OK", name, seen + young)


def check_samples(images: Tensor, data: Inputs, trained: bool) -> Finding:
    """Judge `images` that were made, n c h w: range and deviation beside those of the data, NaN, one image for all."""
    name = "samples"
    low, high, std, nonfinite = map(
        float, (images.min(), images.max(), images.std(), (~images.isfinite()).float().mean())
    )
    spare = (data.high - data.low) / 4
    outside = float(((images < data.low - spare) | (images > data.high + spare)).float().mean())
    own = f"values from {low:.3g} to {high:.3g}, std {std:.2g}"
    seen = f"{own}; the data has {data.low:.3g} to {data.high:.3g}, {data.std:.2g}"
    if nonfinite:
        return Finding("broken", name, f"{_share(nonfinite)} of the values are NaN or infinite", "see the output")
    unlike = "constant" if std < 1e-3 else "" if bool((images != images[:1]).any()) else "all the same image"
    if unlike:
        return Finding(
            "broken" if trained else "look", name, f"they are {unlike}", "train longer; see [sampling] and the schedule"
        )
    if trained and outside > 0.01:
        way_out = "sampling.clip_sample keeps images in [-1, 1]; else train longer, or more steps of the sampler"
        return Finding("look", name, f"{_share(outside)} of the values are far outside the data's; {seen}", way_out)
    if trained and not data.std / 2 < std < data.std * 2:
        return Finding("look", name, seen, "train longer, or another sampler; see the picture")
    return Finding("OK", name, seen + ("" if trained else "; the trial is too short to judge them"))


def check_average(name: str, average: Sequence[Level], own: Sequence[Level], trained: bool) -> Finding:
    """Judge the averaged weights called `name` beside the model's own, by their errors."""
    over = statistics.fmean(one.error for one in average) / (statistics.fmean(one.error for one in own) or math.nan)
    seen = f"{name} has {over:.2f} times the error of the model's own weights"
    if trained and over == 1:
        return Finding("look", name, f"{name} gives the very errors of the model's own weights", "is it updated?")
    if trained and not over <= 1.3:
        return Finding(
            "look",
            name,
            seen,
            "it lags behind: a lower decay, a warm-up of the decay, or a longer training",
        )
    return Finding("OK", name, seen)


def check_length(parameters: int, images: int, values: int, batch_size: int, steps: float) -> Finding:
    """Judge size of the network and length of the training; `values` are the numbers in an image."""
    name, epochs = "length", steps * batch_size / images
    seen = (
        f"{steps:.0f} steps of {batch_size} are {epochs:.3g} epochs of {images} images; {parameters} parameters, "
        f"{parameters / images:.3g} an image"
    )
    if batch_size < 8:
        return Finding("look", name, f"{seen}; that is a small batch", "raise batch_size: gradients are noisy")
    if batch_size > images / 4:
        return Finding(
            "look", name, f"{seen}; a batch is more than a quarter of the data", "lower batch_size for more updates"
        )
    if steps * batch_size < 20_000:
        return Finding("look", name, f"{seen}; that is short", "diffusion takes long: from some 50000 images shown on")
    if epochs > 300 and parameters > images * values:
        return Finding(
            "look", name, f"{seen}; it can learn the images by heart", "more data, flips, dropout, or fewer steps"
        )
    return Finding("OK", name, seen)


def check_trial(trial: Trial) -> Finding:
    """Tell how many updates the trial made, and why they are not as many as were asked for."""
    name, made, asked = "trial", len(trial.rates), trial.asked
    if made > asked:
        more = f"{made - asked} more through the warm-up, in growing strides, and at the rate after it"
        return Finding("OK", name, f"{made} updates: {asked}, and {more}")
    if made == asked:
        return Finding("OK", name, f"{made} updates")
    why = f"{len(trial.losses) - made} of {len(trial.losses)} steps made none"
    if trial.outcome == "stopped":
        why = "a step that is not finite stopped it"
    elif len(trial.losses) == made:
        why = "half a minute was over"
    return Finding("OK", name, f"{made} of {asked} updates: {why}")


def check_time(parts: Mapping[str, float], per_step: float) -> Finding:
    """Judge where the seconds of a step go, by their parts."""
    name, total = "time", sum(parts.values()) or math.nan
    shares = sorted(((seconds / total, part) for part, seconds in parts.items()), reverse=True)
    told = ", ".join(f"{part} {_share(share)}" for share, part in shares if share > 0.005)
    seen = f"{per_step * 1e3:.3g} ms a step: {told}"
    by_part = {part: share for share, part in shares}
    if by_part.get("data", 0.0) > 0.3:
        return Finding("look", name, seen, "the network waits for data: data.workers, a smaller memory, or store")
    core = ("forward", "backward", "optimizer", "data", "loop")
    if heavy := [part for share, part in shares if part not in core and share > 0.2]:
        return Finding("look", name, seen, f"{heavy[0]} takes more than a fifth of a step")
    return Finding("OK", name, seen)


def check_memory(estimate: float, measured: float, available: float | None, how: str = "measured") -> Finding:
    """Judge the memory that a step takes, in bytes: as estimated, as measured, and as there is.

    `how` it was: "measured" by the allocator, or "counted", tensor by tensor.
    """
    name, needed = "memory", max(estimate, measured)
    seen = f"{estimate / 2**20:.0f} MiB estimated, {measured / 2**20:.0f} {how}"
    if available and needed > 0.9 * available:
        there = f"{seen}, {available / 2**20:.0f} there"
        return Finding("look", name, there, "run.micro_batch, model.gradient_checkpointing or amp take less")
    return Finding("OK", name, seen)


def _share(value: float) -> str:
    return "an unknown share" if math.isnan(value) else f"{100 * value:.3g}%"


def _some(layers: Sequence[str], total: int) -> str:
    rest = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
    return f"{len(layers)} of {total} layers ({', '.join(layers[:3])}{rest})"
