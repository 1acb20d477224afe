import json
import re
import subprocess
import sys

import pytest

from hookdiff import HOOKS_VERSION
from hookdiff.loop.hookspecs import HOOK_NAMES
from hookdiff.options.default_names import COMMAND_GROUPS
from tests.conftest import IMPORTS, check_facts, check_refused, finish, imported, mostly_wide, output


def test_help_lists_the_commands(hookdiff, folder):
    out = output(hookdiff("--help"))
    groups = dict(re.findall(r"^(\w+):\n((?:  .*\n)+)", out, re.MULTILINE))
    commands = {title: tuple(re.findall(r"^  ([\w-]+) ", text, re.MULTILINE)) for title, text in groups.items()}
    assert {title: commands[title] for title in COMMAND_GROUPS} == COMMAND_GROUPS
    check_facts(out, "75", "hookdiff run photos.toml", "docs/index.md")
    assert "Of other packages" not in out


def test_help_summarises_the_commands_of_plugins(hookdiff, folder, install):
    commands = {"silent": "hd_others:main", "broken": "hd_others.broken:main", "zap": "hd_others.zap:main"}
    modules = {
        "hd_others.__init__": "1 / 0",
        "hd_others.broken": "def (",
        "hd_others.zap": '"""`hookdiff zap`: zap a run."""',
    }
    install("others", commands, "hookdiff.commands", **modules)
    _, others = (out := output(hookdiff("--help"))).split("\nOf other packages:\n")
    helps = dict(re.findall(r"^  (\w+) +(\S.*)$", out, re.MULTILINE))
    assert "\n  zap " in others
    assert helps["zap"] == "Zap a run."
    assert helps["silent"] == helps["broken"] == "(from others)"
    assert not helps["replay"].startswith("(")


def test_the_module_is_the_command():
    done = subprocess.run([sys.executable, "-m", "hookdiff", "hooks", "nothing"], capture_output=True, text=True)
    check_refused((done.returncode, done.stdout, done.stderr), "'nothing'")


@pytest.mark.parametrize("words", mostly_wide(2, [["--help"], ["hooks"], ["run", "--help"], ["--version"]]))
def test_help_imports_neither_torch_nor_plugins(folder, start, words):
    code, out, times = finish(start(folder, *words, fresh=True, python=IMPORTS))
    assert code == 0
    assert out
    names = imported(times)
    assert "hookdiff.cli" in names
    assert not {name for name in names if name.split(".")[0] in ("torch", "numpy") or name.startswith("hookdiff_")}


def test_hooks_prints_every_hook_with_its_signature(hookdiff, folder):
    lines = output(hookdiff("hooks")).splitlines()
    assert [line.split("(")[0] for line in lines if re.match(r"\w+\(", line)] == list(HOOK_NAMES)
    first, *more = output(hookdiff("hooks", "backward")).splitlines()
    assert first == "backward(loop: Loop, loss: Tensor) -> bool"
    assert more


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ("run", ("'CONFIG'",)),
        ("run nowhere.toml", ("nowhere.toml",)),
        ("run smal.toml", ("smal.toml", "'small.toml'")),
        ("run .", ("directory",)),
        ("run small.toml --set run.step=3", ("run.step", "'steps'")),
        ("run small.toml --plugins emma", ("'emma'", "'ema'")),
        ("run small.toml --resume --overwrite", ("--resume", "--overwrite")),
        ("run small.toml --steps 2 --epochs 3", ("--steps", "--epochs")),
        ("run small.toml --resume --fresh emma", ("--fresh emma", "'ema'")),
        ("run small.toml --out . --overwrite", ("directory",)),
        ("run small.toml --out small.toml/x", ("small.toml/x",)),
        ("run small.toml --set run.batch_size=2000", ("1,797", "batch_size", "2,000")),
        ("run small.toml --lr fast", ("optimizer.lr", "'fast'")),
        ("check small.toml --set model.image_size=7", ("small.toml", 1, "model", "image_size=7")),
        ("check small.toml --set nonsense", ("--set nonsense", "table.key=value")),
        ("hooks after_backwards", ("'after_backwards'", "'after_backward'")),
        ("plugins --order nowhere.toml", ("nowhere.toml",)),
        ("sample .", ("config.toml",)),
        ("sample . --num 0", ("'--num'",)),
        ("runn", ("'runn'", "'run'")),
        ("run small.toml --nonsense", ("'--nonsense'",)),
        *mostly_wide(
            4,
            (
                (f"{command} --plugins hd_cli_user:{kind}", facts)
                for command in ("run small.toml", "check small.toml", "doctor small.toml", "plugins --order small.toml")
                for kind, facts in {
                    "Later": (99, HOOKS_VERSION, "pip install -U hookdiff"),
                    "Habit": ("'on_train_batch_end'", "'after_optimizer_step'"),
                }.items()
            ),
        ),
        ("plugins hd_cli_user:Later", (99, HOOKS_VERSION, "pip install -U hookdiff")),
    ],
)
def test_a_wrong_input_is_one_message_with_exit_code_2(hookdiff, folder, words, facts):
    before = sorted(folder.iterdir())
    check_refused(hookdiff(*words.split()), *facts)
    assert [path for path in sorted(folder.iterdir()) if path.name != "__pycache__"] == before


@pytest.mark.parametrize(
    ("name", "exit_code", "facts"),
    [
        ("Forgets", 1, ("'forgets'", "'optimizer_step'", "hd_cli_user.py")),
        ("Early", 2, ("loop.optimizers", "on_start", "'early'", "'prepare_model'")),
    ],
)
def test_a_mistake_in_a_plugin_is_told_with_plugin_and_hook(hookdiff, folder, name, exit_code, facts):
    code, _, err = hookdiff("run", "small.toml", "--plugins", f"hd_cli_user:{name}")  # the fixture refuses a traceback
    assert code == exit_code
    check_facts(err, *facts)


def test_a_bug_in_a_plugin_ends_in_its_traceback(folder, start):
    code, _, err = finish(start(folder, "run", "small.toml", "--plugins", "hd_cli_user:Bug"))
    assert code == 1
    assert "Traceback" in err
    *_, error, note = err.splitlines()
    assert error == "KeyError: 'a bug of its own'"
    check_facts(note, "'on_start'", "'bug'")
    assert not (folder / "runs").exists()


def test_hooks_as_json_have_the_texts(hookdiff, folder):
    text = output(hookdiff("hooks"))
    hooks = json.loads(output(hookdiff("hooks", "--json")))
    assert [hook["name"] for hook in hooks] == list(HOOK_NAMES)
    for hook in hooks:
        assert f"{hook['name']}{hook['signature']}\n" in text
        assert all(f"    {line}".rstrip() in text for line in hook["example"].splitlines())
