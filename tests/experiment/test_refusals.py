"""Each key of a config refuses what it cannot take: in one line, with its place and what was given or is expected.

The wrong values are made from the type and the limits of each key of each table, plugin and part. What a key must be
beside another one is tested with its class. docs/reference/config.md has the limits, so that none changes unseen.
"""

import itertools
import math
import types
import typing
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import pytest
import tomli_w
from attrs import define

from hookdiff import ConfigError, Every, PluginError, load_config
from hookdiff.diffusion import Diffusion, Sampling
from hookdiff.encoding import Encoder
from hookdiff.experiment.config import SECTIONS, RunConfig
from hookdiff.loop.hookspecs import declaration_of
from hookdiff.options.choices import Choice, parts, path_of
from hookdiff.options.fields import limits_of, one_of
from hookdiff.options.fitted import is_fitted
from hookdiff.options.imports import import_object, installed
from hookdiff.options.structure import Problems, arguments, described, fields_of, hints_of, missing, parameters
from tests.conftest import check_facts
from tests.first_party import KINDS as ALL_KINDS

# Aim has no package for the newest Python.
KINDS = {name: kind for name, kind in ALL_KINDS.items() if all(map(find_spec, declaration_of(kind).needs))}

Wrong = tuple[Any, *tuple[str, ...]]  # a value, and facts of the message about it

NAN, INF = math.nan, math.inf
BASE: dict[str, Any] = {"run": {"steps": 1, "plugins": []}, "data": {"source": "digits"}, "model": {"use": "unet"}}
# Values of keys without a default.
NEEDED: dict[str, Any] = {"shift": 2.0, "period": 5, "milestones": [5], "reference": 5, "data": []}
NEEDED |= dict.fromkeys(("path", "root", "name"), "x")
# Values, as a message shows them, and the types that they fit.
LISTS = {tuple[str, ...], list[str], tuple[str | int, ...]}
VALUES: list[tuple[Any, str, set[Any]]] = [
    (True, "True", {bool}),
    (5, "5", {int, float, Every}),
    (1.5, "1.5", {float}),
    (2**64, str(2**64), {float, Every}),
    (10**400, f"1{'0' * 199}", set()),
    ("no such", "'no such'", {str}),
    ("a\0b", repr("a\0b"), set()),
    (["no such"], "'no such'", LISTS),
    ([1, True], "True", set()),
    ([[]], "[]", set()),
    ({"a": "no such"}, "'no such'", {dict[str, str], dict[str, Any]}),
]
WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string", Every: "steps (500)"}
NO_INTERVALS = [[2, 1], [-1, 1], [0.0, NAN]]

