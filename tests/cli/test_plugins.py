import json
import re

from hookdiff.cli.completion import write_table
from hookdiff.loop.hookspecs import HOOK_NAMES
from hookdiff.options.help import markdown
from hookdiff.options.imports import installed
from hookdiff_ema import EMA
from hookdiff_muon import muon
from tests.conftest import check_facts, check_refused, output
from tests.forked import python


def rows(out):
    """Return the rest of each line by its first word, without the marks of defaults."""
    return dict(line.lstrip("* ").split(maxsplit=1) for line in out.splitlines())


def listing(out):
    """Return whether each plugin and part is a default, and its text, by kind and name; texts start in one column."""
    sections = map(str.splitlines, out.split("\n\n")[1:])
    lines = {(kind, *re.match(r"(.) (\S+) +", line).groups()): line for kind, *members in sections for line in members}
    width = 4 + max(len(name) for _, _, name in lines)
    assert {line[width - 2 : width] for line in lines.values()} == {"  "}
    return {(kind, name): (mark == "*", line[width:]) for (kind, mark, name), line in lines.items()}


def test_a_plugin_is_described_with_the_import_of_its_class_and_its_keys(hookdiff, folder):
    check_facts(output(hookdiff("plugins", "gradients")), "from hookdiff_gradients import GradientMonitor", "window =")
    by_path = output(hookdiff("plugins", "hookdiff_ema:EMA"))
    check_facts(by_path, "\nfrom hookdiff_ema import EMA\n", "[plugins.ema]", "half_life")


def test_the_keys_of_plugins_and_parts_are_printed_as_tables(hookdiff, folder, install):
    printed = output(hookdiff("plugins", "--markdown", "ema", "optimizer.muon"))
    assert printed == markdown(EMA) + markdown(muon, frozenset({"params"}))
    check_facts(printed, "| `ns_steps` | `5` |")
    install("broken", {"model.abroken": "hd_cli_part:X"}, "hookdiff.parts", hd_cli_part="import hd_nowhere\n")
    check_refused(hookdiff("plugins", "--markdown", "model.abroken"), "abroken", "hd_nowhere")
    check_refused(hookdiff("plugins", "--markdown"), "NAME")


def test_golden_order_of_the_calls(hookdiff, folder):
    order = rows(output(hookdiff("plugins", "--order", "small.toml", "--plugins", "clip,samples")))
    assert list(order) == list(HOOK_NAMES)
    assert order["after_optimizer_step"] == "ema (first) > lr > checkpoint > samples > ema (last)"
    assert (order["between_steps"], order["on_nan"]) == ("checkpoint (last)", "checkpoint (first)")
    assert (order["offer_weights"], order["after_backward"]) == ("ema", "clip (last)")


DEFAULTS = {"source": "", "optimizer": "muon", "process": "flow", "sampler": "dpmpp_2m", "lr_schedule": "constant"}
NEEDY = "import hookdiff\n@{}(needs={{'hd_nowhere': 'nowhere[all]>=2'}})\nclass Mine:\n    'Works.'\n"


def test_the_list_is_read_from_the_sources(folder, install):
    """No plugin and no torch is imported, also for a class of another module, or where a package is missing.

    Built-in parts are read from the table of completions.
    """
    source = "from hd_listed_inside import Inner as Mine\n1 / 0\n"
    install("listed", {"listed": "hd_listed:Mine"}, hd_listed=source, hd_listed_inside="class Inner:\n    'Works.'\n")
    sources = {f"hd_needy{number}": NEEDY.format(name) for number, name in enumerate(("plugin", "hookdiff.plugin"))}
    install("needy", {name: f"{name}:Mine" for name in sources}, **sources)
    write_table()
    code = "import sys\nfrom hookdiff.cli import group\ngroup.main(['plugins'], standalone_mode=False)\n"
    out = output(python(f"{code}print('torch' in sys.modules)", folder=folder, fresh=True))
    table, is_imported = out.rstrip().rsplit("\n", 1)
    assert is_imported == "False"
    listed = listing(table)
    assert listed["plugin", "listed"] == (False, "Works.  (listed 1.0)")
    assert listed["plugin", "ema"] == (True, EMA.__doc__.splitlines()[0])
    for name in sources:
        check_facts(listed["plugin", name][1], "hd_nowhere", "pip install 'nowhere[all]>=2'")
    defaults = {kind: name for (kind, name), (is_default, _) in listed.items() if is_default}
    assert {kind: defaults.get(kind, "") for kind in DEFAULTS} == DEFAULTS
    assert ("schedule", "cosine") in listed


