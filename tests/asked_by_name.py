"""The attributes that hookdiff and the plugins read by name, and the values without a type, by their foreign owner.

Each file has its expressions, as `ast.unparse` writes them.
"""

ASKED: dict[str, dict[str, set[str]]] = {
    "a DataLoader of torch": {"hookdiff/images/loader.py": {"getattr(self.loader, '_iterator', None)"}},
    "a class, a function or a module of others": {
        "hookdiff/experiment/part_requirements.py": {"getattr(target, '__module__', '')"},
        "hookdiff/models/adapters.py": {"getattr(kind, '__module__', '')"},
        "hookdiff/options/imports.py": {"getattr(outer, part)"},
        "hookdiff/options/structure.py": {"getattr(base, '__module__', '')", "getattr(hint, '__metadata__', ())"},
        "hookdiff/options/fitted.py": {"getattr(target, _FIT, lambda _: Fitted(target))", "hasattr(target, _FIT)"},
        "hookdiff/testing/contract.py": {"vars(base)"},
    },
    "a data set of torchvision": {
        "hookdiff/data/vision.py": {"getattr(data, 'classes', None)", "getattr(self.data, name, ())"}
    },
    "a hook, a method or a type by its name in a table": {
        "hookdiff/cli/hooks.py": {"getattr(Hooks, hook)", "getattr(Hooks, name)"},
        "hookdiff/loop/contract_checks.py": {"getattr(Hooks, hook)"},
        "hookdiff/loop/hookspecs.py": {"getattr(kind, 'hookdiff_plugin', Declaration())"},
        "hookdiff/loop/registry.py": {
            "attrgetter(hook.result)",
            "getattr(self._calls, hook)",
            "getattr(self._manager.hook, hook)",
            "vars(builtins)",
            "vars(defaults)",
        },
        "hookdiff/testing/sink_checks.py": {"getattr(Sink, call)", "getattr(type(self.make(self.new_folder())), call)"},
        "plugins/hookdiff_new_plugin/kinds.py": {"vars(builtins)"},
    },
    "a logged value: a number, or an array of any library": {
        "hookdiff/log/log.py": {"getattr(value, 'shape', ())", "hasattr(value, 'dtype')", "hasattr(value, 'shape')"}
    },
    "a method or a class of any plugin": {
        "hookdiff/loop/contract_checks.py": {"getattr(member, 'hookdiff_impl', None)"},
        "hookdiff/loop/dispatch.py": {
            "getattr(call.method, '__self__', None)",
            "getattr(method, '__code__', None)",
            "hasattr(kind, '__slots__')",
            "hasattr(kind, match[2])",
        },
        "hookdiff/testing/transfers.py": {"getattr(func, '__name__', '')"},
    },
    "a module or a stream of Python": {
        "hookdiff/cli/output.py": {"getattr(sys, name)"},
        "hookdiff/experiment/catalog.py": {"getattr(sys.modules.get(package), part.__name__, None)"},
        "hookdiff/options/software.py": {"getattr(sys.modules.get(module), '__file__', None)"},
        "hookdiff/options/structure.py": {"getattr(sys.modules.get(getattr(base, '__module__', '')), '__dict__', {})"},
    },
    "a name in another library": {
        "hookdiff/terminal/bars.py": {"hasattr(shell, 'kernel')"},
        "plugins/hookdiff_autoencoder/__init__.py": {
            "getattr(diffusers, config['_class_name'])",
            "getattr(diffusers, name)",
        },
        "plugins/hookdiff_checkpoint/to_diffusers.py": {
            "getattr(diffusers, pipeline)",
            "getattr(diffusers, sampling.scheduler)",
        },
        "plugins/hookdiff_pretrained/folder.py": {"getattr(diffusers, name, None)"},
        "plugins/hookdiff_pretrained/scheduler.py": {"getattr(diffusers, kind, None)"},
        "plugins/hookdiff_text/__init__.py": {"getattr(network.config, 'use_attention_mask', False)"},
        "plugins/hookdiff_text/folder.py": {"getattr(tokenizer, 'vocab_file', None)", "getattr(transformers, kind)"},
        "plugins/hookdiff_text/pipeline.py": {"getattr(diffusers, name)"},
    },
    "a name in torch": {
        "hookdiff/disk/tensors.py": {
            "getattr(torch, f'float{bits}')",
            "getattr(torch, f'int{bits}')",
            "getattr(torch, f'uint{bits}')",
        },
        "hookdiff/experiment/optimizers.py": {"vars(torch.optim)"},
        "hookdiff/machine/fitting.py": {"getattr(torch, device.type)"},
        "plugins/hookdiff_checkpoint/pieces.py": {"vars(torch)"},
        "plugins/hookdiff_ema/snapshots.py": {"getattr(torch, snapshot.dtype)"},
    },
    "a network of any library": {
        "hookdiff/experiment/optimizers.py": {"getattr(module, 'parametrizations', {})"},
        "hookdiff/models/adapters.py": {
            "getattr(model, '_forward_pre_hooks', {})",
            "getattr(model, 'num_classes', None)",
            "getattr(theirs, 'config', {})",
            "hasattr(kind, 'enable_gradient_checkpointing')",
            "hasattr(module, 'token_drop')",
        },
        "hookdiff/models/attention_forms.py": {
            "getattr(module, 'norm_q', None)",
            "getattr(module, 'processor', None)",
            "hasattr(module, 'attention_form')",
            "hasattr(module, 'set_processor')",
        },
        "hookdiff/models/base.py": {
            "getattr(model, _FOUND, {})",
            "getattr(module, key, frozenset())",
            "hasattr(model, _FOUND)",
        },
        "hookdiff/models/plain.py": {"getattr(module, name)"},
        "hookdiff/models/compiler.py": {"getattr(net, '_compiled_call_impl', None)"},
        "plugins/hookdiff_autoencoder/__init__.py": {"getattr(network, 'quant_conv', None)"},
        "plugins/hookdiff_debug/measure.py": {
            "def __getattr__",
            "getattr(module, '_compiled_call_impl', None)",
            "getattr(self.model, name)",
        },
    },
    "a network of the user, at its adapter": {
        "hookdiff/encoding/encoder.py": {"getattr(network, 'lengths', None)", "getattr(network, 'tokens', None)"}
    },
    "a picture of the user, of Pillow or an array": {
        "hookdiff/images/colour_profiles.py": {"hasattr(image, 'convert')"},
        "hookdiff/images/items.py": {"hasattr(image, 'convert')", "hasattr(image, 'shape')"},
        "hookdiff/images/picture_reading.py": {"hasattr(image, 'fp')"},
        "hookdiff/images/sizes.py": {"getattr(image, 'shape', sides_of(image))", "hasattr(image, 'fp')"},
        "hookdiff/images/survey.py": {"hasattr(image, 'convert')", "hasattr(image, 'shape')"},
        "plugins/hookdiff_data/members.py": {"hasattr(value, 'convert')"},
    },
    "a source of the user, at its adapter": {
        "hookdiff/data/source.py": {
            "getattr(self.origin, 'fingerprint', lambda: None)",
            "getattr(self.origin, 'known_kinds', None)",
            "getattr(self.origin, 'known_sizes', None)",
            "getattr(self.origin, 'texts', None)",
            "getattr(source.origin, self.name, self.default)",
            "hasattr(self.origin, 'describe')",
        }
    },
    "a tensor of torch, sharded or not": {"hookdiff/machine/dtensor.py": {"hasattr(tensor, 'to_local')"}},
    "a validator of attrs, which has no public class": {
        "hookdiff/cli/json_schema.py": {"getattr(validator, 'options', ())"},
        "hookdiff/options/fields.py": {
            "getattr(validator, '_validators', ())",
            "getattr(validator, name, None)",
            "hasattr(validator, 'compare_op')",
        },
        "plugins/hookdiff_fid/cli.py": {"getattr(known and known.validator, 'names', ())"},
    },
    "a value in an item of the user": {
        "hookdiff/images/items.py": {"getattr(value, 'ndim', 0)", "hasattr(value, 'convert')"}
    },
    "all attributes of the object itself": {
        "hookdiff/loop/gradients.py": {"vars(self)"},
        "hookdiff/loop/readonly.py": {"vars(self)"},
        "plugins/hookdiff_array/__init__.py": {"vars(self)"},
        "plugins/hookdiff_shards/files.py": {"vars(self)"},
    },
    "an error of code or data of others": {
        "hookdiff/experiment/discovery.py": {"except (ImportError, AttributeError)"},
        "hookdiff/loop/restoring.py": {
            "except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RuntimeError)"
        },
        "hookdiff/options/imports.py": {"except AttributeError"},
        "hookdiff/options/structure.py": {
            "except (AttributeError, NameError)",
            "except (AttributeError, NameError, SyntaxError, TypeError)",
            "except AttributeError",
        },
        "hookdiff/run_dir/lines.py": {
            "except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)"
        },
        "plugins/hookdiff_features/spaces.py": {"except (AttributeError, KeyError, RuntimeError)"},
        "plugins/hookdiff_init/captions.py": {"except (OSError, ValueError, TypeError, AttributeError)"},
    },
    "an exception": {
        "hookdiff/cli/command_line.py": {"getattr(error, '__notes__', ())", "getattr(error, 'exit_code', 1)"},
        "hookdiff/cli/output.py": {"getattr(stdout, 'errors', None)"},
        "hookdiff/images/labels.py": {"getattr(error, 'strerror', None)"},
        "hookdiff/disk/reading.py": {"getattr(error, 'strerror', None)"},
        "hookdiff/machine/ranks.py": {"getattr(error, 'exit_code', 1)"},
        "hookdiff/models/compiler.py": {"getattr(error, 'inner_exception', error)"},
        "hookdiff/testing/contract.py": {"getattr(error, '__notes__', [])"},
        "plugins/hookdiff_huggingface/source.py": {"getattr(error, 'filename', None)"},
        "plugins/hookdiff_samples/plugin.py": {"getattr(error, 'strerror', None)"},
        "plugins/hookdiff_shards/remote.py": {"getattr(cause, 'status', None)"},
    },
    "an image of Pillow": {
        "hookdiff/images/modes.py": {"getattr(image, 'tile', None)"},
        "plugins/hookdiff_data/members.py": {"getattr(image, 'fp', None)"},
    },
    "an objective or a sampler of the user, at its adapter": {
        "hookdiff/diffusion/diffusion.py": {"hasattr(given, name)"},
        "hookdiff/models/objective.py": {
            "getattr(adapter.origin, self.name, getattr(super(owner, adapter), self.name))",
            "getattr(super(owner, adapter), self.name)",
        },
        "hookdiff/models/sampler.py": {"getattr(origin, 'sample', None)"},
        "hookdiff/models/sampling_arguments.py": {"hasattr(objective.origin, 'draw')"},
    },
    "an optimizer of any library": {
        "hookdiff/models/adamw.py": {"getattr(self, name, None)", "hasattr(_TORCH_STEP, 'hooked')"},
        "hookdiff/models/optimizer_copy.py": {"vars(copy)", "vars(optimizer)"},
        "hookdiff/models/optimizer_state.py": {"vars(kind)"},
        "hookdiff/options/structure.py": {"getattr(kind, '__name__', str(kind))"},
        "plugins/hookdiff_cuda_graphs/step.py": {"hasattr(type(optimizer), 'found_inf')"},
        "plugins/hookdiff_huggingface/source.py": {"getattr(kind, 'value_type', kind)"},
    },
    "an option that an encoder of the user may have": {
        "hookdiff/encoding/encoder.py": {"getattr(self, 'path', self.use)"}
    },
    "data that is given by mistake, at its door": {
        "hookdiff/data/feed_checks.py": {"hasattr(data, 'stacks')"},
        "hookdiff/data/wrong_sources.py": {"hasattr(data, '__iter__')"},
    },
    "pictures that are shown: a tensor, or what holds one": {
        "hookdiff/log/panel.py": {"getattr(images, 'images', images)"}
    },
    "the class of a source of the user": {"hookdiff/data/wrong_sources.py": {"vars(owner)"}},
    "the classes of torchvision": {"hookdiff/data/vision.py": {"getattr(datasets, each)"}},
    "the fields of any plugin, of which the state is kept": {
        "hookdiff/loop/saved.py": {
            "getattr(owner, field.name)",
            "getattr(owner, field.name, None)",
            "getattr(state, key)",
            "hasattr(value, 'load_state_dict')",
            "hasattr(value, 'state_dict')",
        },
        "hookdiff/testing/record.py": {
            "getattr(plugin, '__dict__', {})",
            "getattr(plugin, name)",
            "hasattr(plugin, name)",
        },
        "plugins/hookdiff_selftest/state_recorder.py": {
            "getattr(held, attribute)",
            "getattr(loop.plugins[plugin], attribute)",
        },
    },
    "the operating system": {
        "hookdiff/builtin/signals.py": {"hasattr(signal, 'SIGUSR1')"},
        "hookdiff/data/arrays.py": {"hasattr(os, 'preadv')"},
        "hookdiff/images/loader.py": {"hasattr(signal, 'SIGUSR1')", "hasattr(signal, 'pthread_sigmask')"},
        "hookdiff/machine/usage.py": {
            "getattr(ctypes.CDLL(None), 'mallopt', None)",
            "hasattr(os, 'sched_getaffinity')",
        },
        "plugins/hookdiff_report/plugin.py": {"hasattr(os, 'setpriority')"},
        "plugins/hookdiff_selftest/state_recorder.py": {"getattr(signal, 'SIGKILL', signal.SIGTERM)"},
        "plugins/hookdiff_shards/files.py": {"hasattr(os, 'pread')"},
    },
    "the options of a part of any author": {
        "hookdiff/options/structure.py": {"getattr(value, fields[name].name if name in fields else name)"}
    },
    "the output of a network of any library": {
        "hookdiff/models/adapters.py": {
            "getattr(getattr(output, 'sample', output), 'requires_grad', True)",
            "getattr(output, 'sample', None)",
            "getattr(output, 'sample', output)",
        },
        "plugins/hookdiff_autoencoder/__init__.py": {"getattr(self.network.encode(pictures), self.result)"},
    },
}

UNTYPED: dict[str, dict[str, set[str]]] = {
    "any object of the user, at its adapter": {
        "hookdiff/data/source.py": {"source: Any"},
        "hookdiff/images/source_reader.py": {"source: Any"},
    },
    "the arguments of a Loop, as keywords": {
        "hookdiff/testing/contract.py": {"loop: Any"},
        "hookdiff/testing/rank_checks.py": {"loop: Any"},
        "hookdiff/testing/run_checks.py": {"loop: Any"},
    },
    "the output of a network of any library": {
        "hookdiff/models/adapters.py": {"output: Any"},
        "plugins/hookdiff_nan/watch.py": {"output: Any"},
    },
}
