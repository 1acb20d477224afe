import dataclasses
import enum
import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

import pytest
import tomli
import tomli_w
import torch
from attrs import define, field
from attrs.validators import ge, in_, le, optional
from hypothesis import given, strategies as st

from hookdiff import Every, parse_every
from hookdiff.diffusion.clipping import Clipping, NoClipping
from hookdiff.options.structure import Problems, Text, arguments, missing, parameters, resolved
from tests.conftest import check_facts, check_one

if TYPE_CHECKING:
    from nowhere import Nothing


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@define
class Inner:
    size: int = field(validator=ge(1))
    label: str = "none"


def taking(kind):
    def target(x):
        return x

    target.__annotations__ = {"x": kind}
    return target


def read(kind, value):
    """Return the typed value, or the message about its only problem."""
    problems = Problems()
    result = arguments(taking(kind), {"x": value}, "t", problems)
    assert len(result) + len(problems.found) == 1
    return result["x"] if result else problems.found[0]


def same(one, other):
    return type(one) is type(other) and one == other


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (bool, True, True),
        (int, 7, 7),
        (float, 7, 7.0),
        (float, 7.5, 7.5),
        (str, "7", "7"),
        (Any, {"a": [1, "b"]}, {"a": [1, "b"]}),
        (int | None, 3, 3),
        (Optional[str], "a", "a"),  # noqa: UP045
        (int | str, 1, 1),
        (int | str, "1", "1"),
        (int | float, 1, 1),
        (float | int, 1, 1),
        (float | str, 1, 1.0),
        (bool | int, 1, 1),
        (bool | int, True, True),
        (int | bool, True, True),
        (float | torch.Tensor, 1, 1.0),
        (tuple[int, ...], [1, 2], (1, 2)),
        (tuple[int, ...], [], ()),
        (tuple[float, int], [1, 2], (1.0, 2)),
        (tuple[tuple[int, int], ...], [[1, 2], [3, 4]], ((1, 2), (3, 4))),
        (list[str], ["a"], ["a"]),
        (Sequence[int], [1], (1,)),
        (Iterable[int], [1], (1,)),
        (set[str], ["a", "a"], {"a"}),
        (tuple, [1, "a"], (1, "a")),
        (dict[str, float], {"a": 1}, {"a": 1.0}),
        (Mapping[str, list[int]], {"a": [1]}, {"a": [1]}),
        (dict, {"a": 1}, {"a": 1}),
        (Literal["a", "b"], "b", "b"),
        (Literal[1, 2], 2, 2),
        (Literal["auto", 1] | None, "auto", "auto"),
        (Path, "a/b", Path("a/b")),
        (Colour, "red", Colour.RED),
        (Annotated[int, "of something"], 3, 3),
        (Inner, {"size": 3}, Inner(3)),
        (list[Inner], [{"size": 3, "label": "x"}], [Inner(3, "x")]),
        (Every, 500, Every(500)),
        (Every, "2 epochs", Every(2, "epochs")),
    ],
)
def test_values_that_fit_get_the_type_of_their_key(kind, value, expected):
    assert same(read(kind, value), expected)


