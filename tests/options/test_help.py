"""The help of every key, and the tables of the docs that are made from it."""

import math
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field
from attrs.validators import and_, deep_iterable, ge, gt, le, lt, optional

from hookdiff import Feed
from hookdiff.diffusion import Diffusion, Sampling
from hookdiff.experiment.config import OPTIMIZERS, SECTIONS, SOURCES, RunConfig
from hookdiff.options import Choice, about, between, name_of, parts
from hookdiff.options.help import keys, plain_lines
from hookdiff.options.imports import import_object, installed
from tests.options.test_choices import Shape, Square

DOCS = Path(__file__).parents[2] / "docs"
SCRIPT = runpy.run_path(str(DOCS / "refresh.py"))
MADE_FROM = {Feed: {"data"}}  # parts that other keys of the table describe


def configured() -> dict[str, Any]:
    """Return each class and function of hookdiff that has keys in a config, by a name for messages."""
    core = {name: import_object(path, name) for name, path in SOURCES.items() if path.startswith("hookdiff.")}
    shared = {kind.__name__: kind for section in SECTIONS for kind in section.shared}
    published = {
        entry.name: entry.load()
        for group in ("hookdiff.parts", "hookdiff.plugins")
        for (entry, *_) in installed(group).values()
        if entry.dist and entry.dist.name == "hookdiff" and not entry.name.startswith("features.")  # as other choices
    }
    return {"run": RunConfig, "diffusion": Diffusion, "sampling": Sampling, **shared, **core, **published}


def without_help(where: str, target: Callable[..., Any], seen: set[type[Choice]]) -> Iterator[str]:
    """Yield the keys of `target`, and the options of the parts that they choose, that have no help."""
    for key in keys(target):
        if not key.help and key.name not in MADE_FROM.get(target, ()):
            yield f"{where}.{key.name}"
        if key.kind and key.kind not in seen:
            seen.add(key.kind)
            for part in parts(key.kind).values():
                yield from without_help(f"{key.kind.kind} {name_of(part)}", part, seen)


def test_every_key_has_its_help() -> None:
    seen: set[type[Choice]] = set()
    lacking = [key for name, target in configured().items() for key in without_help(name, target, seen)]
    assert not lacking, ", ".join(lacking)


def test_the_tables_of_the_docs_are_those_of_the_classes() -> None:
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text("utf-8")
        assert text == SCRIPT["refresh"](text), f"{page.relative_to(DOCS)} is out of date: run `python docs/refresh.py`"


def test_the_config_reference_has_every_table_and_every_name() -> None:
    page = (DOCS / "reference" / "config.md").read_text("utf-8")
    documented = [import_object(path, path) for path in re.findall(r"^<!-- keys of (\S+)", page, re.M)]
    assert [name for name, target in configured().items() if keys(target) and target not in documented] == []
    headings = re.findall(r"^##+ (.+)$", page, re.M)
    assert {"[run]", "[data]", "[model]", "[diffusion]", "[optimizer]", "[sampling]", "[plugins.progress]"} <= {
        *headings
    }
    parts = [name.split(".", 1) for name in installed("hookdiff.parts")]
    published = [name for kind, name in parts if kind != "export"]  # which a command names, and no key
    names = (*SOURCES, *OPTIMIZERS, *published)
    assert [name for name in names if f'"{name}"' not in page and f"| `{name}` |" not in page] == []


@define
class Drawing:
    shape: Shape = field(default=Square(), metadata=about("what is drawn"))
    colour: str | None = field(default=None, metadata=about("its colour"))
    size: float = field(metadata=about("its size"))
    state: int = field(init=False)

    @size.default
    def _size(self) -> float:
        return 1.0


def drawn(size: int, name: str = "x", filled: bool = False) -> None:
    """Draw.

    Args:
        size: its size, in two
            lines.
        name: its name

    Returns:
        other: nothing.
    """


def test_the_keys_of_a_class_and_of_a_function() -> None:
    table = [(key.name, key.default, key.help) for target in (Drawing, drawn) for key in keys(target)]
    assert table == [
        ("shape", '"square"', "what is drawn"),
        ("colour", "", "its colour"),
        ("size", "", "its size"),
        ("size", "", "its size, in two lines"),
        ("name", '"x"', "its name"),
        ("filled", "false", ""),
    ]


@pytest.mark.parametrize(
    ("validator", "shown"),
    [
        (ge(1), "(at least 1)"),
        (and_(ge(0), lt(1)), "(at least 0, below 1)"),
        (optional([ge(20), le(1_000_000)]), "(20 to 1,000,000)"),
        (deep_iterable(and_(gt(0), le(0.25))), "(above 0, at most 0.25)"),
        (between(0, 1e6), "(0 to 1,000,000)"),
        (optional(between(0, 0.95, open_ends=True)), "(above 0, below 0.95)"),
        (between(0, math.inf), "(at least 0)"),
    ],
)
def test_the_range_of_a_number_is_shown(validator: Any, shown: str) -> None:
    option = field(default=None, validator=validator, metadata=about("it"))
    (key,) = keys(define(type("Ranged", (), {"__annotations__": {"it": Any}, "it": option})))
    assert key.help == f"it {shown}"


def test_golden_tables() -> None:
    assert SCRIPT["markdown"](Drawing, frozenset({"colour", "size"})) == (
        "| key | default | |\n|---|---|---|\n"
        '| `shape` | `"square"` | what is drawn |\n'
        "\n`shape` is one of these, or `module:Name`:\n\n"
        "| use | option | default | |\n|---|---|---|---|\n"
        "| `square` | | | Four equal sides. Nothing else |\n"
        "| | `side` | `1.0` | length of a side (cm, above 0) |\n"
        "| `circle` | | | All points at one distance |\n"
        "| | `radius` | `1.0` |  |\n"
        "| | `centre` | `[1.0, 2.5]` |  |\n"
    )
    assert list(plain_lines(Drawing)) == [
        '  shape = "square"            what is drawn',
        "    square                    Four equal sides. Nothing else (side = 1.0)",
        "    circle                    All points at one distance (radius = 1.0, centre = [1.0, 2.5])",
        "  colour                      its colour",
        "  size                        its size",
    ]


def test_refresh_makes_only_the_tables_anew() -> None:
    page = f"before\n\n<!-- keys of {__name__}:Drawing without shape, size -->\nold\n<!-- end -->\n\nafter\n"
    refreshed = SCRIPT["refresh"](page)
    assert refreshed.startswith("before\n\n<!-- keys of ")
    assert refreshed.endswith("\n<!-- end -->\n\nafter\n")
    assert "old" not in refreshed
    assert "| `colour` |  | its colour |" in refreshed
    assert SCRIPT["refresh"](refreshed) == refreshed
