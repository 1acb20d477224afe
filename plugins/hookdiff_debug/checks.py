"""Judges measured numbers. Each check is a function with a list of rules, the most basic cause first."""

import itertools
import math
import statistics
from collections.abc import Collection, Mapping, Sequence

from attrs import evolve
from torch import Tensor

from hookdiff import Finding, listed
from hookdiff.log import (
    dead_layers,
    error_if,
    judge,
    little_learned,
    memory_short,
    not_finite,
    percent,
    rate_too_high,
    warning_if,
)
from hookdiff.loop import HOOKS
from hookdiff.terminal import byte_size
from hookdiff_debug.measure import DRAWS, Drawn, Inputs, Layer, Level, Outputs, measure_inputs
from hookdiff_debug.trial import Trial

# Images
BYTES_OVER, BYTES_UP_TO = 2.0, 255.5  # largest value of images in [0, 255]
UNIT_LOW, UNIT_HIGH = 0.1, 0.9  # images in [0, 1] have values below and above these
ROUNDING = 0.01  # allowed beyond the ends of a range
WILD = 4.0  # a larger mean or deviation is not of images in [-1, 1]
FAINT, LOPSIDED = 0.1, 0.9  # with a lower deviation, or a larger mean, noise of variance 1 hides the images
OFF_MEAN, OFF_STD = 0.5, 2.0  # largest mean, and factor between deviation and 1, of standardised images
SIGMA_DATA = 1.67  # largest factor between the deviation and sigma_data
SAME, CONSTANT = 0.5, 0.1  # shares of the images
UNEVEN_CLASSES = 20  # size of the largest class over that of the smallest
# Signal to noise of the process
AT_END, AT_END_BROKEN = 0.01, 0.1  # where sampling begins
AT_START = 20  # below this, the cleanest images have visible noise
BURIED = 5.0  # absolute log-SNR beyond which the noise hides the image, or the image the noise
# Network
LARGE, HUGE = 10.0, 100.0  # mean or deviation of the output, where about 1 is expected
YOUNG = 0.1  # deviation of the output below which only the last layer has notable gradients
IGNORED = 1e-6  # change of the output, relative to its size
UNEVEN_GRADIENTS = 1e5  # RMS gradient of a layer over the median of all layers
UNLEARNED = 0.97  # error over the error of predicting the mean
OVER_FLOOR, FLOOR_SLACK = 1.1, 0.02  # error over the floor; slack over the error of predicting the mean
LAGGING = 1.3  # error of an average over the error of the model's own weights
# Losses of a trial
FEWEST = 8  # steps
PEAK, RUIN, RUIN_TRAINED = 1.5, 3.0, 1.5  # over the first loss
BACK, STILL_HIGH, FLAT = 0.9, 0.75, 0.98  # last loss over the first
LOST = 2.0  # last loss over the lowest
WILD_CHANGE, LARGE_CHANGE, SMALL_CHANGE = 0.15, 0.1, 3e-3  # of the weights, in one update
# Samples
OUTSIDE = 0.01  # share of the values that are far outside the data's
UNLIKE = 2.0  # factor between the deviation of samples and data
BLANK = 1e-3  # deviation of an image that shows nothing
# Run
SMALL_BATCH, LARGE_BATCH = 8, 0.25  # images; share of the data
FEW_IMAGES, MANY_EPOCHS = 20_000, 300
WAITING, HEAVY, SHOWN = 0.3, 0.2, 0.005  # shares of a step: waiting for data; one plugin; the smallest listed part
FULL = 0.9  # share of the memory
# Parts of a step that belong to no plugin.
CORE = ("data", "loop", *(hook.work for hook in HOOKS.values() if hook.work))

LOOK = "`hookdiff data CONFIG`, which shows the data as it is read"
SCALE = "values in [-1, 1]; for latents diffusion.data_mean and data_std, and sampling.clipping = 'none'"
UINT8 = ", or uint8, which is scaled for you"


def cause(findings: Mapping[str, Finding]) -> str | None:
    """Return the name of the first error: findings are in order, the most basic first."""
    return next((name for name, finding in findings.items() if finding.severity == "error"), None)


def following(findings: Mapping[str, Finding], first: str | None) -> dict[str, Finding]:
    """Return `findings`; all after the `first` error get the remedy to mend it, since their own would mislead.

    If the first error is not in `findings`, it comes before all of them.
    """
    if first is None:
        return dict(findings)
    names = list(findings)
    later = names[names.index(first) + 1 :] if first in names else names
    referring = {name: findings[name] for name in later if findings[name].severity != "ok"}
    remedy = f"to mend {first} first: this may follow from it"
    return {**findings, **{name: evolve(finding, remedy=remedy) for name, finding in referring.items()}}