@pytest.mark.parametrize(
    ("kind", "value", "facts"),  # facts: the refused value, its place in a list, the allowed values
    [
        (bool, "false", ("'false'",)),
        (bool, 0, (0,)),
        (int, True, (True,)),
        (int, 7.0, (7.0,)),
        (int, "7", ("'7'",)),
        (float, True, (True,)),
        (float, "1e-3", ("'1e-3'",)),
        (float, 10**400, ("a number below 1.8e308",)),
        (str, 7, (7,)),
        (str, True, (True,)),
        (int | None, "none", ("'none'",)),
        (int | str, 1.5, (1.5,)),
        (int | float, True, (True,)),
        (tuple[int, ...], 3, (3,)),
        (tuple[int, ...], "12", ("'12'",)),
        (tuple[int, ...], [1, "2"], ("'2'", "item 2")),
        (tuple[float, float], [0.9], (1, 2)),
        (tuple[float, int], [0.9, 0.9], (0.9, "item 2")),
        (tuple[tuple[int, int], ...], [[1, 2], [3, True]], (True, "item 2")),
        (list[int] | None, ["a"], ("'a'", "item 1")),
        (list, "abc", ("'abc'",)),
        (Sequence[str], "abc", ("'abc'",)),
        (set[str], "abc", ("'abc'",)),
        (dict[str, int], [1], ("[1]",)),
        (dict[str, int], {"a": {"b": 1}}, ("{'b': 1}", "a")),
        (Literal["linear", "cosine"], "cosin", ("'cosin'", "'linear'", "'cosine'")),
        (Literal["a"], ["a"], ("['a']", "'a'")),
        (Literal[1, 2], True, (True, 1, 2)),
        (Literal[1, 2], 3, (3, 1, 2)),
        (Colour, "green", ("'green'", "Colour")),
        (torch.Tensor, 1, ("tensor",)),
        (list[torch.Tensor], [1], ("tensor", "item 1")),
        (torch.Tensor | None, 1, (1, "tensor")),
        (Every, True, (True, 500, "'2 epochs'", "'15 min'")),
        (Every, "often", ("'often'", 500, "'2 epochs'", "'15 min'")),
        (Inner, 3, (3,)),
        (Inner, {}, ("size",)),
        (Inner, {"size": 0}, (0, "size", 1)),
        (Inner, {"size": 1, "lable": "x"}, ("lable", "'label'", "size")),
        (list[Inner], [{"size": 1}, {"size": 0}], (0, "item 2.size", 1)),
        (bool, Text("yes"), ("'yes'",)),
        (int, Text("7.5"), (7.5,)),
        (int, Text("many"), ("'many'",)),
        (int, Text("none"), ("'none'",)),
        (tuple[int, ...], Text("1,b"), ("'1,b'",)),
        (tuple[int, ...], Text("7"), (7,)),
    ],
)
def test_values_that_do_not_fit_are_refused_with_their_place(kind, value, facts):
    check_facts(read(kind, value), "t.x", *facts)


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (bool, "true", True),
        (int, "7", 7),
        (float, "7", 7.0),
        (float, "2e-4", 2e-4),
        (str, "7", "7"),
        (str, "true", "true"),
        (str, "two words", "two words"),
        (str, '"quoted"', "quoted"),
        (str, "", ""),
        (str | None, "none", None),
        (str, "none", "none"),
        (int | None, "none", None),
        (Clipping | None, "none", NoClipping()),
        (int | str, "7", 7),
        (tuple[int, ...], "1,2,4", (1, 2, 4)),
        (tuple[int, ...], "[1, 2, 4]", (1, 2, 4)),
        (tuple[str, ...], '["a", "b"]', ("a", "b")),
        (tuple[float, float], "0.9,0.99", (0.9, 0.99)),
        (dict[str, int], "{a = 1}", {"a": 1}),
        (Every, "500", Every(500)),
        (Every, "2 epochs", Every(2, "epochs")),
        (Literal["a", "b"], "a", "a"),
        (Path, "a/b.txt", Path("a/b.txt")),
        (Any, "1e3", 1000.0),
        (Any, "words", "words"),
    ],
)
def test_text_is_read_as_the_type_that_the_key_expects(kind, text, expected):
    assert same(read(kind, Text(text)), expected)


@pytest.mark.parametrize("text", ["[" * 2000, "9" * 5000])
def test_a_long_text_is_refused_by_its_beginning(text):
    message = read(int, Text(text))
    check_facts(message, "t.x")
    assert repr(text)[:50] in message
    assert len(message) < 500


@given(value=st.text() | st.integers() | st.booleans() | st.floats(allow_nan=False))
def test_no_type_is_ever_coerced_to_another(value):
    for kind in (bool, int, str):
        result = read(kind, value)
        assert same(result, value) if type(value) is kind else result.startswith("t.x: ")


@define(eq=False)
class Options:
    low: int = field(default=0, validator=[ge(0), le(10)])
    high: int = field(default=10, validator=optional(ge(0)))
    mode: str = field(default="a", validator=in_(("a", "b")))
    every: Every = field(default=Every(0), converter=parse_every)
    _private: int = field(default=1, validator=ge(1))
    state: "Nothing" = field(init=False)

    @high.validator
    def _above(self, attribute, value):
        if value < self.low:
            raise ValueError(f"'high' must be at least low ({self.low})")


def problems_of(target, table):
    problems = Problems()
    arguments(target, table, "t", problems)
    return problems.found


def test_golden_messages_of_all_problems_at_once():
    table = {"low": "x", "hihg": 1, "mode": "c", "every": "often", "private": 0}
    assert problems_of(Options, table) == [
        "t.low: expected an integer, got 'x'",
        "t.hihg: unknown key; did you mean 'high'?; known: low, high, mode, every, private",
        "t.every: expected steps (500), epochs ('2 epochs') or time ('15 min'), got 'often'",
        "t.mode: must be in ('a', 'b') (got 'c')",
        "t.private: must be >= 1: 0",
    ]


def test_a_problem_in_an_inner_table_has_its_full_place():
    size, label = problems_of(taking(Inner), {"x": {"size": "a", "label": 1}})
    check_facts(size, "t.x.size", "'a'")
    check_facts(label, "t.x.label", 1)


def test_a_validator_sees_the_other_fields_given_or_by_default():
    check_one(problems_of(Options, {"low": 5, "high": 4}), "t.high", "low (5)")
    assert problems_of(Options, {"high": 4}) == []
    check_one(problems_of(Options, {"low": 11, "high": 12}), "t.low", 10, 11)


