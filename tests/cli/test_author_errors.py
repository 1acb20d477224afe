"""Test that the mistakes of a plugin's author end in one message, without frames of the core."""

import pytest

from tests.conftest import check_facts

MINE = """
from attrs import define
from hookdiff import hookimpl, plugin

@define(eq=False)
class Forgets:
    @hookimpl(wrapper=True)
    def optimizer_step(self):
        yield

@define(eq=False)
class Early:
    @hookimpl
    def prepare_model(self, loop):
        loop.optimizers[0]

@plugin(needs=("aim",))
@define(eq=False)
class NeedsNoTable:
    @hookimpl
    def before_step(self):
        pass
"""


@pytest.mark.parametrize(
    ("name", "exit_code", "facts"),
    [
        ("Forgets", 1, ("'forgets'", "'optimizer_step'", "of_an_author.py:7")),
        ("NeedsNoTable", 2, ("'of_an_author:NeedsNoTable'", "('aim',)", "needs={'pandas': 'pandas>=2'}")),
        ("Early", 2, ("loop.optimizers", "on_start", "'early'", "'prepare_model'")),
    ],
)
def test_a_mistake_of_the_author_is_told_with_plugin_and_hook(
    hookdiff, write_config, user_module, tmp_path, monkeypatch, name, exit_code, facts
):
    monkeypatch.chdir(tmp_path)
    user_module("of_an_author", MINE)
    write_config()
    code, _, err = hookdiff("run", "small.toml", "--plugins", f"of_an_author:{name}")  # the fixture refuses a traceback
    assert code == exit_code
    check_facts(err, *facts)
