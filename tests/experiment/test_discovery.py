import sys

import pytest

from hookdiff import HOOKS_VERSION, PluginError
from hookdiff.experiment.discovery import installed_that, plugin_class, plugin_name, trains_on_ranks
from hookdiff.options.imports import distribution, import_object, installed
from tests.conftest import refused

PLUGIN = "from hookdiff import hookimpl\nclass Mine:\n    @hookimpl\n    def on_start(self): ...\n"
DECLARED = PLUGIN.replace("hookimpl\n", "hookimpl, plugin\n@plugin({})\n", 1)


def test_an_installed_plugin_is_found_by_its_name(install):
    install("hookdiff-mine", {"mine": "hd_mine:Mine"}, hd_mine=PLUGIN)
    (entry,) = installed()["mine"]
    assert distribution(entry) == "hookdiff-mine 1.0"
    assert "hd_mine" not in sys.modules  # finding a plugin does not import it
    assert plugin_class("mine").__name__ == "Mine"


def test_the_installed_plugins_that_fit_are_found_beside_a_broken_one(install):
    install("hookdiff-mine", {"mine": "hd_mine:Mine"}, hd_mine=PLUGIN)
    install("hookdiff-broken", {"broken": "hd_broken:Mine"}, hd_broken="raise RuntimeError\n")
    assert installed_that(lambda kind: kind.__module__ == "hd_mine") == ["mine"]
    assert installed_that(trains_on_ranks) == ["ddp", "fsdp"]


def test_installed_names_are_sorted(install):
    install("hookdiff-z", {"zz": "z:Z", "a0": "z:A"})
    names = list(installed())
    assert names == sorted(names)
    assert {"zz", "a0", "ema", "lr"} <= set(names)


def test_each_group_of_entry_points_is_listed_alone(install):
    install("hookdiff-tool", {"tool": "t:main"}, group="hookdiff.commands")
    assert "tool" in installed("hookdiff.commands")
    assert "tool" not in installed()


@pytest.mark.parametrize(
    ("source", "given", "facts"),  # the module hd_mine of a distribution, whose entry point "mine" is hd_mine:Mine
    [
        ("", "minee", ["'minee'", "'mine'", *installed()]),
        ("import not_to_be_found\n", "mine", ["'mine'", "hookdiff-mine 1.0", "'not_to_be_found'"]),
        ("from hookdiff import NotYet\n", "mine", ["hookdiff-mine 1.0", "'NotYet'", "pip install -U hookdiff"]),
        (
            DECLARED.format("hooks_version=99"),
            "mine",
            ["hookdiff-mine 1.0", 99, HOOKS_VERSION, "pip install -U hookdiff"],
        ),
        ("class Yours: ...\n", "mine", ["'mine'", "hookdiff-mine 1.0", "Mine"]),
        ("def Mine(): ...\n", "mine", ["'mine'", "function"]),
        ("", "module", ["'module'", "module"]),
        ("class Mine: ...\n", "hd_mine:Mine", ["'hd_mine:Mine'", "@hookimpl"]),
        *(
            ("", given, [repr(given)])
            for given in ("not_to_be_found:Mine", ":Mine", ".relative:Mine", "..:Mine", ":", "t.")
        ),
    ],
)
def test_what_is_no_plugin_is_refused(install, source, given, facts):
    install("hookdiff-mine", {"mine": "hd_mine:Mine", "module": "hd_mine"}, hd_mine=source)
    with refused(PluginError, *facts):
        plugin_class(given)


def test_a_name_that_resembles_no_other_gets_no_suggestion():
    with refused(PluginError, "'zzzzzz'") as caught:
        plugin_class("zzzzzz")
    assert not any(repr(name) in str(caught.value) for name in installed())


def test_two_distributions_with_one_plugin_name_are_both_reported(install):
    install("hookdiff-one", {"mine": "hd_one:Mine"}, hd_one=PLUGIN)
    install("hookdiff-two", {"mine": "hd_two:Mine"}, hd_two=PLUGIN)
    with refused(PluginError, "'mine'", "hookdiff-one 1.0", "hookdiff-two 1.0"):
        plugin_class("mine")
    assert plugin_class("hd_two:Mine").__module__ == "hd_two"  # the message suggests module:Class


def test_a_distribution_that_is_seen_twice_counts_once(install):
    install("hookdiff-mine", {"mine": "hd_mine:Mine"}, hd_mine=PLUGIN)
    install("hookdiff-mine", {"mine": "hd_mine:Mine"}, where="other", hd_mine=PLUGIN)
    assert len(installed()["mine"]) == 1


@pytest.mark.parametrize("module", ["not_to_be_found", "not_to_be_found.inside", "json.not_to_be_found"])
def test_golden_message_of_a_package_that_a_plugin_needs(install, module):
    source = DECLARED.format(f"needs={{{module!r}: 'nowhere[all]>=2'}}")
    install("hookdiff-mine", {"mine": "hd_mine:Mine"}, hd_mine=source)
    with pytest.raises(PluginError) as caught:
        plugin_class("mine")
    assert str(caught.value) == f"the plugin 'mine' needs the package {module}: pip install 'nowhere[all]>=2'"


def test_a_plugin_with_its_needed_package_is_found(install):
    install("hookdiff-mine", {"mine": "hd_mine:Mine"}, hd_mine=DECLARED.format("needs={'json.decoder': 'json'}"))
    assert plugin_class("mine").__name__ == "Mine"


def test_a_module_on_the_path_is_found(install):
    install("anything", hd_local=PLUGIN)
    assert plugin_class("hd_local:Mine").__name__ == "Mine"
    with refused(PluginError, "'hd_local:Mind'", "'Mind'", "'Mine'"):
        plugin_class("hd_local:Mind")


def test_import_object_names_its_purpose():
    assert import_object("tomli:loads", "a test")("x = 1") == {"x": 1}
    with refused(PluginError, "a test", "tomli", "'load_s'", "'loads'"):
        import_object("tomli:load_s", "a test")
    with refused(PluginError, "a test", "json", "standard library"):
        import_object("json:loads", "a test")
    with refused(PluginError, "a test", "nowhere_at_all"):
        import_object("nowhere_at_all:x", "a test")


@pytest.mark.parametrize(("given", "name"), [("ema", "ema"), ("a.b:MyClass", "myclass"), ("EMA", "EMA")])
def test_a_plugin_is_named_as_given_or_after_its_class(given, name):
    assert plugin_name(given) == name