def test_validators_of_fields_that_are_not_given_do_not_run():
    check_one(problems_of(Options, {"low": 11}), "t.low", 10, 11)  # high = 10 < 11 is not refused as well


def test_a_message_that_does_not_start_with_the_field_stays_whole():
    def refuse(instance, attribute, value):
        raise ValueError("'low' must be below this")

    kind = define(type("Odd", (), {"__annotations__": {"x": int}, "x": field(default=0, validator=refuse)}))
    assert problems_of(kind, {"x": 1}) == ["t.x: 'low' must be below this"]


def test_types_imported_only_for_type_checkers_are_not_checked():
    def target(a: "Nothing", b: "int" = 1, c: "Nothing | None" = None): ...

    problems = Problems()
    assert arguments(target, {"a": [1], "c": 2}, "t", problems) == {"a": [1], "c": 2}
    check_one(problems_of(target, {"b": "x"}), "t.b", "'x'")
    assert arguments(define(type("K", (), {"__annotations__": {"a": "Nothing"}})), {"a": 1}, "t", problems) == {"a": 1}
    assert problems.found == []


def test_a_class_with_annotations_that_cannot_be_read_is_refused() -> None:
    kind = dataclasses.make_dataclass("Config", [("size", "nowhere.Size")])
    arguments(taking(kind), {"x": "a"}, "model", problems := Problems())
    assert problems.found == ["model.x: cannot be set in a config: it takes Config"]


def test_any_callable_has_parameters():
    class Custom:
        def __call__(self, x: int): ...

    class Plain:
        def __init__(self, x: int, *args, y: str = "", **kwargs): ...

    assert list(parameters(Plain)) == ["x", "y"]
    for target in (Plain, functools.partial(Plain, y="b")):
        check_one(problems_of(target, {"x": "a"}), "t.x", "'a'")
    assert list(parameters(Custom())) == ["x"]
    assert parameters(dict) == {}  # Python knows no signature of dict
    check_one(problems_of(dict, {"x": 1}), "t.x")
    assert "params" not in parameters(torch.optim.AdamW)


def test_an_inherited_init_is_read_in_its_own_module():
    class Child(torch.optim.AdamW):
        pass

    (line,) = problems_of(Child, {"lr": "x"})
    check_facts(line, "t.lr", "'x'")
    assert "Tensor" not in line  # a config can only give a number
    check_one(problems_of(Child, {"betas": [0.9]}), "t.betas", 1, 2)


def test_missing_lists_the_arguments_without_a_default():
    def target(a, b, c=1): ...

    assert missing(target, {"a": 1}) == ["b"]
    assert missing(target, {"a": 1, "b": 2}) == []
    assert missing(Options, {}) == []


def round_trip(target, values):
    """Write the given values and the defaults as TOML, and return them as they are read back."""
    problems = Problems()
    again = arguments(target, tomli.loads(tomli_w.dumps(resolved(target, values))), "t", problems)
    assert problems.found == []
    return again


def test_resolved_values_are_read_back_unchanged():
    def target(
        a: int = 1,
        b: float = 2.5,
        c: tuple[int, ...] = (1, 2),
        d: Every = Every(15, "seconds"),  # noqa: B008
        e: Colour = Colour.RED,
        f: Path = Path("x"),
        g: Inner | None = None,
        h: dict[str, list[int]] | None = None,
        i: str | None = None,
        j: set[str] = frozenset(),
    ): ...

    problems = Problems()
    table = {"b": 3, "e": "blue", "f": "a/b", "g": {"size": 2}, "h": {"p": [1]}, "j": ["s"], "d": "1000000 s"}
    typed = arguments(target, table, "t", problems)
    again = round_trip(target, typed)
    assert again == {"a": 1, "c": (1, 2), **typed}
    assert round_trip(target, again) == again
    assert resolved(target, {})["d"] == "15 s"


@pytest.mark.parametrize(
    ("kind", "default"),
    [
        (bool, 1),  # annotations in other packages are sometimes wrong
        (int, "64"),
        (Any, Path("a")),  # without a type it would come back as a string
        (Any, Colour.RED),
        (Any, (1, 2)),
        (tuple[Any, ...], (None, 1)),
        (dict[str, Any], {"a": torch.nn.SiLU}),
        (Any, torch.float32),
    ],
)
def test_a_default_that_cannot_be_read_back_is_left_out(kind, default):
    target = taking(kind)
    target.__defaults__ = (default,)
    assert resolved(target, {}) == {}


def test_a_default_factory_is_left_out():
    assert resolved(define(type("K", (), {"__annotations__": {"a": int}, "a": field(factory=int)})), {}) == {}
