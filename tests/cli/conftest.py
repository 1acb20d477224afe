"""The tests run the command line in a folder with a config and a module."""

import pytest

USER = """
import os
import signal
from hookdiff import hookimpl, plugin

class NaN:
    "Makes the third loss a NaN."

    @hookimpl(wrapper=True)
    def compute_loss(self, loop):
        from attrs import evolve
        output = yield
        return evolve(output, loss=output.loss * float("nan")) if loop.progress.position == 2 else output

class Late:
    "Receives a signal when the run is already done."

    @hookimpl
    def on_stop(self):
        os.kill(os.getpid(), signal.SIGINT)

class Terminated:
    "Receives SIGTERM in each step."

    @hookimpl
    def after_backward(self):
        os.kill(os.getpid(), signal.SIGTERM)

@plugin(hooks_version=99)
class Later:
    "Is made for a later version of the hooks."

    @hookimpl
    def a_hook_to_come(self):
        pass

class Habit:
    "Has a hook of another trainer."

    @hookimpl
    def on_train_batch_end(self):
        pass

class Forgets:
    "Returns nothing."

    @hookimpl(wrapper=True)
    def optimizer_step(self):
        yield

class Early:
    "Asks for an optimizer before there is one."

    @hookimpl
    def prepare_model(self, loop):
        loop.optimizers[0]

class Bug:
    "Raises an error that is no UserError."

    @hookimpl
    def on_start(self):
        raise KeyError("a bug of its own")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch, write_config, user_module):
    """Change to a folder with a config and a module of the user."""
    write_config(
        run={"log_every": 2, "plugins": ["ema", "lr", "checkpoint"]}, plugins={"lr": {"schedule": "cosine", "total": 6}}
    )
    user_module("hd_cli_user", USER)
    monkeypatch.chdir(tmp_path)
    return tmp_path