def check_inputs(
    inputs: Inputs, standardised: bool = False, sigma_data: float | None = None, bad_samples: Sequence[str] = ()
) -> Finding:
    """Judge the range and distribution of the images, which the process and the sampler expect in [-1, 1].

    `standardised`: the objective has a data_mean or data_std, so any range is right. `sigma_data`: the option of EDM,
    if the objective has it. `bad_samples`: names of the samples that are not finite, if known.
    """
    low, high, num, mean, std = inputs.low, inputs.high, inputs.num, abs(inputs.scaled_mean), inputs.scaled_std
    raw, largest = not standardised, max(inputs.std, abs(inputs.mean))
    as_bytes = raw and low >= 0 and BYTES_OVER < high <= BYTES_UP_TO
    as_shares = raw and -ROUNDING <= low < UNIT_LOW and UNIT_HIGH < high <= 1 + ROUNDING
    outside = raw and (low < -1 - ROUNDING or high > 1 + ROUNDING)
    off = standardised and (mean > OFF_MEAN or not 1 / OFF_STD < std < OFF_STD)
    off_sigma = sigma_data and not 1 / SIGMA_DATA < std / sigma_data < SIGMA_DATA
    scaled = f"after data_mean and data_std the mean is {inputs.scaled_mean:.2g}, the std {std:.2g}"
    measured = f"data_mean = {inputs.mean:.2g} and data_std = {inputs.std:.2g}"
    one_channel = f"channel {listed(inputs.channels, 4)} is constant in a whole batch"
    return judge(
        str(inputs),
        (inputs.nonfinite, not_finite("inputs", inputs.nonfinite, LOOK, bad_samples)),
        error_if(inputs.constant == 1, "every image is constant", LOOK),
        error_if(as_bytes, "inputs in [0, 255], not in [-1, 1]", f"image / 127.5 - 1{UINT8}"),
        error_if(as_shares, "inputs in [0, 1], not in [-1, 1]", f"image * 2 - 1{UINT8}"),
        error_if(raw and largest > WILD, "inputs far outside [-1, 1]", SCALE),
        warning_if(outside, "inputs outside [-1, 1]", SCALE),
        warning_if(off, "inputs not standardised", measured, scaled),
        warning_if(num > 1 and inputs.channels, one_channel, LOOK),
        warning_if(num > 1 and inputs.same > SAME, f"{percent(inputs.same)} of a batch are the same image", LOOK),
        warning_if(inputs.constant > CONSTANT, f"{percent(inputs.constant)} of the images are constant", LOOK),
        warning_if(
            std < FAINT or mean > LOPSIDED, "hardly any contrast beside noise of variance 1", f"{LOOK}, or {measured}"
        ),
        warning_if(
            off_sigma,
            f"sigma_data = {sigma_data} is not the std",
            f"prediction = {{ use = 'edm', sigma_data = {std:.2g} }}",
        ),
    )


def check_labels(counts: Sequence[int] | None, unknown: int, conditional: bool) -> Finding:
    """Judge how many samples each class has; `unknown` samples have no class."""
    if not conditional or counts is None:
        return Finding("ok", "the network does not use them")
    absent, total = [label for label, count in enumerate(counts) if not count], sum(counts)
    least, most = min(counts, default=0), max(counts, default=0)
    return judge(
        f"{len(counts):,} classes of {least:,} to {most:,} samples, {unknown:,} without a label",
        error_if(not total, "no sample has a label, and the network uses classes", "labels in the data"),
        warning_if(len(counts) - len(absent) == 1, "all samples are of one class", "to leave out model.num_classes"),
        warning_if(
            absent, f"no sample of class {listed(absent, 5)}", "a source with all classes: others are not learned"
        ),
        warning_if(unknown > total, "most samples have no label", LOOK),
        warning_if(most > UNEVEN_CLASSES * least, "uneven classes", "data.balanced = true, to show each equally often"),
    )