# What keys with a function of their own as the validator refuse, and what they take.
OWN: dict[str, tuple[list[Any], list[Any]]] = {
    "run.name": (["", ".", "..", "/x", "../x", "a/../b"], ["a/b"]),
    "run.max_time": (["2 epochs", 5], ["3 h", 0]),
    "run.micro_batch": ([0, -1, "aut"], [1, "auto"]),
    "run.threads": ([0, -1, "aut"], [1, "auto"]),
    "data.image_size": ([1, 40_000, [], [64, 1]], [2, 64, [32, 64]]),
    "data.buckets": ([[], ["80"]], [False]),
    "data.bucket_step": ([0, -1], [1, 8]),
    "data.channels": ([2], [1, 3]),
    "data.resize": ([1], []),
    "data.background": (["whit"], ["#ff8000", "white"]),
    **dict.fromkeys(("data.caption", "data.prefix", "data.suffix"), (["a\0", "\x04:\x04"], ["a, ", " \n"])),
    "data.color_jitter": ([[0, 0, 0, 1], [-1, 0, 0, 0], [0, NAN, 0, 0], [0, 0, INF, 0]], [[2, 1, 1, 0.5]]),
    "data.held_out": ([1.0, -1, -0.5, NAN], [0, 0.5, 7]),
    "model.start_from": ([""], ["x"]),
    "model.start_partial": ([True], [False]),
    "optimizer.rates": ([{"a": -1.0}, {"a": NAN}, {"a": INF}], [{"a": 0.0}, {"a": 2}]),
    "diffusion.prediction": (["epsilon"], ["sample"]),
    "diffusion.times": ([], ["log_normal"]),
    "diffusion.data_mean": ([[0.1, NAN]], [[0.1, -0.1]]),
    "diffusion.data_std": ([[1.0, NAN], [1.0, 0]], [[0.1, 0.2]]),
    "diffusion.label_dropout": ([{"captoin": 0.1}, {"all": 2.0}], [{"all": 0.1, "labels": 0.0}]),
    "diffusion.conditions": ([["noise"], ["a", "labels"], ["timesteps"]], [["a"]]),
    "sampling.guidance.interval": (NO_INTERVALS, [[0, INF], [1, 1]]),
    "plugins.autoguidance.interval": (NO_INTERVALS, [[0, INF], [1, 1]]),
    "plugins.clip.rule.min_norm": ([2.0], [1.0]),
    "plugins.clip.rule.start": ([2.0], [1.0]),
    "plugins.compile.backend": ([""], ["eager"]),
    "plugins.ema.decay": ([[], [0.9, 1.0]], [[0.9, 0.99]]),
    "plugins.ema.half_life": ([[], INF], [[1, 1e9]]),
    "plugins.ema.std": ([[], [0.05, 0.3]], [[0.05, 0.28]]),
    "plugins.fid.time_budget": (["3 epochs", 5], ["3 h", 0]),
    "plugins.fid.metrics": ([["fid"]], [["kid"]]),
    "plugins.lr.warmup": ([1.5], [5]),
    "plugins.lr.schedule.milestones": ([[], [1.5], [9, 5], [9, 0.5, 8], [0.5, 0.2], [0, 1]], [[0.5, 5]]),
    "plugins.lr.schedule.length": ([1.5], [5]),
    "plugins.nan.folder": (["", ".", "..", "/x", "../x", "a/../b"], ["a/b"]),
    "plugins.report.goals": ([["fd"], ["fd=x"], ["=1"], ["fd=nan"]], [["fd/digits=0.4"]]),
    "plugins.samples.denoising": ([1], [2]),
    "plugins.samples.interpolation": ([1], [2]),
    "plugins.samples.guidance_scales": ([[INF], [1.0, NAN]], []),
    "plugins.samples.sizes": ([["80"], ["80x48", "0x8"]], [["80x48"]]),
    "plugins.spectral.layers": ([[]], [["a"]]),
}


