import sys

import pytest

from hookdiff import HOOKS_VERSION, PluginError
from hookdiff.experiment.discovery import plugin_class, plugin_name
from hookdiff.imports import distribution, import_object, installed
from tests.conftest import refused

PLUGIN = "from hookdiff import hookimpl\nclass Mine:\n    @hookimpl\n    def on_start(self): ...\n"


def test_an_installed_plugin_is_found_by_its_name(install):
    install("hookdiff-mine", {"mine": "hd_mine:Mine"}, hd_mine=PLUGIN)
    (entry,) = installed()["mine"]
    assert distribution(entry) == "hookdiff-mine 1.0"
    assert "hd_mine" not in sys.modules  # finding a plugin does not import it
    assert plugin_class("mine").__name__ == "Mine"


def test_installed_names_are_sorted(install):
    install("hookdiff-z", {"zz": "z:Z", "a0": "z:A"})
    names = list(installed())
    assert names == sorted(names)
    assert {"zz", "a0", "ema", "lr"} <= set(names)


def test_each_group_of_entry_points_is_listed_alone(install):
    install("hookdiff-tool", {"tool": "t:main"}, group="hookdiff.commands")
    assert "tool" in installed("hookdiff.commands")
    assert "tool" not in installed()


def test_an_unknown_name_is_refused_with_the_nearest_and_all_installed_names():
    with refused(PluginError, "'emma'", "'ema'", *installed()):
        plugin_class("emma")


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


def test_a_broken_import_names_the_distribution_and_the_cause(install):
    install("hookdiff-broken", {"broken": "hd_broken:Mine"}, hd_broken="import not_to_be_found\n")
    with refused(PluginError, "'broken'", "hookdiff-broken 1.0", "'not_to_be_found'"):
        plugin_class("broken")


def test_a_name_that_hookdiff_lacks_may_need_a_later_hookdiff(install):
    install("hookdiff-late", {"late": "hd_late:Mine"}, hd_late="from hookdiff import NotYet\n")
    with refused(PluginError, "'late'", "hookdiff-late 1.0", "'NotYet'", "pip install -U hookdiff"):
        plugin_class("late")


def test_a_plugin_for_a_later_version_of_the_hooks_names_its_distribution(install):
    install("hookdiff-late", {"late": "hd_late:Mine"}, hd_late=PLUGIN + "    hooks_version = 99\n")
    with refused(PluginError, "'late'", "hookdiff-late 1.0", 99, HOOKS_VERSION, "pip install -U hookdiff"):
        plugin_class("late")


def test_a_broken_plugin_does_not_hide_the_others(install):
    install("hookdiff-broken", {"broken": "hd_broken:Mine"}, hd_broken="1 / 0\n")
    assert plugin_class("ema").__name__ == "EMA"


def test_a_missing_attribute_is_named(install):
    install("hookdiff-mine", {"mine": "hd_mine:Yours"}, hd_mine=PLUGIN)
    with refused(PluginError, "'mine'", "hookdiff-mine 1.0", "Yours"):
        plugin_class("mine")


def test_an_entry_point_that_is_no_class_is_refused(install):
    install("hookdiff-mine", {"mine": "hd_mine:make", "module": "hd_mine"}, hd_mine="def make(): ...\n")
    for name, kind in (("mine", "function"), ("module", "module")):
        with refused(PluginError, repr(name), kind):
            plugin_class(name)


@pytest.mark.parametrize("module", ["not_to_be_found", "not_to_be_found.inside", "json.not_to_be_found"])
def test_golden_message_of_a_package_that_a_plugin_needs(install, module):
    source = f"class Mine:\n    needs = {{{module!r}: 'nowhere[all]>=2'}}\n"
    install("hookdiff-mine", {"mine": "hd_mine:Mine"}, hd_mine=source)
    with pytest.raises(PluginError) as caught:
        plugin_class("mine")
    assert str(caught.value) == f"the plugin 'mine' needs the package {module}: pip install 'nowhere[all]>=2'"


def test_a_plugin_with_its_needed_package_is_found(install):
    install("hookdiff-mine", {"mine": "hd_mine:Mine"}, hd_mine=PLUGIN + "    needs = {'json.decoder': 'json'}\n")
    assert plugin_class("mine").__name__ == "Mine"


def test_a_plugin_is_found_by_module_and_class():
    assert plugin_class("hookdiff_ema:EMA") is plugin_class("ema")


def test_a_module_on_the_path_is_found(install):
    install("anything", hd_local=PLUGIN)
    assert plugin_class("hd_local:Mine").__name__ == "Mine"
    with refused(PluginError, "'hd_local:Mind'", "'Mind'", "'Mine'"):
        plugin_class("hd_local:Mind")


def test_a_class_without_a_hook_is_no_plugin(install):
    install("anything", hd_no_hook="class Mine: ...\n")
    with refused(PluginError, "'hd_no_hook:Mine'", "@hookimpl"):
        plugin_class("hd_no_hook:Mine")


@pytest.mark.parametrize("given", ["not_to_be_found:Mine", ":Mine", ".relative:Mine", "..:Mine", ":", "tomli."])
def test_a_class_that_cannot_be_imported_is_refused(given):
    with refused(PluginError, repr(given)):
        plugin_class(given)


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


def test_an_installed_plugin_runs(install):
    from hookdiff.testing import toy_loop

    source = (
        "from hookdiff import hookimpl\n"
        "class Mine:\n"
        "    steps = 0\n"
        "    @hookimpl\n"
        "    def after_optimizer_step(self):\n"
        "        self.steps += 1\n"
    )
    install("hookdiff-mine", {"mine": "hd_mine:Mine"}, hd_mine=source)
    plugin = plugin_class("mine")()
    toy_loop({"mine": plugin}, steps=3).run()
    assert plugin.steps == 3