def check_schedule(log_snr: Sequence[float], std: float) -> Finding:
    """Judge a process by its log-SNR, from image to noise; `std` is the deviation of the images."""
    first, last = math.exp(log_snr[0]) * std**2, math.exp(log_snr[-1]) * std**2
    rises = any(after > before for before, after in itertools.pairwise(log_snr))
    left = f"at the end {percent(last / (1 + last))} of the variance is image, and sampling begins with pure noise"
    more = "more timesteps, a larger beta_end or sigma_max, or rescale_betas_zero_snr with prediction = 'v_prediction'"
    return judge(
        f"signal to noise from {first:.2g} to {last:.2g}",
        error_if(rises, "an image gets cleaner on its way to noise", "other options of [diffusion]"),
        error_if(last > AT_END_BROKEN, left, more),
        warning_if(last > AT_END, left, more),
        warning_if(first < AT_START, "the cleanest images have visible noise", "a lower beta_start, or more timesteps"),
    )


def check_times(levels: Sequence[Drawn], std: float) -> Finding:
    """Judge which noise levels a training draws, from clean to noisy; `std` is the deviation of the images.

    Almost pure noise and almost clean images may be left out: there is little to learn.
    """
    never = [level for level in levels if not level.share]
    missed = [level.name for level in never if abs(level.log_snr + 2 * math.log(std)) < BURIED]
    shares = f"of {DRAWS:,} draws, from {levels[0].name} to {levels[-1].name}: "
    shares += " ".join(percent(level.share) for level in levels)
    return judge(
        shares + (f"; never {listed([level.name for level in never], len(never))}" if never else ""),
        warning_if(
            missed,
            f"the training never draws {listed(missed, len(missed))}",
            "diffusion.times = 'uniform', or options that spread the times more",
        ),
    )


def check_loss(trial: Trial) -> Finding:
    """Judge whether the loss is finite, where the learning rate cannot be the cause."""
    bad, losses = trial.first_bad, trial.losses
    nan = f"the loss is not finite at step {bad or 0:,}"
    return judge(
        f"{losses[0]:.3g} at first, {losses[-1]:.3g} at last",
        error_if(bad and trial.inputs.nonfinite, f"{nan}, nor are the inputs", "data without these samples"),
        error_if(bad == 1, f"{nan}, before any update", "other data, another network or another loss"),
    )