@define(frozen=True)
class Table:
    """A table of a config, and the class or function that it configures."""

    place: str
    target: Any
    fixed: tuple[tuple[str, Any], ...] = ()  # what the config has beside the keys of the table: keys and values
    shared: bool = False  # whether only some arguments of the target are keys: those that have a help

    def __str__(self) -> str:
        uses = [str(value) for key, value in self.fixed if key != "run.plugins"]
        return " ".join([self.place, *uses, *[self.target.__name__] * self.shared])

    def names(self) -> list[str]:
        return described(self.target) if self.shared else list(parameters(self.target))

    def config(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return a config with these keys in the table."""
        config = {name: dict(table) for name, table in BASE.items()}
        keys = {f"{self.place}.{name}".lstrip("."): value for name, value in given.items()}
        for key, value in (*self.fixed, *keys.items()):
            *outer, last = key.split(".")
            table: Any = config
            for name in outer:
                table = table.setdefault(name, {})
            table[last] = value
        return config

    def problems(self, path: Path, given: dict[str, Any]) -> dict[str, str]:
        """Return the problems of a config with these keys in the table: texts by place."""
        path.write_text(tomli_w.dumps(self.config(given)))
        tops = {key.partition(".")[0] for key in (self.place, *given)}
        others = {"data", "model", "optimizer"} - tops  # reading them takes most of the time
        try:
            load_config(path, without=others)
        except ConfigError as error:
            first, *lines = str(error).split("\n")
            check_facts(first, path, len(lines))
            found = (line.removeprefix("  ").partition(": ") for line in lines)
            return {place: text for place, _, text in found if "steps or epochs" not in text}  # which [run] adds
        return {}

    def problems_of(self, given: dict[str, Any]) -> dict[str, str]:
        """Return the problems that reading the table alone finds, in the same form."""
        problems = Problems()
        arguments(self.target, given, self.place, problems)
        return {place: text for place, _, text in (line.partition(": ") for line in problems.found)}

    def with_needed(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return `given` and the keys without a default."""
        return {name: NEEDED[name] for name in missing(self.target, given) if name in self.names()} | given


def tables() -> Iterator[Table]:
    """Yield all tables: those of the core, of each plugin, source, model and optimizer, and of each part."""
    yield Table("run", RunConfig)
    for section in SECTIONS:
        kind = section.table if section.key == "use" else section.key
        published = [name.partition(".")[2] for name in installed("hookdiff.parts") if name.startswith(f"{kind}.")]
        for name in (*(name for name in section.known if name.islower()), *published):
            path = section.known.get(name) or path_of(kind, (), name)
            if not is_fitted(target := import_object(path, name)):  # its keys depend on a folder
                yield Table(section.table, target, ((f"{section.table}.{section.key}", name),))
        yield from (Table(section.table, shared, shared=True) for shared in section.shared)
    for use, part in parts(Encoder).items():
        yield Table("data.encode.image", part, (("data.encode.image.use", use),))
    seen = set[type[Choice]]()
    yield from with_parts(Table("diffusion", Diffusion), seen)
    yield from with_parts(Table("sampling", Sampling), seen)
    for name, plugin in KINDS.items():
        yield from with_parts(Table(f"plugins.{name}", plugin, (("run.plugins", [name]),)), seen)


def with_parts(table: Table, seen: set[type[Choice]]) -> Iterator[Table]:
    yield table
    for name, hint in hints_of(table.target).items():
        for kind in set(choices_of(hint)) - seen:
            seen.add(kind)
            place = f"{table.place}.{name}"
            for use, part in parts(kind).items():
                yield from with_parts(Table(place, part, (*table.fixed, (f"{place}.use", use))), seen)


def kinds_of(hint: Any) -> list[Any]:
    """Return the types that a value may have in TOML."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return [kind for kind in (typing.get_args(hint) if is_union else [hint]) if kind is not types.NoneType]


def choices_of(hint: Any) -> list[type[Choice]]:
    return [kind for kind in kinds_of(hint) if isinstance(kind, type) and issubclass(kind, Choice)]


def misspelt(name: str) -> str:
    return name + name[-1]


def of_wrong_type(hint: Any) -> Iterator[Wrong]:
    """Yield values that are not of the type, or are no name that it knows."""
    for choice in choices_of(hint):
        for name, part in parts(choice).items():
            yield misspelt(name), f"did you mean {name!r}?"
            needed = {key: NEEDED[key] for key in missing(part, {})}
            yield {"use": name, "no_such_key": 1, **needed}, f"known: {', '.join(parameters(part)) or 'none'}"
        yield from ((value, repr(value)) for value in (True, 3, [name]))
        yield {"use": 3}, "3"
    kinds = kinds_of(hint)
    for table in (kind for kind in kinds if typing.get_origin(kind) is Mapping):
        (_, of_each) = typing.get_args(table)
        yield from (({"a": value}, *facts) for value, *facts in of_wrong_type(of_each))
        yield from ((value, "expected a table") for value, *_ in VALUES if not isinstance(value, dict))
        return
    is_short = any(typing.get_origin(kind) is tuple and ... not in typing.get_args(kind) for kind in kinds)
    for value, shown, fitting in () if choices_of(hint) or Any in kinds else VALUES:
        if not fitting & {*kinds}:
            yield value, WORDS.get(hint, "expected"), shown if not is_short else ""  # which has the lengths of lists
    for name in typing.get_args(hint) if typing.get_origin(hint) is Literal else ():
        if isinstance(name, str):
            yield misspelt(name), f"did you mean {name!r}?"


def beside_limits(target: Any, name: str) -> tuple[list[Wrong], list[Any]]:
    """Return what a validator only just refuses, and what it only just takes."""
    option, kinds = fields_of(target).get(name), kinds_of(hints_of(target)[name])
    has_floats = option and {float, tuple[float, ...]} & {*kinds}
    wrong, right = [(NAN, "nan")] if has_floats else list[Wrong](), list[Any]()
    for way, limit in limits_of(option.validator) if option else ():
        is_whole = int in kinds
        if math.isinf(limit):
            wrong += [(limit, "inf")] * (way in "<>")
            continue
        limit, step = (limit, 1) if is_whole else (float(limit), 1e-3 * max(abs(limit), 1))
        step = -step if ">" in way else step
        outer, inner = (limit + step, limit) if "=" in way else (limit, limit - step)
        wrong.append((outer, f": {outer if is_whole else format(outer, 'g')}"))
        right.append(inner)
    if option and hasattr(option.validator, "options"):  # of in_
        names = [one for one in option.validator.options if isinstance(one, str)]
        wrong += [(misspelt(one), repr(misspelt(one))) for one in names]
    if option and isinstance(option.validator, one_of):
        wrong += [(misspelt(one), f"did you mean {one!r}?") for one in option.validator.names]
        right += option.validator.names
    if not {int, float, str} & {*kinds}:  # a list of numbers
        wrong, right = [([value], *facts) for value, *facts in wrong], [[value] for value in right]
    return wrong, right


TABLES = [table for table in tables() if table.names()]
every_table = pytest.mark.parametrize("table", TABLES, ids=str)


def rounds(wrong: dict[str, list[Wrong]]) -> Iterator[dict[str, Wrong]]:
    """Yield wrong values of all keys together until each value was given once: all problems are reported at once."""
    for values in itertools.zip_longest(*wrong.values()):
        yield {name: value for name, value in zip(wrong, values, strict=True) if value}


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the configs are written: in one folder, because a new one is searched for plugins."""
    return tmp_path_factory.mktemp("configs") / "bad.toml"


@every_table
def test_wrong_values_are_refused_with_their_key(table: Table, bad: Path) -> None:
    hints = hints_of(table.target)
    wrong = {
        name: [
            *of_wrong_type(hints[name]),
            *beside_limits(table.target, name)[0],
            *((value,) for value in OWN.get(f"{table.place}.{name}", ([],))[0]),
        ]
        for name in table.names()
    }
    for number, given in enumerate(rounds(wrong)):
        values = table.with_needed({name: value for name, (value, *_) in given.items()})
        found = table.problems_of(values) if number else table.problems(bad, values)
        named = {name: [place for place in found if f"{place}.".startswith(f"{table.place}.{name}.")] for name in given}
        assert all(len(places) == 1 for places in named.values()), (values, found)
        assert {place for places in named.values() for place in places} == found.keys()
        for name, (_, *facts) in given.items():
            assert all(fact in found[named[name][0]] for fact in facts), (facts, found[named[name][0]])


@every_table
def test_what_is_just_right_is_taken(table: Table) -> None:
    for name in table.names():
        for value in beside_limits(table.target, name)[1] + OWN.get(f"{table.place}.{name}", ([], []))[1]:
            assert table.problems_of({name: value}) == {}


@every_table
def test_a_class_refuses_the_same_values_by_name(table: Table) -> None:
    """A script gets the errors of the config."""
    needed = {name: NEEDED[name] for name in missing(table.target, {})}
    hints = hints_of(table.target)
    for name in fields_of(table.target):
        wrong: list[Wrong] = [(value,) for value in OWN.get(f"{table.place}.{name}", ([],))[0]]
        wrong += [(value, name, *facts) for value, *facts in beside_limits(table.target, name)[0]]
        uses = [use for choice in choices_of(hints[name]) for use in parts(choice)]
        wrong += [(misspelt(use), misspelt(use), f"did you mean {use!r}?") for use in uses]
        for value, *facts in wrong:
            with pytest.raises((ValueError, TypeError, PluginError)) as caught:
                table.target(**needed | {name: value})
            assert all(fact in str(caught.value) for fact in facts), (facts, caught.value)


@every_table
def test_misspelt_keys_are_refused_with_the_nearest_and_all_that_are_known(table: Table, bad: Path) -> None:
    given = table.with_needed({misspelt(name): 1 for name in table.names()})
    found = table.problems(bad, given)
    for name in table.names():
        check_facts(found[f"{table.place}.{misspelt(name)}"], f"did you mean {name!r}?", *table.names())


@pytest.mark.parametrize("table", [table for table in TABLES if table.place != "run"], ids=str)
def test_keys_without_a_default_are_asked_for(table: Table, bad: Path) -> None:
    needed = [name for name in missing(table.target, {}) if name in table.names()]
    found = table.problems(bad, {})
    assert len(found) == bool(needed)
    for text in found.values():
        check_facts(text, *needed)


@pytest.mark.parametrize("place", [*BASE, "diffusion", "optimizer", "sampling", *(f"plugins.{name}" for name in KINDS)])
def test_what_is_no_table_is_refused(place: str, bad: Path) -> None:
    fixed = [("run.plugins", [place.partition(".")[2]])] if "." in place else []
    *outer, name = place.split(".")
    found = Table(".".join(outer), object, tuple(fixed)).problems(bad, {name: 3})
    check_facts(found[place], f"[{place}]", 3)


def test_each_validator_is_known_here() -> None:
    """A function that checks a value cannot be read: its wrong values are written above."""
    own = set()
    for table in TABLES:
        for name, option in fields_of(table.target).items():
            parts_of = [option.validator, *getattr(option.validator, "_validators", ())]
            own |= {f"{table.place}.{name}" for one in parts_of if isinstance(one, types.FunctionType)}
    assert own <= OWN.keys()
    assert OWN.keys() <= {f"{table.place}.{name}" for table in TABLES for name in table.names()}
