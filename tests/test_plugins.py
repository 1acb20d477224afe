from contextlib import contextmanager

import pytest
from attrs import define, field

import hookdiff
from hookdiff import HookError, PluginError, hookimpl
from hookdiff.hookspecs import ELSEWHERE, HOOK_NAMES, HOOKS_VERSION, RENAMED, Hooks
from hookdiff.plugins import RESERVED, Plugins
from hookdiff.testing import assert_same, toy_loop, weights
from tests.conftest import refused


class Good:
    @hookimpl
    def on_start(self, loop):
        return loop


def test_the_hooks_are_those_of_the_contract():
    promised = {"before_step", "after_backward", "after_optimizer_step", "on_epoch_end", "on_nan"}
    assert promised <= set(HOOK_NAMES) == {name for name in vars(Hooks) if not name.startswith("_")}


@pytest.mark.parametrize("name", RESERVED)
def test_names_of_the_core_are_refused(name):
    with refused(PluginError, name):
        Plugins({name: Good()})


class Unmarked:
    def after_backward(self):
        pass


class Inherits(Unmarked):
    pass


class MethodOfTheInstance(Good):
    def __init__(self):
        self.after_backward = lambda: None


class Misspelt:
    @hookimpl
    def after_backwards(self):
        pass


class MisspeltName:
    @hookimpl(specname="before_stepp")
    def on_start(self):
        pass


class Greedy:
    @hookimpl
    def on_start(self, loop, batch):
        pass


class OldWrapper:
    @hookimpl(hookwrapper=True)
    def sample(self):
        yield


class NoGenerator:
    @hookimpl(wrapper=True)
    def sample(self):
        return None


class ForgetsWrapper:
    @hookimpl
    def optimizer_step(self):
        return (yield)


class Async:
    @hookimpl
    async def before_step(self):
        pass


class AsyncWrapper:
    @hookimpl
    async def before_step(self):
        yield


class Former:
    @hookimpl
    def on_void(self):
        pass


class Habit:
    @hookimpl
    def on_train_batch_end(self):
        pass


class Later:
    hooks_version = HOOKS_VERSION + 1

    @hookimpl
    def a_hook_to_come(self):
        pass


@define(eq=False)
class KeyOfTheConfig:
    hooks_version: int = 1


REFUSED = {
    "a class": (Good, ["Good()"]),
    "an unmarked method": (Unmarked(), ["after_backward", "@hookimpl"]),
    "an unmarked inherited method": (Inherits(), ["after_backward", "@hookimpl"]),
    "an unmarked method of the instance": (MethodOfTheInstance(), ["after_backward", "@hookimpl"]),
    "an unmarked static method": (type("S", (), {"on_start": staticmethod(print)})(), ["on_start", "@hookimpl"]),
    "an unmarked class method": (type("C", (), {"on_start": classmethod(print)})(), ["on_start", "@hookimpl"]),
    "an unknown specname": (MisspeltName(), ["'before_stepp'", "'before_step'"]),
    "an unknown argument": (Greedy(), ["on_start", "batch"]),
    "an old wrapper": (OldWrapper(), ["sample", "wrapper=True", "hookwrapper=True"]),
    "a wrapper that is no generator": (NoGenerator(), ["sample"]),
    "a generator that is no wrapper": (ForgetsWrapper(), ["optimizer_step", "@hookimpl(wrapper=True)"]),
    "an async method": (Async(), ["before_step", "async"]),
    "an async generator": (AsyncWrapper(), ["before_step", "async"]),
    "a former name of a hook": (Former(), ["'on_void'", "'on_nan'", 1]),
    "a hook of another trainer": (Habit(), ["'on_train_batch_end'", "'after_optimizer_step'"]),
    "a later contract": (Later(), [HOOKS_VERSION, HOOKS_VERSION + 1, "pip install -U hookdiff"]),
    "a contract that is no number": (type("V", (), {"hooks_version": "2"})(), ["hooks_version = 1"]),
    "a contract that would be a key": (KeyOfTheConfig(), ["hooks_version = 1"]),
    "requires as a string": (type("R", (), {"requires": "ema"})(), ["requires", "('ema',)"]),
    "conflicts as a string": (type("C", (), {"conflicts": "ema"})(), ["conflicts", "('ema',)"]),
}


@pytest.mark.parametrize(("plugin", "facts"), REFUSED.values(), ids=REFUSED.keys())
def test_a_plugin_that_does_not_fit_the_contract_is_refused(plugin, facts, monkeypatch):
    monkeypatch.setitem(RENAMED, "on_void", ("on_nan", 1))  # no hook has been renamed yet
    with refused(PluginError, "mine", *facts):
        Plugins({"mine": plugin})


def test_the_names_of_other_trainers_lead_to_hooks():
    assert set(ELSEWHERE.values()) <= {*HOOK_NAMES, "state_dict", "load_state_dict", "Evaluation.evaluate"}
    assert {now for now, _ in RENAMED.values()} <= set(HOOK_NAMES)
    assert not {*ELSEWHERE, *RENAMED} & set(HOOK_NAMES)