def test_parts_are_listed_by_kind_and_described_alone(hookdiff, folder):
    listed = rows(output(hookdiff("plugins", "sampler")))
    assert list(listed) == [f"sampler.{name}" for name in ("ddim", "ddpm", "euler", "heun", "dpmpp_2m")]
    described = output(hookdiff("plugins", "sampler.ddim"))
    check_facts(
        described, "sampler.ddim", "from hookdiff.diffusion import DDIM  (hookdiff 0.1.0)", 'use = "ddim"', "eta ="
    )
    both = output(hookdiff("plugins", "linear"))
    check_facts(both, "schedule.linear", "beta_end = 0.02", "lr_schedule.linear", "min_ratio = 0.0")
    check_facts(output(hookdiff("plugins", "array")), "source.array", 'source = "array"', "from hookdiff_array import")
    plugin, kind = output(hookdiff("plugins", "loss")).split("\n* loss.mse ")
    check_facts(plugin, "from hookdiff_loss import LossMonitor", "[plugins.loss]", "plateau =")
    check_facts(kind, "loss.l1", "loss.huber")
    check_refused(hookdiff("plugins", "sampler.heum"), "'sampler.heum'", "'sampler.heun'", "lr_schedule")


PART = "from hookdiff.diffusion import Weighting\nclass Mine(Weighting):\n    'Mine.'\n"


def test_parts_that_cannot_be_used_are_listed_with_the_reason_and_refused(hookdiff, folder, install):
    names = {"weighting.mine": "hd_mine:Mine", "weighting.uniform": "hd_mine:Mine", "weighting.gone": "hd_gone:Mine"}
    install("hookdiff-one", names, group="hookdiff.parts", hd_mine=PART, hd_gone="import hd_nowhere\n")
    install("hookdiff-two", {"weighting.mine": "hd_two:Mine"}, group="hookdiff.parts", hd_two=PART)
    listed = rows(output(hookdiff("plugins", "weighting")))
    reasons = {
        "mine": ("hookdiff-one 1.0", "hookdiff-two 1.0"),
        "uniform": ("built in", "hd_mine:Mine of hookdiff-one 1.0"),
        "gone": ("hd_nowhere", "hookdiff-one 1.0"),
    }
    for name, facts in reasons.items():
        check_facts(listed[f"weighting.{name}"], "cannot be used", *facts)
        check_refused(hookdiff("plugins", f"weighting.{name}"), *facts[:1])
    assert listed["weighting.min_snr"].startswith("min(SNR, gamma)")
    install("broken", {"abroken": "hd_cli_broken:X"}, hd_cli_broken="1 / 0\n")
    everything = listing(output(hookdiff("plugins")))
    check_facts(everything["weighting", "gone"][1], "hd_nowhere")
    check_facts(everything["weighting", "uniform"][1], "cannot be used", "hookdiff-one")
    check_facts(everything["plugin", "abroken"][1], "division by zero", "broken 1.0")


def test_json_has_what_the_text_has(hookdiff, folder):
    every = json.loads(output(hookdiff("plugins", "--json")))
    names = {(part["kind"], part["name"]) for part in every}
    assert {("plugin", name) for name in installed()} <= names
    assert {("sampler", "ddim"), ("optimizer", "adamw"), ("lr_schedule", "linear"), ("model", "unet")} <= names
    (ema,) = json.loads(output(hookdiff("plugins", "ema", "--json")))
    assert ema == next(part for part in every if (part["kind"], part["name"]) == ("plugin", "ema"))
    assert ema["is_default"]
    text = output(hookdiff("plugins", "ema"))
    check_facts(text, ema["help"], *(key["name"] for key in ema["keys"]), *ema["distributions"])
    order = json.loads(output(hookdiff("plugins", "--order", "small.toml", "--json")))
    assert {hook: " > ".join(called) or "-" for hook, called in order.items()} == rows(
        output(hookdiff("plugins", "--order", "small.toml"))
    )
