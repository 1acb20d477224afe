import pytest

from hookdiff.loop.hookspecs import HOOK_NAMES
from hookdiff.options.help import markdown
from hookdiff_ema import EMA
from hookdiff_muon import muon
from tests.conftest import check_facts, check_refused, output
from tests.forked import python


def rows(out):
    """Return the rest of each line by its first word."""
    return dict(line.split(maxsplit=1) for line in out.splitlines())


def test_all_plugins_are_listed_with_their_first_line(hookdiff, folder):
    found = rows(output(hookdiff("plugins")))
    assert {"amp", "checkpoint", "clip", "ema", "fid", "lr", "samples"} <= found.keys()
    assert found["ema"] == EMA.__doc__.splitlines()[0]


def test_a_plugin_is_described_with_the_import_of_its_class_and_its_keys(hookdiff, folder):
    check_facts(output(hookdiff("plugins", "gradients")), "from hookdiff_gradients import GradientMonitor", "window =")
    by_path = output(hookdiff("plugins", "hookdiff_ema:EMA"))
    check_facts(by_path, "\nfrom hookdiff_ema import EMA\n", "[plugins.ema]", "half_life")


def test_the_keys_of_plugins_and_parts_are_printed_as_tables(hookdiff, folder, install):
    printed = output(hookdiff("plugins", "--markdown", "ema", "optimizer.muon"))
    assert printed == markdown(EMA) + markdown(muon, frozenset({"params"}))
    check_facts(printed, "| `ns_steps` | `5` |")
    install("broken", {"model.abroken": "hd_cli_part:X"}, "hookdiff.parts", hd_cli_part="import hd_nowhere\n")
    check_refused(hookdiff("plugins", "--markdown", "model.abroken"), "model.abroken", "hd_nowhere")
    check_refused(hookdiff("plugins", "--markdown"), "NAME")


def test_one_broken_plugin_does_not_hide_the_others(hookdiff, folder, install):
    install("broken", {"abroken": "hd_cli_broken:X"}, hd_cli_broken="1 / 0\n")
    found = rows(output(hookdiff("plugins")))
    check_facts(found["abroken"], "division by zero", "broken 1.0")
    assert "ema" in found


def test_golden_order_of_the_calls(hookdiff, folder):
    order = rows(output(hookdiff("plugins", "--order", "small.toml", "--plugins", "clip,samples")))
    assert list(order) == list(HOOK_NAMES)
    assert order["after_optimizer_step"] == "ema (first) > lr > checkpoint > samples > ema (last)"
    assert order["between_steps"] == "checkpoint (last)"
    assert order["offer_weights"] == "ema"
    assert order["after_backward"] == "clip (last)"
    assert order["on_nan"] == "checkpoint (first)"


def test_the_list_is_read_from_the_sources(folder, install):
    """No plugin and no torch is imported, also where a package takes the class from another module."""
    source = "from hd_listed_inside import Inner as Mine\n1 / 0\n"
    install("listed", {"listed": "hd_listed:Mine"}, hd_listed=source, hd_listed_inside="class Inner:\n    'Works.'\n")
    code = "import sys\nfrom hookdiff.cli import group\ngroup.main(['plugins'], standalone_mode=False)\n"
    out = output(python(f"{code}print('torch' in sys.modules)", folder=folder, fresh=True))
    table, is_imported = out.rstrip().rsplit("\n", 1)
    assert is_imported == "False"
    assert rows(table)["listed"].startswith("Works.")
    assert rows(table)["ema"] == EMA.__doc__.splitlines()[0]


@pytest.mark.parametrize("written", ["plugin", "hookdiff.plugin"])
def test_a_package_that_is_missing_is_listed(hookdiff, folder, install, written):
    source = f"@{written}(needs={{'hd_nowhere': 'nowhere[all]>=2'}})\nclass Mine:\n    'Works.'\n"
    install("needy", {"needy": "hd_needy:Mine"}, hd_needy=source)
    check_facts(rows(output(hookdiff("plugins")))["needy"], "hd_nowhere", "pip install 'nowhere[all]>=2'")
