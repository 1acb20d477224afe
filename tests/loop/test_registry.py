from contextlib import contextmanager
from typing import get_args

import pytest
from attrs import define, field, fields

from hookdiff import HOOKS_VERSION, Evaluation, HookError, PluginError, hookimpl, plugin
from hookdiff.loop.contract_checks import ELSEWHERE, RESERVED, implements
from hookdiff.loop.hookspecs import HOOK_NAMES, HOOKS, Declaration, Phase, declaration_of, hooks_of
from hookdiff.loop.registry import Plugins
from hookdiff.testing import assert_same, toy_loop, weights
from tests.conftest import acting, ran, refused


class Good:
    @hookimpl
    def on_start(self, loop):
        return loop


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


def marked(function, hook="sample", **marks):
    """Return a plugin whose only hook is the function, with these marks."""
    return type("Marked", (), {hook: staticmethod(hookimpl(**marks)(function))})()


async def coroutine():
    pass


async def asynchronous_generator():
    yield


@plugin(hooks_version=HOOKS_VERSION + 1)
class Later:
    @hookimpl
    def a_hook_to_come(self):
        pass


@define(eq=False)
class KeyOfTheConfig:
    hooks_version: int = 1


def declaring(**declared):
    return plugin(**declared)(type("Declares", (Good,), {}))()


@define(eq=False)
class ForgetsTheStateOfItsBase(Evaluation):
    def evaluate(self, loop):
        return {}

    def state_dict(self):
        return {"best": 1.0}

    def load_state_dict(self, state):
        pass


REFUSED = {
    "a state without that of the base": (ForgetsTheStateOfItsBase(), ["measured_at", "lost", "saved"]),
    "half a state": (type("H", (), {"state_dict": lambda self: {}})(), ["state_dict", "load_state_dict"]),
    "a class": (Good, ["Good()"]),
    "an unmarked method": (Unmarked(), ["after_backward", "@hookimpl"]),
    "an unmarked inherited method": (Inherits(), ["after_backward", "@hookimpl"]),
    "an unmarked method of the instance": (MethodOfTheInstance(), ["after_backward", "@hookimpl"]),
    "an unmarked static method": (type("S", (), {"on_start": staticmethod(print)})(), ["on_start", "@hookimpl"]),
    "an unmarked class method": (type("C", (), {"on_start": classmethod(print)})(), ["on_start", "@hookimpl"]),
    "an unknown specname": (marked(lambda: None, specname="before_stepp"), ["'before_stepp'", "'before_step'"]),
    "an unknown hook": (acting(after_backwards=lambda: None), ["'after_backwards'", "'after_backward'"]),
    "an unknown argument": (acting(on_start=lambda loop, batch: None), ["on_start", "'batch'", "gives: loop"]),
    "a misspelt argument": (acting(before_step=lambda batches: None), ["before_step", "'batches'", "'batch'", "loop"]),
    "an old wrapper": (marked(lambda: (yield), hookwrapper=True), ["sample", "wrapper=True", "hookwrapper=True"]),
    "a wrapper that is no generator": (marked(lambda: None, wrapper=True), ["sample"]),
    "a generator that is no wrapper": (acting(sample=lambda: (yield)), ["sample", "@hookimpl(wrapper=True)"]),
    "an async method": (acting(before_step=coroutine), ["before_step", "async"]),
    "an async generator": (acting(before_step=asynchronous_generator), ["before_step", "async"]),
    "a question without @hookimpl": (type("Q", (), {"check_state": print})(), ["check_state", "@hookimpl"]),
    "a wrapper of a question": (marked(lambda: (yield), "needs_host", wrapper=True), ["needs_host"]),
    "a hook of another trainer": (
        acting(on_train_batch_end=lambda: None),
        ["'on_train_batch_end'", "'after_optimizer_step'"],
    ),
    "a later contract": (Later(), [HOOKS_VERSION, HOOKS_VERSION + 1, "pip install -U hookdiff"]),
    "a contract that would be a key": (KeyOfTheConfig(), ["@plugin(hooks_version=...)"]),
    "requires as a string": (declaring(requires="ema"), ["requires=('ema',)"]),
    "needs without requirements": (declaring(needs=("aim",)), ["('aim',)", "needs={'pandas': 'pandas>=2'}"]),
    "conflicts as a string": (declaring(conflicts="ema"), ["conflicts=('ema',)"]),
    **{
        f"{key.name} as an attribute": (type("A", (Good,), {key.name: ()})(), [f"@plugin({key.name}=...)"])
        for key in fields(Declaration)
    },
}


@pytest.mark.parametrize(("plugin", "facts"), REFUSED.values(), ids=REFUSED.keys())
def test_a_plugin_that_does_not_fit_the_contract_is_refused(plugin, facts):
    with refused(PluginError, "mine", *facts):
        Plugins({"mine": plugin})


def test_the_names_of_other_trainers_lead_to_hooks():
    assert set(ELSEWHERE.values()) <= {*HOOK_NAMES, "saved", "Evaluation.evaluate"}
    assert not ELSEWHERE.keys() & set(HOOK_NAMES)


def test_the_hooks_of_a_phase_are_in_the_order_of_a_run():
    assert hooks_of("passes") == ("accumulate", "micro_step", "compute_loss", "reduce_loss", "backward")
    assert hooks_of("images", "model") == (
        "prepare_model",
        "amend",
        "sample",
        "decode",
        "export_weights",
        "offer_weights",
    )
    assert hooks_of() == ()
    assert sorted(hooks_of(*get_args(Phase))) == sorted(HOOK_NAMES)
    assert all(hooks_of(phase) for phase in get_args(Phase))