def test_a_plugin_of_this_contract_is_accepted():
    class Current(Good):
        hooks_version = hookdiff.HOOKS_VERSION

    assert list(Plugins({"mine": Current()})) == ["mine"]


@define
class ByValue:
    every: int = 1


def test_two_plugins_that_pluggy_takes_for_one_are_refused():
    with refused(PluginError, "'one'", "'two'", "ByValue", "@define(eq=False)"):
        Plugins({"one": ByValue(), "two": ByValue(2)})
    same = Good()
    with refused(PluginError, "'one'", "'two'"):
        Plugins({"one": same, "two": same})
    assert list(Plugins({"one": ByValue(), "two": Good(), "three": Good()})) == ["one", "two", "three"]


def test_golden_message_of_a_hook_that_does_not_exist():
    with pytest.raises(PluginError) as caught:
        Plugins({"mine": Misspelt()})
    assert str(caught.value) == (
        "the plugin 'mine': there is no hook 'after_backwards'; did you mean 'after_backward'?"
    )


def test_a_hook_may_have_another_name_in_the_plugin():
    class Named:
        @hookimpl(specname="on_start")
        def begin(self, loop):
            return loop

    assert Plugins({"named": Named()}).hook.on_start(loop=3) == [3]


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_static_and_class_methods_are_called(kind):
    function = (lambda loop: loop) if kind is staticmethod else (lambda cls, loop: loop)
    plugin = type("Odd", (), {"on_start": kind(hookimpl(function))})()
    assert Plugins({"odd": plugin}).hook.on_start(loop=3) == [3]


def test_properties_and_unset_fields_are_not_read():
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


def test_all_missing_requirements_are_reported():
    with refused(PluginError, "mine", "ema", "amp"):
        Plugins({"mine": Needs()})
    with refused(PluginError, "mine", "amp") as caught:
        Plugins({"mine": Needs(), "ema": Good()})
    assert "ema" not in str(caught.value)
    assert len(Plugins({"mine": Needs(), "ema": Good(), "amp": Good()})) == 3


@pytest.mark.parametrize("order", [["mine", "ema"], ["ema", "mine"]])
def test_conflicts_are_refused_in_any_order(order):
    plugins = {"mine": Hates(), "ema": Good()}
    with refused(PluginError, "mine", "ema"):
        Plugins({name: plugins[name] for name in order})
    assert len(Plugins({"mine": Hates()})) == 1


def test_plugins_are_a_mapping_in_the_given_order():
    first, second = Good(), Good()
    plugins = Plugins({"b": first, "a": second})
    assert dict(plugins) == {"b": first, "a": second}
    assert list(plugins) == ["b", "a"]
    assert plugins["a"] is second
    assert plugins.get("defaults") is None
    assert "c" not in plugins
    with pytest.raises(KeyError):
        plugins["c"]


def test_later_changes_of_the_given_mapping_have_no_effect():
    given = {"a": Good()}
    plugins = Plugins(given)
    given["b"] = Good()
    assert list(plugins) == ["a"]


def test_order_lists_the_plugins_as_they_are_called():
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
    """Records each plugin that is entered, that fails, and that is left."""

    def __init__(self):
        self.seen = []

    @contextmanager
    def __call__(self, plugin, hook):
        self.seen.append(f"{plugin}.{hook}")
        try:
            yield
        except StopIteration:
            raise  # a wrapper ends with StopIteration
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
            return False
        return result


class Answers:
    @hookimpl
    def backward(self, loss):
        if loss == "bad":
            raise KeyError("fault")
        return True


def test_a_wrapper_is_watched_before_and_after_its_yield_and_other_plugins_between():
    plugins, watch = Plugins({"answers": Answers(), "around": Around()}), Watch()
    hook = plugins.hook
    plugins.instrument(watch)
    assert hook.backward(loop=None, loss=3) is True  # also through a `hook` that was taken before
    assert watch.seen == [
        *("around.backward", "end of around", "answers.backward", "end of answers", "around.backward", "end of around")
    ]
    watch.seen.clear()
    assert hook.backward(loop=None, loss="bad") is False
    assert watch.seen[3] == "'fault' in answers"
    assert watch.seen[5:] == ["around.backward", "end of around"]
    watch.seen.clear()
    plugins.instrument(None)
    assert hook.backward(loop=None, loss=3) is True
    assert watch.seen == []


def test_a_watched_wrapper_must_yield_once():
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
    for plugin in (Twice(), Never()):
        plugins = Plugins({"broken": plugin, "answers": Answers()})
        plugins.instrument(Watch())
        with refused(HookError, "backward", "yield"):
            plugins.hook.backward(loop=None, loss=3)
    assert closed == [True]


def test_a_watched_run_gives_the_same_weights():
    watched, alone, watch = toy_loop(), toy_loop(), Watch()
    watched.plugins.instrument(watch)
    watched.run()
    alone.run()
    assert_same(weights(watched), weights(alone))
    inner = watch.seen.index("defaults.compute_loss")
    assert watch.seen[inner - 1] == "defaults.micro_step"  # micro_step calls compute_loss, so it is entered first
    assert watch.seen.count("defaults.optimizer_step") == 20
