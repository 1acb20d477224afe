"""torch's compiler."""

import pytest
from torch import nn

from hookdiff import UserError
from hookdiff.models.compiler import compiled, compiler_errors
from tests.conftest import refused
from tests.forked import python

TRY = """
import sys
import torch
from hookdiff.models import try_compiler

sys.path.remove("")
try_compiler(torch.device("cpu"))
"""


@pytest.mark.wide
def test_the_processes_of_the_compiler_import_nothing_of_the_working_directory(tmp_path):
    for module in ("ctypes", "json", "random", "sitecustomize", "subprocess", "torch"):
        (tmp_path / f"{module}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({module!r})")
    cache = str(tmp_path / "cache")  # with a full one some are not started
    code, _, err = python(TRY, folder=tmp_path, TORCHINDUCTOR_CACHE_DIR=cache)
    assert code == 0, err
    assert not (tmp_path / "ran").exists()


def test_an_error_of_the_compiler_is_one_message_with_a_remedy():
    from torch._dynamo.exc import TorchDynamoException

    facts = ("it failed: TorchDynamoException: boom", "go on without")
    with refused(UserError, *facts), compiler_errors("it", "go on without"):
        raise TorchDynamoException("boom\nand a page of text")
    with pytest.raises(KeyError), compiler_errors("it", "go on without"):
        raise KeyError


def test_a_network_that_is_compiled_already_is_returned():
    net = nn.Linear(1, 1)
    assert compiled(net) is not net
    net.compile(backend="eager")
    assert compiled(net) is net
