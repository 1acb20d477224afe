from contextlib import contextmanager

import pytest
from attrs import define, field

from hookdiff import HookError, PluginError, hookimpl
from hookdiff.plugins import HOOK_NAMES, RESERVED, Plugins
from hookdiff.testing import assert_same, toy_loop, weights


class Good:
    @hookimpl
    def on_start(self, loop):
        return loop


def refusal(plugin, name="mine"):
    with pytest.raises(PluginError) as caught:
        Plugins({name: plugin})
    return str(caught.value)


def test_the_hooks_are_those_of_the_contract():
    assert HOOK_NAMES[:3] == ("prepare_model", "restore", "on_start")
    promised = {"before_step", "after_backward", "after_optimizer_step", "on_epoch_end", "on_nan"}
    assert promised <= set(HOOK_NAMES)
    assert len(HOOK_NAMES) == 19


@pytest.mark.parametrize("name", RESERVED)
def test_names_of_the_core_are_taken(name):
    assert refusal(Good(), name) == f"a plugin cannot be named {name!r}: the core uses that name"


def test_a_class_in_place_of_an_instance():
    assert refusal(Good) == "the plugin 'mine' is the class Good; give an instance: Good()"


def test_a_method_named_like_a_hook_without_the_marker():
    class Unmarked:
        def after_backward(self):
            pass

    assert (
        refusal(Unmarked()) == "the plugin 'mine' has a method after_backward without @hookimpl; it would not be heard"
    )


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_static_and_class_methods_without_the_marker(kind):
    unmarked = type("Unmarked", (), {"on_start": kind(lambda *_: None)})
    assert "has a method on_start without @hookimpl" in refusal(unmarked())


def test_a_method_inherited_without_the_marker():
    class Base:
        def on_stop(self):
            pass

    class Child(Base):
        pass

    assert "has a method on_stop without @hookimpl" in refusal(Child())


def test_a_function_set_on_the_instance_without_the_marker():
    plugin = Good()
    plugin.on_log = lambda step: None
    assert "has a method on_log without @hookimpl" in refusal(plugin)


def test_a_hook_that_does_not_exist():
    class Misspelt:
        @hookimpl
        def after_backwards(self):
            pass

    assert (
        refusal(Misspelt()) == "the plugin 'mine': there is no hook 'after_backwards'; did you mean 'after_backward'?"
    )


def test_a_specname_that_does_not_exist():
    class Misspelt:
        @hookimpl(specname="before_stepp")
        def on_start(self):
            pass

    assert refusal(Misspelt()) == "the plugin 'mine': there is no hook 'before_stepp'; did you mean 'before_step'?"


def test_an_argument_that_the_hook_has_not():
    class Greedy:
        @hookimpl
        def on_start(self, loop, batch):
            pass

    message = refusal(Greedy())
    assert message.startswith("the plugin 'mine' does not fit the contract")
    assert "batch" in message


def test_old_wrappers_are_refused():
    class Old:
        @hookimpl(hookwrapper=True)
        def sample(self):
            yield

    assert refusal(Old()) == "the plugin 'mine': use wrapper=True in place of hookwrapper=True in sample"


def test_a_wrapper_that_is_no_generator():
    class NoGenerator:
        @hookimpl(wrapper=True)
        def sample(self):
            return None

    assert "does not fit the contract" in refusal(NoGenerator())


def test_a_hook_may_have_another_name_in_the_plugin():
    class Named:
        @hookimpl(specname="on_start")
        def begin(self, loop):
            return loop

    assert Plugins({"named": Named()}).hook.on_start(loop=3) == [3]


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_static_and_class_methods_are_heard(kind):
    function = (lambda loop: loop) if kind is staticmethod else (lambda cls, loop: loop)
    plugin = type("Odd", (), {"on_start": kind(hookimpl(function))})()
    assert Plugins({"odd": plugin}).hook.on_start(loop=3) == [3]


def test_nothing_but_methods_is_touched():
    @define(eq=False)
    class Careful:
        ready: int = field(init=False)  # an unset slot
        sample: bool = True  # a setting may be named like a hook
        looked: list[str] = field(init=False, factory=list)

        @property
        def costly(self):
            self.looked.append("costly")
            raise RuntimeError("asked too early")

        @property
        def backward(self):
            self.looked.append("backward")
            raise RuntimeError("asked too early")

        @hookimpl
        def on_start(self, loop):
            return loop

    plugin = Careful()
    assert Plugins({"careful": plugin}).hook.on_start(loop=1) == [1]
    assert plugin.looked == []


class Needs(Good):
    requires = ("ema", "amp")


class Hates(Good):
    conflicts = ("ema",)


