import traceback

import pluggy
import pytest
import torch
from hypothesis import example, given, strategies as st

from hookdiff import PASS, HookError, Hooks, hookimpl
from hookdiff.loop.dispatch import bind, compile_hook
from hookdiff.loop.hookspecs import HOOKS
from hookdiff.loop.registry import Plugins
from hookdiff.testing.toy import toy_loop
from tests.conftest import acting, check_facts, check_one, ran, refused

MOMENT, SEAM = "on_nan", "backward"  # each hook takes two arguments
ARGUMENTS = {MOMENT: {"loop": "the loop", "report": "the report"}, SEAM: {"loop": "the loop", "loss": "the loss"}}


class Mine(Exception):
    pass


class Other(Exception):
    pass


def plain(name, hook, heard, answer, **marks):
    """Return a plugin that notes that it was called and returns `answer`, or raises it. From a seam, None is PASS."""

    def call():
        heard.append(name)
        if isinstance(answer, Exception):
            raise answer
        return PASS if hook == SEAM and answer is None else answer

    return type("Plain", (), {hook: staticmethod(hookimpl(**marks)(call))})()


def around(name, hook, heard, reaction, **marks):
    """Return a plugin that wraps the hook: it records the result or the error at its yield, and reacts."""

    def call():
        heard.append(f"{name} before")
        if reaction == "fail at once":
            raise Other(name)
        try:
            result = yield
        except Mine as error:
            heard.append(f"{name} saw {error!r}")
            if reaction == "swallow":
                return [f"{name} instead"]
            if reaction == "raise another":
                raise Other(name) from error
            raise
        heard.append(f"{name} saw {result!r}")
        return [name, result] if reaction == "replace" else result

    return type("Around", (), {hook: staticmethod(hookimpl(wrapper=True, **marks)(call))})()


phases = st.sampled_from([{}, {"tryfirst": True}, {"trylast": True}])
answers = st.none() | st.integers(0, 3) | st.just(False) | st.builds(Mine)
reactions = st.sampled_from(["pass on", "replace", "swallow", "raise another", "fail at once"])
kinds = st.tuples(st.just(plain), answers, phases) | st.tuples(st.just(around), reactions, phases)


# None alone does not count as a result.
FALSY = [(plain, answer, {}) for answer in (None, 0, False, None, 2)]


def make(hook, drawn, heard):
    return {
        f"p{number}": kind(f"p{number}", hook, heard, what, **marks) for number, (kind, what, marks) in enumerate(drawn)
    }


def outcome(call, heard):
    heard.clear()
    try:
        result = call()
    except Exception as error:
        return type(error).__name__, str(error), list(heard)
    return "returned", result, list(heard)


def in_pluggy(hook, plugins):
    """Return pluggy's own hook, with the plugins registered so that pluggy calls them in our order.

    In pluggy the hook registered last is called first; among `trylast` hooks it is called last.
    """
    manager = pluggy.PluginManager("hookdiff")
    manager.add_hookspecs(Hooks)

    last = [name for name, plugin in plugins.items() if getattr(plugin, hook).hookdiff_impl["trylast"]]
    for name in [*last, *(name for name in reversed(plugins) if name not in last)]:
        manager.register(plugins[name], name)
    return getattr(manager.hook, hook)


def compiled(hook, impls):
    """Return our own function for the hook; any result is allowed."""
    return compile_hook(HOOKS[hook], object, [bind(impl, hook) for impl in impls])


@given(drawn=st.lists(kinds, max_size=7))
@example(drawn=[(around, "replace", {}), (around, "swallow", {}), (plain, Mine("broken"), {})])
@example(drawn=FALSY)
def test_a_moment_gives_the_results_of_pluggy(drawn):
    heard = []
    plugins = make(MOMENT, drawn, heard)
    ours, theirs = compiled(MOMENT, Plugins(plugins).order(MOMENT)), in_pluggy(MOMENT, plugins)
    assert outcome(lambda: ours(**ARGUMENTS[MOMENT]), heard) == outcome(lambda: theirs(**ARGUMENTS[MOMENT]), heard)