def test_each_seam_has_a_default_that_is_called_last():
    last = {name: order[-1] for name in HOOK_NAMES if (order := Plugins({}).order(name))}
    assert {name for name, hook in HOOKS.items() if hook.kind == "seam"} <= last.keys()
    assert all(last[name].trylast for name, hook in HOOKS.items() if hook.kind == "seam")


@pytest.mark.parametrize("order", ["above", "below"])
def test_a_class_declares_what_the_core_must_know_and_inherits_it(order):
    declare, make = plugin(requires=("ema",), hooks_version=HOOKS_VERSION), define(eq=False)

    class Undecorated(Good):
        every: int = 1

    kind = declare(make(Undecorated)) if order == "above" else make(declare(Undecorated))
    child = type("Child", (kind,), {})
    changed = plugin(conflicts=("amp",))(type("Changed", (kind,), {}))
    without = plugin(requires=())(type("Without", (changed,), {}))
    assert declaration_of(Good) == Declaration()
    assert declaration_of(kind) == declaration_of(child) == Declaration(requires=("ema",))
    assert declaration_of(changed) == Declaration(requires=("ema",), conflicts=("amp",))
    assert declaration_of(without) == Declaration(conflicts=("amp",))
    assert list(Plugins({"mine": kind()})) == ["mine"]


def test_a_misspelt_keyword_is_a_type_error():
    with refused(TypeError, "'require'", "'requires'", "conflicts"):
        plugin(require=("ema",))  # type: ignore[call-arg]


def test_the_optimizers_are_not_there_before_they_are_made():
    with refused(PluginError, "loop.optimizers", "on_start"):
        toy_loop({"early": acting(prepare_model=lambda loop: loop.optimizers[0] and None)}).run()


class Answering:
    def __init__(self, answer):
        self.answer = answer

    @hookimpl
    def on_device(self, loop):
        return self.answer if loop is None else loop

    @hookimpl
    def check_state(self, state):
        if not state:
            raise ValueError("it is empty")
        return self.answer


def test_a_question_is_asked_of_one_plugin():
    plugins = Plugins({"first": Answering([1]), "second": Answering(None), "none": Good()})
    assert [plugins.ask(name, "on_device", loop=None) for name in plugins] == [[1], None, None]
    assert [impl.plugin_name for impl in plugins.order("on_device")] == ["first", "second"]
    assert plugins.ask("second", "check_state", model=None, state={1: 1}) is None
    with pytest.raises(ValueError, match="it is empty") as caught:
        plugins.ask("first", "check_state", model=None, state={})
    assert caught.value.__notes__ == ["hookdiff: in the hook 'check_state' of the plugin 'first'"]
    with refused(HookError, "'first'", "on_device", "list", "3"):
        plugins.ask("first", "on_device", loop=3)
    with refused(HookError, "'first'", "check_state"):
        plugins.ask("first", "check_state", model=None, state={1: 1})
    watch = Watch()
    plugins.instrument(watch)
    plugins.ask("first", "on_device", loop=None)
    assert watch.seen == ["first.on_device", "end of first"]


@pytest.mark.parametrize("of", [lambda plugin: plugin, type])
def test_a_plugin_or_its_class_implements_a_hook_under_any_name(of):
    class Named(Good):
        sample = True  # a setting

        @hookimpl(specname="on_stop")
        def finish(self):
            pass

    plugin = of(Named())
    assert implements(plugin, "on_start")
    assert implements(plugin, "sample", "on_stop")
    assert not implements(plugin, "sample", "on_exception")
    assert not implements(plugin)


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


def test_a_hook_may_have_another_name_in_the_plugin():
    named = marked(lambda loop: loop, "begin", specname="on_start")
    assert Plugins({"named": named}).hook.on_start(loop=3) == [3]


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


@plugin(requires=("ema", "amp"))
class Needs(Good):
    pass


@plugin(conflicts=("ema",))
class Hates(Good):
    pass


def test_all_missing_requirements_are_reported():
    with refused(PluginError, "mine", "ema", "amp"):
        toy_loop({"mine": Needs()})
    with refused(PluginError, "mine", "amp") as caught:
        toy_loop({"mine": Needs(), "ema": Good()})
    assert "ema" not in str(caught.value)
    assert len(toy_loop({"mine": Needs(), "ema": Good(), "amp": Good()}).plugins) == 3


@pytest.mark.parametrize("order", [["mine", "ema"], ["ema", "mine"]])
def test_conflicts_are_refused_in_any_order(order):
    plugins = {"mine": Hates(), "ema": Good()}
    with refused(PluginError, "mine", "ema"):
        toy_loop({name: plugins[name] for name in order})
    assert len(toy_loop({"mine": Hates()}).plugins) == 1


def test_later_changes_of_the_given_mapping_have_no_effect():
    given = {"a": Good()}
    plugins = Plugins(given)
    given["b"] = Good()
    assert list(plugins) == ["a"]
    assert plugins.get("defaults") is None


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
    def twice():
        try:
            yield
            yield
        finally:
            closed.append(True)

    def never():
        return
        yield

    closed: list[bool] = []
    for broken in (twice, never):
        plugins = Plugins({"broken": marked(broken, "backward", wrapper=True), "answers": Answers()})
        plugins.instrument(Watch())
        with refused(HookError, "backward", "yield"):
            plugins.hook.backward(loop=None, loss=3)
    assert closed == [True]


def test_a_watched_run_gives_the_same_weights():
    watched, watch = toy_loop(), Watch()
    watched.plugins.instrument(watch)
    assert_same(weights(ran(watched)), weights(ran(toy_loop())))
    inner = watch.seen.index("defaults.compute_loss")
    assert watch.seen[inner - 1] == "defaults.micro_step"  # micro_step calls compute_loss, so it is entered first
    assert watch.seen.count("defaults.optimizer_step") == 20