def test_requires_names_all_that_is_missing():
    assert refusal(Needs()) == "the plugin 'mine' requires 'ema', 'amp', which this run has not"
    with pytest.raises(PluginError, match=r"'mine' requires 'amp', which"):
        Plugins({"mine": Needs(), "ema": Good()})
    assert len(Plugins({"mine": Needs(), "ema": Good(), "amp": Good()})) == 3


@pytest.mark.parametrize("order", [["mine", "ema"], ["ema", "mine"]])
def test_conflicts_are_found_in_any_order(order):
    plugins = {"mine": Hates(), "ema": Good()}
    with pytest.raises(PluginError, match="'mine' does not go together with 'ema'"):
        Plugins({name: plugins[name] for name in order})
    assert len(Plugins({"mine": Hates()})) == 1


def test_it_is_a_mapping_in_the_order_given():
    first, second = Good(), Good()
    plugins = Plugins({"b": first, "a": second})
    assert dict(plugins) == {"b": first, "a": second}
    assert list(plugins) == ["b", "a"]
    assert plugins["a"] is second
    assert plugins.get("defaults") is None
    assert "c" not in plugins
    with pytest.raises(KeyError):
        plugins["c"]


def test_later_changes_of_the_mapping_it_was_made_from_change_nothing():
    given = {"a": Good()}
    plugins = Plugins(given)
    given["b"] = Good()
    assert list(plugins) == ["a"]


def test_order_tells_who_is_called_when():
    class Late:
        @hookimpl(trylast=True)
        def sample(self):
            pass

    class Around:
        @hookimpl(wrapper=True)
        def sample(self):
            return (yield)

    class Early:
        @hookimpl(tryfirst=True)
        def sample(self):
            pass

    class Plain:
        @hookimpl
        def sample(self):
            pass

    plugins = Plugins({"late": Late(), "plain": Plain(), "early": Early(), "around": Around(), "other": Plain()})
    names = [impl.plugin_name for impl in plugins.order("sample")]
    assert names == ["around", "early", "plain", "other", "late", "defaults"]
    assert [impl.wrapper for impl in plugins.order("sample")] == [True, False, False, False, False, False]
    assert plugins.order("on_log") == []


class Watch:
    """Writes down who is entered, left, and seen failing."""

    def __init__(self):
        self.seen = []

    @contextmanager
    def __call__(self, plugin, hook):
        self.seen.append(f"{plugin}.{hook}")
        try:
            yield
        except StopIteration:
            raise  # how a wrapper ends
        except Exception as error:
            self.seen.append(f"{error} in {plugin}")
            raise
        finally:
            self.seen.append(f"end of {plugin}")


class Around:
    @hookimpl(wrapper=True)
    def backward(self):
        try:
            result = yield
        except KeyError:
            return "mended"
        return result


class Answers:
    @hookimpl
    def backward(self, loss):
        if loss == "bad":
            raise KeyError("fault")
        return loss


def test_a_wrapper_is_watched_before_and_after_its_yield_and_others_between():
    plugins, watch = Plugins({"answers": Answers(), "around": Around()}), Watch()
    hook = plugins.hook
    plugins.instrument(watch)
    assert hook.backward(loop=None, loss=3) == 3  # also for who took `hook` before
    assert watch.seen == [
        *("around.backward", "end of around", "answers.backward", "end of answers", "around.backward", "end of around")
    ]
    watch.seen.clear()
    assert hook.backward(loop=None, loss="bad") == "mended"
    assert watch.seen[3] == "'fault' in answers"
    assert watch.seen[5:] == ["around.backward", "end of around"]
    watch.seen.clear()
    plugins.instrument(None)
    assert hook.backward(loop=None, loss=3) == 3
    assert watch.seen == []


def test_a_watched_wrapper_keeps_the_contract():
    class Twice:
        @hookimpl(wrapper=True)
        def backward(self):
            try:
                yield
                yield
            finally:
                closed.append(True)

    class Never:
        @hookimpl(wrapper=True)
        def backward(self):
            return
            yield

    closed: list[bool] = []
    for plugin, message in ((Twice(), "has a second yield"), (Never(), "returned without a yield")):
        plugins = Plugins({"broken": plugin, "answers": Answers()})
        plugins.instrument(Watch())
        with pytest.raises(HookError, match=message):
            plugins.hook.backward(loop=None, loss=3)
    assert closed == [True]


def test_a_watched_run_is_the_run_itself():
    watched, alone, watch = toy_loop(), toy_loop(), Watch()
    watched.plugins.instrument(watch)
    watched.run()
    alone.run()
    assert_same(weights(watched), weights(alone))
    inner = watch.seen.index("defaults.compute_loss")
    assert watch.seen[inner - 1] == "defaults.micro_step"  # which calls it, so it is inside
    assert watch.seen.count("defaults.optimizer_step") == 20