@given(drawn=st.lists(kinds, max_size=7))
@example(drawn=FALSY)
def test_a_seam_gives_the_result_of_pluggy(drawn):
    heard = []
    plugins = make(SEAM, drawn, heard)
    last = plain("default", SEAM, heard, "by default", trylast=True)
    # `Plugins` adds its own default last; that default would need a real loss.
    order = Plugins(plugins).order(SEAM)[:-1]
    manager = pluggy.PluginManager("hookdiff")
    manager.register(last, "default")
    ours = compiled(SEAM, [*order, *manager.hook.backward.get_hookimpls()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "PASS", None)  # pluggy's own way to leave it to the next
        theirs = in_pluggy(SEAM, {**plugins, "default": last})
        expected = outcome(lambda: theirs(**ARGUMENTS[SEAM]), heard)
    assert outcome(lambda: ours(**ARGUMENTS[SEAM]), heard) == expected


@given(drawn=st.lists(kinds, max_size=8))
def test_the_order_is_wrappers_then_phases_then_the_config(drawn):
    plugins = make(MOMENT, drawn, [])

    def key(name):
        kind, _, marks = drawn[int(name[1:])]
        phase = 0 if "tryfirst" in marks else 2 if "trylast" in marks else 1
        return kind is plain, phase  # the sort is stable: ties keep the order of the config

    assert [impl.plugin_name for impl in Plugins(plugins).order(MOMENT)] == sorted(plugins, key=key)


def test_a_wrapper_without_a_yield_is_an_error():
    class NoYield:
        @hookimpl(wrapper=True)
        def before_step(self, loop):
            if loop:
                yield

    with refused(HookError, "before_step", "yield"):
        Plugins({"odd": NoYield()}).hook.before_step(loop=None, batch=None)


@pytest.mark.parametrize("broken", [False, True])
def test_a_wrapper_with_a_second_yield_is_an_error_and_is_closed(broken):
    closed = []

    class TwoYields:
        @hookimpl(wrapper=True)
        def before_step(self):
            try:
                try:
                    yield
                except Mine:
                    yield
                yield
            finally:
                closed.append(True)

    other = plain("other", "before_step", [], Mine() if broken else None)
    with refused(HookError, "before_step", "yield"):
        Plugins({"two": TwoYields(), "other": other}).hook.before_step(loop=None, batch=None)
    assert closed == [True]


def line_of(function):
    return function.__code__.co_firstlineno


def test_golden_message_of_a_wrapper_that_forgets_to_return():
    class Forgetful:
        @hookimpl(wrapper=True)
        def optimizer_step(self):
            yield

    with pytest.raises(HookError) as caught:
        toy_loop({"forgetful": Forgetful()}).run()
    assert str(caught.value) == (
        "the plugin 'forgetful' returned None from its wrapper of the hook 'optimizer_step', expected True or False: "
        f"return the result of its yield\n  {__file__}:{line_of(Forgetful.optimizer_step)}"
    )
    assert all(entry.filename == __file__ for entry in traceback.extract_tb(caught.tb))
    assert caught.value.__suppress_context__  # the StopIteration of the wrapper


def test_golden_message_of_a_seam_that_forgets_to_return():
    def forgets():
        pass

    loop = toy_loop({"forgetful": acting(optimizer_step=forgets)})
    with pytest.raises(HookError) as caught:
        loop.run()
    assert str(caught.value) == (
        "the plugin 'forgetful' returned None from the hook 'optimizer_step', expected True or False; a plugin that "
        f"leaves it to the next returns hookdiff.PASS\n  {__file__}:{line_of(forgets)}"
    )
    assert all(entry.filename == __file__ for entry in traceback.extract_tb(caught.tb))
    assert loop.progress.step == 0


@pytest.mark.parametrize(
    ("hook", "result", "facts"),
    [
        ("compute_loss", torch.ones(()), ("Tensor", "LossOutput", "PASS")),
        ("micro_step", None, (None, "LossOutput", "PASS")),
        ("unscale", 1, (1, "True", "False")),
        ("wrap_net", "net", ("net", "Module")),
        ("on_nan", True, (True, "str")),
        ("offer_weights", ["ema"], ("list", "Mapping")),
    ],
)
def test_a_result_of_a_wrong_type_is_refused_with_plugin_and_hook(hook, result, facts):
    plugins = Plugins({"odd": acting(**{hook: lambda: result})})
    with refused(HookError, "'odd'", repr(hook), *facts):
        plugins.call(hook, loop=None, batch=None, net=None, report=None, index=0, count=1)


def test_a_result_that_nothing_takes_is_warned_of_once(caplog):
    toy_loop({"returns": acting(after_backward=lambda: False)}, steps=3).run()
    check_one(caplog.messages, "'returns'", "'after_backward'", False)


def test_a_seam_that_every_plugin_leaves_to_the_next_is_done_by_the_core():
    plugins = {name: acting(optimizer_step=lambda: PASS) for name in ("one", "two")}
    assert ran(toy_loop(plugins, steps=2)).progress.step == 2


@pytest.mark.parametrize("wraps", [False, True])
def test_an_error_is_raised_with_a_note_of_plugin_and_hook(wraps):
    error = KeyError("mine")

    def fail(self):
        raise error

    def fail_after(self):
        yield
        raise error

    broken = type("Broken", (), {"after_backward": hookimpl(wrapper=wraps)(fail_after if wraps else fail)})()
    with pytest.raises(KeyError) as caught:
        toy_loop({"around": around("around", "after_backward", [], "pass on"), "broken": broken}).run()
    assert caught.value is error
    check_one(error.__notes__, "'broken'", "'after_backward'")


@pytest.mark.parametrize("takes", [(), ("loop",), ("images",), ("step", "loop"), ("loop", "step", "images")])
def test_a_plugin_gets_the_arguments_it_names(takes):
    got = []
    takes_them = eval(f"lambda {', '.join(takes)}: got.append(({', '.join((*takes, ''))}))", {"got": got})
    Plugins({"odd": acting(on_images=takes_them)}).hook.on_images(loop=1, step=2, images=3)
    assert got == [tuple({"loop": 1, "step": 2, "images": 3}[name] for name in takes)]


def test_hooks_take_keywords_only():
    hook = Plugins({}).hook
    for name, arguments in (("on_start", ["loop"]), ("unscale", ["loop"])):
        with pytest.raises(TypeError):
            getattr(hook, name)(*arguments)


class Slots:
    __slots__ = ("declared",)

    @hookimpl
    def after_backward(self):
        self.count = 1


def test_an_attribute_that_is_not_declared_is_named_with_the_remedy():
    with pytest.raises(AttributeError) as caught:
        toy_loop({"slots": Slots()}, steps=1).run()
    *_, note = caught.value.__notes__
    check_facts(note, "Slots", "count = field(init=False)", "saved(...)")
    Slots.after_backward = hookimpl(lambda self: self.declared)
    with pytest.raises(AttributeError) as caught:
        toy_loop({"slots": Slots()}, steps=1).run()
    assert len(caught.value.__notes__) == 1  # it was read before it was set