def check_learning(trial: Trial, trained: bool = False, resumed: bool = False) -> Finding:
    """Judge whether the loss falls; for a network that is `trained` already, whether the loss stays low.

    `resumed`: the trial goes on from a run. Its schedule may have ended, at a rate of 0.
    """
    losses, rate, bad = trial.losses, max(trial.rates, default=0.0), trial.first_bad
    width = min(8, max(4, len(losses) // 4))
    means = [trial.mean_loss(slice(start, start + width)) for start in range(max(1, len(losses) - width + 1))]
    first, peak, end = trial.mean_loss(slice(4)) if trained else losses[0], max(losses), means[-1]
    # At the start, and at the end, where a warm-up ends: at other times the rate is lower, or the weights are larger.
    change = max(statistics.median(part or [math.nan]) for part in (trial.changes[:8], trial.changes[-8:]))
    numbers = f"loss {first:.3g} to {end:.3g} in {len(losses):,} steps, with a peak of {peak:.3g} at step "
    numbers += f"{losses.index(peak) + 1:,}; learning rate {rate:.3g}; an update changes weights by {percent(change)}"
    # The losses of a trained network differ from batch to batch by more than it still learns.
    back = not trained and end > BACK * first and (peak > PEAK * first or change > LARGE_CHANGE)
    wild = not trained and end > STILL_HIGH * first and change > WILD_CHANGE
    lost = not trained and end > LOST * min(means) and end > first / 2
    ruined = (peak > RUIN * first and end > first / 2) or (trained and end > RUIN_TRAINED * first)
    flat = not trained and end > FLAT * first
    other = f"a longer trial (--steps) or a {'higher' if change < SMALL_CHANGE else 'lower'} rate; a warm-up is slow"
    too_high = rate_too_high(numbers, rate, "error")
    stopped = evolve(too_high, why=f"loss or gradient not finite at step {bad or len(losses):,}, with lr {rate:.3g}")
    return judge(
        numbers,
        (check_loss(trial).severity == "error", Finding("ok", "not judged, because the loss is not finite")),
        (bad or trial.outcome == "stopped", stopped),
        (len(losses) < FEWEST, Finding("ok", f"{len(losses)} steps are too few to judge it")),
        error_if(not resumed and rate == 0 and change == 0, "the learning rate is 0", "optimizer.lr = 0.001", numbers),
        (rate == 0 and change == 0, Finding("ok", "not judged, because the schedule has ended at a rate of 0")),
        (back or wild or lost or ruined, too_high),
        (peak > RUIN * first or change > LARGE_CHANGE, rate_too_high(numbers, rate)),
        (flat and trial.is_warming_up, Finding("ok", f"the learning rate is still warming up; {numbers}")),
        warning_if(flat, "the loss does not fall", other),
    )


def check_gradients(
    layers: Mapping[str, Layer], silent: Collection[str] = (), outputs: Outputs | None = None
) -> Finding:
    """Judge the gradients of all layers; those of `silent` layers were exactly zero for several steps.

    While the `outputs` are close to zero, only the last layer has notable gradients, so their sizes are not compared.
    """
    dead = [layer for layer in layers if layer in silent]
    unused = [layer for layer, gradient in layers.items() if gradient.norm is None]
    sizes = {layer: gradient.rms for layer, gradient in layers.items() if gradient.norm}
    top = max(sizes, key=sizes.__getitem__, default="")
    over = sizes[top] / statistics.median(sizes.values()) if sizes else 0.0
    uneven = over > UNEVEN_GRADIENTS and (outputs is None or outputs.std > YOUNG)
    missing = f"the loss does not depend on {len(unused)} of {len(layers)} layers: {listed(unused, 3)}"
    return judge(
        f"in {len(sizes)} of {len(layers)} layers",
        (dead, dead_layers(f"{len(dead)} of {len(layers)}: {listed(dead, 3)}", "error")),
        warning_if(unused, missing, "a call without detach(), or to freeze (requires_grad_(False)) or remove them"),
        warning_if(uneven, f"the gradients of {top} are {over:.0e} times the usual ones", "a normalisation before it"),
    )


def check_outputs(outputs: Outputs | None, settled: bool = True, is_first: bool = False) -> Finding:
    """Judge the output; once the network is `settled`, a constant output is an error. `is_first`: before any update."""
    if outputs is None:
        return Finding("ok", "not known: the objective calls the network in an unusual way")
    constant, size = outputs.std == 0 or outputs.largest == 0, max(outputs.std, abs(outputs.mean))
    explodes, remedy = "the output explodes", "a lower learning rate, or the plugin clip"
    if is_first:
        remedy = "other initial weights, a normalisation in each layer, or a last layer of zeros"
    return judge(
        f"{outputs}, where about 1 is expected" if size > LARGE else str(outputs),
        (outputs.nonfinite, not_finite("output", outputs.nonfinite, remedy)),
        error_if(settled and constant, "the output is constant", "a last layer that is called and does not stay zero"),
        error_if(outputs.std > HUGE or (is_first and size > LARGE), explodes, remedy),
        warning_if(size > LARGE, explodes, remedy),
    )


def check_response(outputs: Outputs | None, settled: bool = True) -> Finding:
    """Judge whether the output changes with image, time and label, once the network is `settled`."""
    if outputs is None or not settled:
        return Finding("ok", "not known yet")
    changes = {"image": outputs.by_image, "time": outputs.by_time, "label": outputs.by_label}
    ignored = [name for name, change in changes.items() if change <= IGNORED]
    names = " and the ".join(ignored)
    shares = [f"{percent(change)} with the {name}" for name, change in changes.items() if not math.isnan(change)]
    return judge(
        f"changes by {', '.join(shares) or 'an unknown share'}",
        error_if("image" in ignored, "the output is the same for every image", "a forward that uses its input"),
        warning_if(ignored, f"the output does not change with the {names}", f"a forward that uses the {names}"),
    )


def check_levels(levels: Sequence[Level], times: Sequence[Drawn], trained: bool) -> Finding:
    """Judge the errors at `levels`, from clean to noisy, beside predictions by only mean and variance of the images.

    At a level that is never drawn in training, any finite error is accepted.
    """
    drawn = {time.name for time in times if time.share}
    ratios = [level.error / level.mean_error if level.mean_error else math.nan for level in levels]
    most = {level.name: OVER_FLOOR * level.floor + FLOOR_SLACK * level.mean_error for level in levels}
    worse = [level.name for level in levels if level.error > most[level.name] and level.name in drawn]
    new = min(ratios) > UNLEARNED
    shown = "clean to noisy, relative to predicting the mean: " + " ".join(f"{ratio:.2f}" for ratio in ratios)
    return judge(
        shown + ("; the trial is too short to judge them" if new and not trained else ""),
        error_if(not all(map(math.isfinite, ratios)), "errors not finite", "another schedule; see the output, too"),
        error_if(
            trained and new, "the network predicts no better than the mean", "another learning rate; see the output"
        ),
        (trained and worse, little_learned(", ".join(worse), f"mean and variance alone predict better; {shown}")),
    )


def check_samples(images: Tensor, data: Inputs, trained: bool) -> Finding:
    """Judge samples, `images` n c h w, by range and deviation beside the data, NaN, and equal images."""
    sampled = measure_inputs(images)
    spare = (data.high - data.low) / 4
    outside = float(((images < data.low - spare) | (images > data.high + spare)).float().mean())
    far = f"{percent(outside)} of the values of samples are far outside those of the data"
    unlike = "constant" if sampled.std < BLANK else "all the same image" if sampled.same == 1 else ""
    longer = "a longer training, or other options of [sampling]"
    return judge(
        f"{sampled}; the data has {data}" + ("" if trained else "; the trial is too short to judge them"),
        (sampled.nonfinite, not_finite("samples", sampled.nonfinite, "a look at the output of the network")),
        error_if(trained and unlike, f"samples are {unlike}", longer),
        warning_if(unlike, f"samples are {unlike}", longer),
        warning_if(trained and outside > OUTSIDE, far, f"sampling.clipping = 'clamp', {longer}"),
        warning_if(
            trained and not data.std / UNLIKE < sampled.std < data.std * UNLIKE, "samples differ in contrast", longer
        ),
    )


def check_average(name: str, average: Sequence[Level], plain: Sequence[Level], trained: bool) -> Finding:
    """Judge the averaged weights called `name` beside the model's own, by their errors."""
    averaged, unaveraged = (statistics.fmean(level.error for level in levels) for levels in (average, plain))
    over = averaged / (unaveraged or math.nan)
    slow = "a lower decay, a warm-up of the decay, or a longer training"
    return judge(
        f"{name} has {over:.2f} times the error of the model's own weights",
        warning_if(trained and over == 1, f"{name} has exactly the errors of the model's own weights: is it updated?"),
        warning_if(trained and not over <= LAGGING, f"{name} lags behind the model's own weights", slow),
    )


def check_length(parameters: int, images: int, values: int, batch_size: int, steps: float) -> Finding:
    """Judge size of the network and length of the training; `values` are the numbers in an image."""
    epochs = steps * batch_size / images
    by_heart = epochs > MANY_EPOCHS and parameters > images * values
    return judge(
        f"{steps:,.0f} steps of {batch_size:,} are {epochs:.3g} epochs of {images:,} images; "
        f"{parameters:,} parameters, {parameters / images:.3g} an image",
        warning_if(batch_size < SMALL_BATCH, "small batch", "a larger batch_size: gradients are noisy"),
        warning_if(batch_size > LARGE_BATCH * images, "batch above a quarter of the data", "a smaller batch_size"),
        warning_if(steps * batch_size < FEW_IMAGES, "short training", "some 50,000 images or more, over all steps"),
        warning_if(by_heart, "the network can learn the images by heart", "more data, flips, dropout, or fewer steps"),
    )


def check_trial(trial: Trial) -> Finding:
    """Return how many updates the trial made, and why they are more or fewer than the requested number."""
    made, asked, tried = len(trial.rates), trial.asked, len(trial.losses)
    if made > asked:
        more = f"{made - asked} more through the warm-up, in growing strides, and at the rate after it"
        return Finding("ok", f"{made} updates: {asked}, and {more}")
    why = f"{tried - made} of {tried} steps made none" if tried > made else "the time limit is half a minute"
    why = "a step that is not finite stopped it" if trial.outcome == "stopped" else why
    return Finding("ok", f"{made} updates" if made == asked else f"{made} of {asked} updates: {why}")


def check_time(parts: Mapping[str, float], per_step: float) -> Finding:
    """Judge the seconds of the `parts` of a step."""
    total = sum(parts.values()) or math.nan
    shares = {part: parts[part] / total for part in sorted(parts, key=parts.__getitem__, reverse=True)}
    heavy = [part for part, share in shares.items() if part not in CORE and share > HEAVY]
    listing = ", ".join(f"{part} {percent(share)}" for part, share in shares.items() if share > SHOWN)
    waits = shares.get("data", 0.0) > WAITING
    return judge(
        f"{per_step * 1e3:.3g} ms a step: {listing}",
        warning_if(waits, "the network waits for data", "data.workers, a smaller memory, or store"),
        warning_if(heavy, f"{listed(heavy, 1)} takes more than a fifth of a step"),
    )


def check_memory(peak: float, available: float | None) -> Finding:
    """Compare the peak memory of a step with the `available` memory, both in bytes, if the device has its own."""
    numbers, limit = f"{byte_size(peak)} at the peak of a step", available or math.inf
    numbers += f", of {byte_size(limit)}" if available else ""
    return judge(numbers, (peak > FULL * limit, memory_short(peak, limit)))
