"""The faults that `planted_faults.py` plants, chosen from the code and the pages by someone who read no test."""

from attrs import frozen


@frozen
class Fault:
    """A change of the text `old`, which stands once in the file, to `new`."""

    name: str
    file: str
    old: str
    new: str
    test: str = ""  # tried first: where all tests of the module take longer than the time


FAULTS = (
    Fault(
        "machine: ranks agree only if all say so",
        "hookdiff/machine/ranks.py",
        "any(gathered(flag))",
        "all(gathered(flag))",
    ),
    Fault(
        "machine: an expanded buffer that is loaded leaves the tensor that it shows",
        "hookdiff/machine/overlap.py",
        "if torch.equal(filled[places], wanted):",
        "if False:",
    ),
    Fault(
        "machine: dropout is the same on all ranks",
        "hookdiff/machine/randomness.py",
        "derive_seed(self.seed, stream, position, self.rank, part)",
        "derive_seed(self.seed, stream, position, 0, part)",
    ),
    Fault("disk: a written file is not synced", "hookdiff/disk/files.py", "os.fsync(file.fileno())", "file.flush()"),
    Fault(
        "disk: keys are escaped in the wrong order",
        "hookdiff/disk/tree.py",
        'key.replace("~", "~0").replace("/", "~1")',
        'key.replace("/", "~1").replace("~", "~0")',
    ),
    Fault(
        "options: the clock of an interval never starts over",
        "hookdiff/options/every.py",
        "        self._since = time.monotonic()\n        return True",
        "        return True",
    ),
    Fault(
        "options: true passes for a number",
        "hookdiff/options/structure.py",
        "if not fits or (isinstance(value, bool) and kind is not bool):",
        "if not fits:",
    ),
    Fault(
        "terminal: the time left is that of the whole work",
        "hookdiff/terminal/pace.py",
        "/ (self.done - done) * (self.total - self.done)",
        "/ (self.done - done) * self.total",
    ),
    Fault(
        "terminal: the bars to be kept are removed",
        "hookdiff/terminal/bars.py",
        "transient=not is_kept",
        "transient=is_kept",
    ),
    Fault(
        "log: a finding never comes back after a quiet time",
        "hookdiff/log/findings.py",
        "step - last > quiet",
        "last - step > quiet",
    ),
    Fault(
        "log: a mean forgets the counts before a checkpoint",
        "hookdiff/log/log.py",
        "= total, count + len(values)",
        "= total, len(values)",
    ),
    Fault(
        "data: each epoch has the same order",
        "hookdiff/data/feed.py",
        'derive_seed(self.seed, "data", epoch)',
        'derive_seed(self.seed, "data")',
    ),
    Fault(
        "data: all ranks take the draws of the first",
        "hookdiff/data/feed.py",
        "range(rank, total, num_ranks)",
        "range(0, total, num_ranks)",
    ),
    Fault(
        "loss: a saved state sums what waits",
        "plugins/hookdiff_loss/levels.py",
        "        rank_columns = [torch.cat(column).cpu()",
        "        self._sum()\n        rank_columns = [torch.cat(column).cpu()",
    ),
    Fault(
        "data: a batch that replaces a filler counts",
        "hookdiff/data/batch.py",
        "is_filler=other.is_filler, replaced=other",
        "is_filler=self.is_filler, replaced=other",
    ),
    Fault(
        "data: a resumed run does not see that captions have changed",
        "hookdiff/data/marks.py",
        "if self.members != before.members:",
        "if self.files != before.files:",
    ),
    Fault("images: a random crop never reaches the last place", "hookdiff/images/augment.py", "(slack + 1)", "slack"),
    Fault(
        "images: classes have the order of their first images",
        "hookdiff/images/labels.py",
        "tuple(sorted(set(names)))",
        "tuple(dict.fromkeys(names))",
    ),
    Fault(
        "models: frozen modules train after an evaluation",
        "hookdiff/models/weights.py",
        "        for module in training:\n            module.training = True",
        "        model.train()",
    ),
    Fault(
        "models: each batch of samples begins with the first class",
        "hookdiff/models/sample_request.py",
        "tuple(k % num_classes for k in range(self.start, self.start + self.num))",
        "tuple(k % num_classes for k in range(self.num))",
    ),
    Fault(
        "diffusion: the second order of the solver counts twice",
        "hookdiff/diffusion/solvers.py",
        "(h / (2 * h_previous))",
        "(h / h_previous)",
    ),
    Fault(
        "diffusion: times are drawn at much noise by default",
        "hookdiff/diffusion/times.py",
        "default=-0.5,",
        "default=0.5,",
    ),
    Fault(
        "loop: scaled gradients keep their total norm",
        "hookdiff/loop/gradients.py",
        "Pass(last.loss, last.norm * factor)",
        "Pass(last.loss, last.norm)",
    ),
    Fault(
        "loop: a refused step keeps its buffers",
        "hookdiff/loop/loop.py",
        "            self.buffers.put_back()",
        "            pass",
    ),
    Fault(
        "run_dir: a rollback removes the pictures of its checkpoint",
        "hookdiff/run_dir/pictures_png.py",
        "if step > after and",
        "if step >= after and",
    ),
    Fault(
        "run_dir: a killed run counts as stopped",
        "hookdiff/run_dir/history.py",
        'reason in ("error", None)',
        'reason in ("error",)',
    ),
    Fault(
        "authors: a periodic plugin acts twice at the end",
        "hookdiff/authors/periodic.py",
        'if reason == "done" and self._acted_at != loop.progress.step:',
        'if reason == "done":',
    ),
    Fault(
        "authors: rows of later parts are their own neighbours",
        "hookdiff/features/neighbours.py",
        "torch.arange(place.start, place.stop)",
        "torch.arange(len(part))",
    ),
    Fault(
        "builtin: a fixed switch may be flipped, and its value not changed",
        "hookdiff/builtin/config_changes.py",
        "if bool(old) != bool(new)",
        "if bool(old) == bool(new)",
    ),
    Fault(
        "builtin: the outcome of an earlier process stays",
        "hookdiff/builtin/directory.py",
        "            discard(path / OUTCOME)",
        "            pass",
    ),
    Fault(
        "experiment: embeddings decay",
        "hookdiff/experiment/optimizers.py",
        'weight.role in ("embedding", "norm", "vector")',
        'weight.role in ("norm", "vector")',
    ),
    Fault(
        "experiment: a link inside of a folder leads out of the run directory",
        "hookdiff/experiment/trust.py",
        "return not any(leads_out(each, run_dir) for each in inner)",
        "return True",
    ),
    Fault(
        "cli: SIGTERM has the exit code of SIGINT",
        "hookdiff/cli/run.py",
        'return 128 + signals.caught if signals.caught and reason == "signal" else EXIT_CODES[reason]',
        "return EXIT_CODES[reason]",
    ),
    Fault(
        "cli: the summary shows the first values of a metric",
        "hookdiff/cli/summary.py",
        "values[-most:]",
        "values[:most]",
    ),
    Fault("ema: a decay has no warm-up", "plugins/hookdiff_ema/average.py", "min(decay, warmup.highest(n))", "decay"),
    Fault(
        "clip: a spike raises the threshold that follows",
        "plugins/hookdiff_clip/rules.py",
        "self.follow(min(norm, threshold))",
        "self.follow(norm)",
    ),
    Fault(
        "checkpoint: the target of a rollback is removed",
        "plugins/hookdiff_checkpoint/keep.py",
        "at < last or info is scheduled or",
        "at < last or",
        "tests/plugins/test_checkpoint_finite.py::test_a_run_that_was_stopped_before_a_rollback_equals_an_unbroken_one[1-5]",
    ),
    Fault(
        "lr: the rate jumps at the end of the warm-up",
        "plugins/hookdiff_lr/schedules.py",
        "(step - warmup) / max(1, total - warmup)",
        "step / max(1, total)",
    ),
    Fault(
        "samples: the transparent part of a mask is painted",
        "plugins/hookdiff_samples/pictures.py",
        'shape[-1], "black")',
        'shape[-1], "white")',
        "tests/plugins/test_sample_command.py::test_a_mask_lies_on_its_picture_whatever_its_format",
    ),
    Fault(
        "lr: a fall by chance is a fall",
        "plugins/hookdiff_lr/find.py",
        "falls = rises = None\n",
        "falls, rises = 0, None\n",
    ),
    Fault(
        "encoding: captions of the same tokens pass for different ones",
        "hookdiff/encoding/tokens.py",
        "if plain[row] != plain[other]",
        "if plain[row] == plain[other]",
    ),
    Fault(
        "images: UTF-16 without a mark passes for a caption",
        "hookdiff/images/texts.py",
        'if "\\0" in text or 4 *',
        "if 4 *",
    ),
    Fault(
        "fid: pictures are not read as the data of the run",
        "plugins/hookdiff_fid/sets.py",
        "open_set(path, making, transforms=transforms)",
        "open_set(path, making)",
    ),
    Fault(
        "fid: the kernel distance counts a sample with itself",
        "plugins/hookdiff_fid/kid.py",
        "(in_a - own_a) / (n - 1)",
        "in_a / n",
    ),
    Fault(
        "amp: gradients of the modules of plugins stay scaled",
        "plugins/hookdiff_amp/__init__.py",
        "for optimizer in loop.all_optimizers:\n            self.scaler.unscale_",
        "for optimizer in loop.optimizers:\n            self.scaler.unscale_",
    ),
    Fault(
        "nan: the outermost module is blamed for a gradient",
        "plugins/hookdiff_nan/watch.py",
        "self._makers.setdefault(key, place)",
        "self._makers[key] = place",
    ),
    Fault(
        "logged: any end of a run logs the open means",
        "hookdiff/builtin/logged.py",
        'loop.end.reason == "done" and ',
        "",
    ),
    Fault(
        "loss: any rise of the held-out loss is overfitting",
        "plugins/hookdiff_loss/held_out.py",
        "worse = held_out > RISE * self._best and trained_on < self._trained",
        "worse = held_out > RISE * self._best",
    ),
    Fault(
        "stop_early: a value that is a little worse is an improvement",
        "plugins/hookdiff_stop_early/__init__.py",
        "if value < self._best - self.min_delta:",
        "if value < self._best + self.min_delta:",
    ),
    Fault(
        "muon: gradient and momentum are swapped in Nesterov's mix",
        "plugins/hookdiff_muon/optimizer.py",
        'torch._foreach_lerp(gradients, momenta, group["momentum"])',
        'torch._foreach_lerp(momenta, gradients, group["momentum"])',
    ),
    Fault(
        "encoding: float16 may change values by their whole deviation",
        "hookdiff/encoding/soundness.py",
        "_CHANGE = 0.1 ",
        "_CHANGE = 1.0 ",
    ),
    Fault(
        "autoencoder: a scale that config.json leaves out is one",
        "plugins/hookdiff_autoencoder/__init__.py",
        "config.get(key, known[key].default) for key",
        "config.get(key, 1.0 if key == 'scaling_factor' else None) for key",
        "tests/plugins/test_autoencoder.py::test_the_scale_of_a_model_is_that_of_pipelines",
    ),
    Fault(
        "data: a resumed epoch begins with a sample that was trained on already",
        "hookdiff/data/feed.py",
        "torch.split(self.order(epoch)[start:], self.batch_size)",
        "torch.split(self.order(epoch)[max(0, start - 1) :], self.batch_size)",
    ),
    Fault(
        "ema: a step that is skipped moves the averages",
        "plugins/hookdiff_ema/plugin.py",
        "    def _settle(self) -> None:\n",
        "    @hookimpl\n    def on_nan(self, loop: Loop) -> None:\n        self.after_optimizer_step(loop)\n\n"
        "    def _settle(self) -> None:\n",
    ),
    Fault(
        "loop: gradients are clipped before they are unscaled",
        "hookdiff/loop/loop.py",
        "        if refused := self._refused(batch):\n"
        "            return self._consume(total, refused, self.gradients.loss, self.gradients.total_norm)\n"
        "        loss, norm = self.gradients.loss, self.gradients.total_norm  # before any clipping\n"
        "        self.hook.after_backward(loop=self)\n",
        "        self.hook.after_backward(loop=self)\n"
        "        if refused := self._refused(batch):\n"
        "            return self._consume(total, refused, self.gradients.loss, self.gradients.total_norm)\n"
        "        loss, norm = self.gradients.loss, self.gradients.total_norm  # before any clipping\n",
    ),
    Fault(
        "encoding: the measured scale of latents is squared",
        "hookdiff/encoding/latent_reader.py",
        "(squares / count - center.square()).sqrt().tolist()",
        "(squares / count - center.square()).tolist()",
    ),
    Fault(
        "text: the encoder attends to the padding of captions",
        "plugins/hookdiff_text/__init__.py",
        "attention_mask=mask if self.is_masked else None",
        "attention_mask=None",
    ),
    Fault(
        "data: a rank takes draws side by side, not those of its samples",
        "hookdiff/data/batch.py",
        "drawn[self.rows.start : self.rows.stop : self.rows.step]",
        "drawn[self.rows.start : self.rows.start + len(self.rows)]",
    ),
    Fault(
        "checkpoint: the SHA-256 of a file is not compared",
        "plugins/hookdiff_checkpoint/folder.py",
        "    if digest != sha256:\n",
        "    if not sha256:\n",
    ),
    Fault(
        "experiment: a source opens the URL of a download without --trust",
        "hookdiff/experiment/part.py",
        "with only_files(), no_connections(TRUST) if self.is_strangers else nullcontext():",
        "with only_files():",
    ),
    Fault(
        "loss: the last, smaller held-out batch counts as much as a whole one",
        "plugins/hookdiff_loss/held_out.py",
        "torch.stack((loss * len(part), torch.full_like(loss, len(part))))",
        "torch.stack((loss, torch.ones_like(loss)))",
    ),
    Fault(
        "diffusion: labels are dropped twice, alone and with all conditions",
        "hookdiff/diffusion/diffusion.py",
        "isinstance(self.label_dropout, dict) else {_ALL: self.label_dropout}",
        "isinstance(self.label_dropout, dict) else dict.fromkeys((_ALL, _LABELS), self.label_dropout)",
    ),
    Fault(
        "aim: a run that is resumed elsewhere goes on in the Aim run of the old one",
        "plugins/hookdiff_aim/__init__.py",
        "None if run.is_branch else self._hash",
        "self._hash",
    ),
    Fault(
        "array: values are rounded down to grey levels",
        "plugins/hookdiff_array/__init__.py",
        "numpy.rint((values - low) * (255 / (high - low))).astype(numpy.uint8)",
        "((values - low) * (255 / (high - low))).astype(numpy.uint8)",
    ),
    Fault(
        "autoguidance: samples are guided by the scale, not by what it has above 1",
        "plugins/hookdiff_autoguidance/__init__.py",
        "output + (self.scale - 1) * (output - ask",
        "output + self.scale * (output - ask",
    ),
    Fault(
        "compile: the backend eager is unknown",
        "plugins/hookdiff_compile/__init__.py",
        "torch._dynamo.list_backends(())",
        "torch._dynamo.list_backends()",
    ),
    Fault(
        "cuda_graphs: several ranks are refused even on CPUs",
        "plugins/hookdiff_cuda_graphs/plugin.py",
        "        if self._recorder is None:\n",
        "        if self._recorder is None and loop.num_ranks == 1:\n",
    ),
    Fault(
        "data: a caption that just fits counts as truncated",
        "plugins/hookdiff_data/captions.py",
        "limit is not None and length > limit",
        "limit is not None and length >= limit",
    ),
    Fault(
        "ddp: the gradients of a thawed parameter are not exchanged",
        "plugins/hookdiff_ddp/__init__.py",
        "if self._wanted() != self._trained:",
        "if sum(self._wanted()) < sum(self._trained):",
    ),
    Fault(
        "debug: the first bad step of a trial is counted from 0",
        "plugins/hookdiff_debug/trial.py",
        "enumerate(self.losses, 1)",
        "enumerate(self.losses)",
    ),
    Fault(
        "diversity: training images are their own neighbours",
        "plugins/hookdiff_diversity/copies.py",
        "nearest_neighbours(training[:_USUAL], training, _NEIGHBOURS + 1, within=True)",
        "nearest_neighbours(training[:_USUAL], training, _NEIGHBOURS + 1)",
    ),
    Fault(
        "features: DINOv2's positions are resampled by exactly 16 / 37",
        "plugins/hookdiff_features/dinov2.py",
        "factor = (_GRID + 0.1) / _TRAINED_GRID",
        "factor = _GRID / _TRAINED_GRID",
    ),
    Fault(
        "fsdp: a weight that is tied over two blocks is accepted",
        "plugins/hookdiff_fsdp/blocks.py",
        "        if len(names) > 1:\n",
        "        if len(names) > 2:\n",
    ),
    Fault(
        "gradients: a full history begins at a wrong step",
        "plugins/hookdiff_gradients/plugin.py",
        "self._ring.roll(-(self._count % self.window), 0)",
        "self._ring.roll(self._count % self.window, 0)",
    ),
    Fault(
        "huggingface: an image without a label gets the first class",
        "plugins/hookdiff_huggingface/source.py",
        "[-1 if label is None else label for label in values]",
        "[label or 0 for label in values]",
    ),
    Fault(
        "init: minutes are taken for seconds",
        "plugins/hookdiff_init/cli.py",
        "60 * minutes if minutes else None",
        "minutes or None",
    ),
    Fault(
        "memory: the peak lacks the states of plugins",
        "plugins/hookdiff_memory/estimate.py",
        "(optimizer or 0) + sum(plugins.values()) + now.most",
        "(optimizer or 0) + now.most",
    ),
    Fault(
        "mirror: the options of --set are ignored",
        "plugins/hookdiff_mirror/cli.py",
        "make_plugin(name, history.config, settings, run_dir=history.run_dir)",
        "make_plugin(name, history.config, run_dir=history.run_dir)",
    ),
    Fault(
        "networks: no class is the first class",
        "plugins/hookdiff_networks/layers.py",
        "torch.where(labels < 0, self.num_embeddings - 1, labels)",
        "labels.clamp(min=0)",
    ),
    Fault(
        "new_plugin: a class may have the name of a class that the package imports",
        "plugins/hookdiff_new_plugin/names.py",
        "if class_of(name) in classes:",
        "if name in classes:",
    ),
    Fault(
        "profile: the speed with another batch size counts steps, not images",
        "plugins/hookdiff_profile/trials.py",
        "ratios.append(size * seconds / ",
        "ratios.append(seconds / ",
    ),
    Fault(
        "progress: the time left is that of the later limit",
        "plugins/hookdiff_progress/plugin.py",
        "duration(min(left))",
        "duration(max(left))",
    ),
    Fault(
        "report: the time left takes steps for images",
        "plugins/hookdiff_report/run_summary.py",
        "left * pace.size / pace.mean",
        "left / pace.mean",
    ),
    Fault(
        "runs: runs without a loss are sorted among the others",
        "plugins/hookdiff_runs/table.py",
        "missing = value is None or (is_number and math.isnan(value))",
        "missing = value is None",
    ),
    Fault(
        "selftest: a NaN is within the tolerance",
        "plugins/hookdiff_selftest/gaussian.py",
        "return abs(self.measured - self.exact) <= TOLERANCE * scale",
        "return not abs(self.measured - self.exact) > TOLERANCE * scale",
    ),
    Fault(
        "shards: the last shard of a range is left out",
        "plugins/hookdiff_shards/places.py",
        "range(low, min(high, low + _MOST) + 1)",
        "range(low, min(high, low + _MOST))",
    ),
    Fault(
        "spectral: the output layer is normalised, too",
        "plugins/hookdiff_spectral/plugin.py",
        "if name != output and name not in at_zero",
        "if name not in at_zero",
    ),
    Fault(
        "tensorboard: the bins of histograms are shifted by one",
        "plugins/hookdiff_tensorboard/__init__.py",
        "bucket_limit=distribution.edges[1:]",
        "bucket_limit=distribution.edges[:-1]",
    ),
    Fault(
        "wandb: a finding for an earlier step goes back in steps, so W&B drops it",
        "plugins/hookdiff_wandb/__init__.py",
        "self._step = max(step, self._step)",
        "self._step = step",
    ),
    Fault(
        "watch: curves are upside down",
        "plugins/hookdiff_watch/canvas.py",
        "numpy.rint((1 - rows) * (down - 1))",
        "numpy.rint(rows * (down - 1))",
    ),
    Fault(
        "testing: a NaN equals any number",
        "hookdiff/testing/compare.py",
        "((here != here) & (there != there))",
        "((here != here) | (there != there))",
    ),
    Fault(
        "authors: a tracker lacks the values of the step at which a run resumes",
        "hookdiff/authors/mirroring.py",
        "if step <= run.step]",
        "if step < run.step]",
    ),
    Fault(
        "features: the means of two parts count alike, whatever their sizes",
        "hookdiff/features/moments.py",
        "self._mean + shift * (num / together)",
        "self._mean + shift / 2",
    ),
    Fault(
        "models: model.init draws weights for layers that start at zero",
        "hookdiff/models/init.py",
        "if isinstance(layer, LAYERS) and is_zero(layer.weight) is False:",
        "if isinstance(layer, LAYERS):",
    ),
    Fault(
        "diffusion: the kept part of a picture has the noise of the step before",
        "hookdiff/diffusion/sampling.py",
        "chain.noised(next_point.alpha * x0, next_point.sigma)",
        "chain.noised(point.alpha * x0, point.sigma)",
    ),
    Fault(
        "loop: all micro-batches of a step have the same dropout",
        "hookdiff/loop/loop.py",
        "self.random.seed_dropout(self.progress.position, index, self.device, stream)",
        "self.random.seed_dropout(self.progress.position, 0, self.device, stream)",
    ),
    Fault(
        "run_dir: lines with a rare name are left out of a long file like others",
        "hookdiff/run_dir/thinned.py",
        "min(map(counts.__getitem__, names))",
        "max(map(counts.__getitem__, names))",
    ),
    Fault("options: a minute is a second", "hookdiff/options/every.py", '"min": 60', '"min": 1'),
    Fault(
        "cli: --steps of resume leaves the epochs of the config as a limit",
        "hookdiff/cli/arguments.py",
        "(f\"run.steps={steps or 'none'}\", f\"run.epochs={epochs or 'none'}\")",
        '(f"run.steps={steps}" if steps else f"run.epochs={epochs}",)',
    ),
    Fault(
        "disk: two processes may hold the lock of a run directory",
        "hookdiff/disk/lock.py",
        "fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not flock",
        "fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # not flock",
    ),
)
