"""The modules of a model that are sharded on their own."""

from collections.abc import Collection, Iterator

from torch import nn

from hookdiff import UserError, listed
from hookdiff.models import modules_named

_LISTS = (nn.ModuleList, nn.ModuleDict)  # these only hold modules, and are never called
KEY = "plugins.fsdp.blocks"


def blocks_of(model: nn.Module, patterns: Collection[str]) -> dict[str, nn.Module]:
    """Return the modules to shard on their own, by name, inner ones first.

    These are the modules that match one of `patterns`. Default: the repeated blocks, which are the modules in the
    outermost lists of the model or, without lists, in an outermost Sequential. Raises UserError if there are no such
    modules, and for a pattern that matches no module.
    """
    if not patterns:
        blocks = dict(_held(model, _LISTS)) or dict(_held(model, (nn.Sequential,)))
        if len(blocks) < 2:
            raise UserError(
                f"{KEY}: the model has no repeated blocks, so each device would need memory for the whole model; "
                f"name the largest modules: {_examples(model)}; or train with the plugin ddp"
            )
        return blocks
    matching = modules_named(model, patterns, KEY)
    named = {name: module for name, module in matching.items() if _is_unit(module)}
    if not named:
        raise UserError(f"{KEY}: no module that matches {patterns} has parameters; choose from: {_examples(model)}")
    return dict(reversed(named.items()))  # named_modules yields outer modules first


def check_shared(model: nn.Module, blocks: Collection[nn.Module]) -> None:
    """Raise UserError for a weight that lies in two blocks, or both in a block and outside of all blocks.

    A block may have several names, if the model calls the same module several times.
    """
    owners: dict[nn.Parameter, dict[nn.Module, str]] = {}  # by weight, one of its names in each block that has it
    for name, parameter, block in _weights(model, model, "", set(blocks)):
        owners.setdefault(parameter, {}).setdefault(block, name)
    for names in owners.values():
        if len(names) > 1:
            raise UserError(
                f"{KEY}: {' and '.join(names.values())} are one tied weight, which must lie in one block; name a "
                "module that holds both, or train with the plugin ddp"
            )


def _weights(
    module: nn.Module, block: nn.Module, prefix: str, blocks: Collection[nn.Module]
) -> Iterator[tuple[str, nn.Parameter, nn.Module]]:
    """Yield the name of each weight, the weight, and the innermost of the `blocks` that has it, or the whole model."""
    block = module if module in blocks else block
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        yield f"{prefix}{name}", parameter, block
    for name, child in module.named_children():
        yield from _weights(child, block, f"{prefix}{name}.", blocks)


def _held(module: nn.Module, kinds: tuple[type[nn.Module], ...], prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    is_list = isinstance(module, kinds)
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if is_list and _is_unit(child):
            yield path, child
        else:
            yield from _held(child, kinds, f"{path}.")


def _is_unit(module: nn.Module) -> bool:
    return not isinstance(module, _LISTS) and any(True for _ in module.parameters())


def _examples(model: nn.Module) -> str:
    return listed([name for name, module in model.named_modules() if name and _is_unit(module)], 8)
