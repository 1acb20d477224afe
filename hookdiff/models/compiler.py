"""torch.compile: its errors as one message, and compiled calls of networks that stay uncompiled."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch

from hookdiff.errors import UserError
from hookdiff.machine.safe_path import keep_safe_path


@contextmanager
def compiler_errors(what: str, remedy: str) -> Iterator[None]:
    """Turn an error of the compiler in the `with` into one UserError about `what`, which ends with the `remedy`."""
    from torch._dynamo.exc import TorchDynamoException  # the import takes a second

    try:
        yield
    except TorchDynamoException as error:
        cause = getattr(error, "inner_exception", error)
        reason = f"{type(cause).__name__}: {cause}".partition("\n")[0]
        raise UserError(f"{what} failed: {reason}\n  {remedy}") from error


def try_compiler(device: torch.device, **options: Any) -> None:
    """Compile a small function for `device` with the `options` of torch.compile, to see whether the compiler works."""
    keep_safe_path()  # torch starts processes to compile, now and at later calls
    torch.compile(lambda x: x.sin() + 1, **options)(torch.zeros(8, device=device))


def sampling_errors() -> AbstractContextManager[None]:
    """Turn an error of the compiler in the `with` into one UserError about `sampling.compile`."""
    remedy = "sample without the compiler: sampling.compile = false, or hookdiff sample --no-compile"
    return compiler_errors("sampling.compile: the compiler", remedy)


def compiled(net: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `net` compiled; `net` itself, which may be trained meanwhile, is not changed.

    torch compiles at the first call, and once more for inputs of a second size. A network that is compiled already is
    returned as it is.

    Raises:
        UserError: in a call, if the compiler fails.
    """
    if getattr(net, "_compiled_call_impl", None) is not None:
        return net

    def call(*arguments: Any, **named: Any) -> Any:
        with sampling_errors():
            return _compiled_call()(net, *arguments, **named)

    return call


@cache
def _compiled_call() -> Callable[..., Any]:
    keep_safe_path()
    return torch.compile(_call)


def _call(net: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    return net(*arguments, **named)
