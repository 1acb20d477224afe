import sys
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from attrs import define, field
from attrs.validators import gt

from hookdiff import PluginError, diffusion, nearest
from hookdiff.options import about
from hookdiff.options.choices import Choice, find, import_object, name_of
from tests.conftest import refused


class Shape(Choice):
    kind = "shape"


@define(frozen=True)
class Square(Shape):
    """Four equal sides. Nothing else."""

    side: float = field(default=1.0, validator=gt(0), metadata=about("length of a side", "cm"))


@define(frozen=True)
class Circle(Shape):
    """All points at one distance."""

    radius: float = 1.0
    centre: tuple[float, float] = (1.0, 2.5)


Shape.known = {"square": Square, "circle": Circle}


KINDS = [diffusion.Process, diffusion.Schedule, diffusion.Prediction, diffusion.Weighting, diffusion.Times]
KINDS += [diffusion.Loss, diffusion.Solver, diffusion.Spacing, diffusion.Clipping, diffusion.Guidance]
OPTIONS: dict[type, dict[str, Any]] = {diffusion.Shifted: {"shift": 2.0}}  # options that have no default
PARTS = [part for kind in KINDS for part in kind.known.values()]

MINE = """
from attrs import define
from tests.options.test_choices import Shape

@define(frozen=True)
class Mine(Shape):
    size: float = 3.0

class Outer:
    @define(frozen=True)
    class Inner(Shape):
        size: float = 4.0
"""


@pytest.fixture
def mine(install: Callable[..., None]) -> None:
    """Install the modules hd_mine and hd_other without an entry point."""
    install("hookdiff-modules", hd_mine=MINE, hd_other=MINE)


def test_a_choice_is_an_object_a_name_or_a_table() -> None:
    square = Square(2.0)
    assert Shape.of(square) is square
    assert Shape.of("square") == Square()
    assert Shape.of({"use": "circle", "radius": 3.0}) == Circle(3.0)
    table = {"use": "circle"}
    Shape.of(table)
    assert table == {"use": "circle"}  # the table of the caller is not changed


def test_a_table_without_use_needs_a_default() -> None:
    with refused(PluginError, "`use`", "square", "circle"):
        Shape.of({"side": 3.0})
    assert diffusion.Process.of({"shift": 2.0}) == diffusion.Flow(2.0)
    assert diffusion.Guidance.of({"scale": 2.0}) == diffusion.ClassifierFree(2.0)


@pytest.mark.parametrize(
    ("given", "known", "expected"),
    [
        ("bfloat16", ["float32", "bf16"], "; did you mean 'bf16'?"),
        ("emo", ["memory", "ema"], "; did you mean 'ema'?"),
        ("DDPM", ["ddim", "ddpm"], "; did you mean 'ddpm'?"),
        ("xyz", ["ab"], ""),
        ("", [], ""),
    ],
)
def test_the_nearest_name_shares_most_and_begins_alike(given: str, known: list[str], expected: str) -> None:
    assert nearest(given, known) == expected


def test_a_class_of_the_user_is_found_by_its_path(mine: None) -> None:
    part = Shape.of({"use": "hd_mine:Mine", "size": 5.0})
    assert (type(part).__name__, part.size, part.use) == ("Mine", 5.0, "hd_mine:Mine")
    inner = Shape.of("hd_mine:Outer.Inner")
    assert (inner.size, inner.use) == (4.0, "hd_mine:Outer.Inner")


@pytest.mark.parametrize(
    ("use", "facts"),
    [
        ("sqare", ["'sqare'", "'square'", "circle", "module:Name"]),  # the nearest, and those that are known
        ("cirle", ["'cirle'", "'circle'", "square", "module:Name"]),
        *((use, [repr(use), "square", "circle"]) for use in (7, 1.5, True, ["square"], "")),  # no names
        ("hd_mine:Min", ["shape", "hd_mine", "'Min'", "'Mine'"]),
        ("hd_mine:Outer.Iner", ["shape", "hd_mine", "'Outer.Iner'"]),
        ("hd_nowhere:Mine", ["shape", "hd_nowhere"]),
        (":Mine", ["shape"]),
        ("hd_mine:", ["shape", "hd_mine"]),
        ("hd_mine:Outer", ["hd_mine:Outer", "shape", "Shape"]),
        ("hd_mine:define", ["hd_mine:define", "shape", "Shape"]),
        ("hookdiff.diffusion:Euler", ["hookdiff.diffusion:Euler", "shape", "Shape"]),
    ],
)
def test_what_names_no_class_of_the_kind_is_refused(mine: None, use: object, facts: list[str]) -> None:
    with refused(PluginError, *facts):
        find(Shape, use)


def test_a_published_class_is_known_by_its_name(install: Callable[..., None]) -> None:
    install("hookdiff-mine", {"shape.mine": "hd_mine:Mine"}, group="hookdiff.parts", hd_mine=MINE)
    part = Shape.of({"use": "mine", "size": 5.0})
    assert (part.size, part.use) == (5.0, "mine")
    assert Shape.of("hd_mine:Mine").use == "mine"
    with refused(PluginError, "'mime'", "'mine'", "square", "circle"):
        find(Shape, "mime")
    with refused(PluginError, "'mine'", "uniform"):
        find(diffusion.Weighting, "mine")


def test_finding_a_class_imports_no_other(install: Callable[..., None]) -> None:
    install("hookdiff-broken", {"shape.broken": "hd_broken:Mine"}, group="hookdiff.parts", hd_broken="1 / 0\n")
    assert Shape.of("square").use == "square"
    with refused(PluginError, "'brokn'", "'broken'"):
        find(Shape, "brokn")
    assert "hd_broken" not in sys.modules


def test_two_classes_published_under_one_name_are_both_reported(install: Callable[..., None]) -> None:
    install("hookdiff-one", {"shape.mine": "hd_mine:Mine"}, group="hookdiff.parts", hd_mine=MINE)
    install("hookdiff-two", {"shape.mine": "hd_other:Mine"}, group="hookdiff.parts", hd_other=MINE)
    with refused(
        PluginError, "shape", "'mine'", "hd_mine:Mine", "hookdiff-one 1.0", "hd_other:Mine", "hookdiff-two 1.0"
    ):
        find(Shape, "mine")
    assert Shape.of("hd_other:Mine").use == "hd_other:Mine"  # module:Name still finds the class


def test_a_built_in_name_that_a_package_claims_is_refused(install: Callable[..., None]) -> None:
    install("hookdiff-mine", {"shape.square": "hd_mine:Mine"}, group="hookdiff.parts", hd_mine=MINE)
    with refused(PluginError, "shape", "'square'", "built in", "hookdiff-mine 1.0", "hd_mine:Mine"):
        find(Shape, "square")
    assert Shape.of("circle").use == "circle"
    assert Shape.of("hd_mine:Mine").use == "hd_mine:Mine"  # not the name of another


@pytest.mark.parametrize("part", PARTS, ids=name_of)
def test_every_part_is_found_by_its_name_and_compares_by_its_options(part: type[Choice]) -> None:
    options = OPTIONS.get(part, {})
    instance = part(**options)
    (kind,) = (kind for kind in KINDS if issubclass(part, kind))
    assert find(kind, instance.use) is part
    assert kind.of({"use": instance.use, **options}) == instance
    assert hash(kind.of({"use": instance.use, **options})) == hash(instance)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        instance.anything = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_the_default_of_a_kind_is_known(kind: type[Choice]) -> None:
    assert kind.default is None or kind.default in kind.known
    assert len({kind.kind for kind in KINDS}) == len(KINDS)


def test_a_missing_package_is_named_with_the_extra_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)  # so Python finds no such package
    with refused(PluginError, "diffusers", "pip install 'hookdiff[diffusers]'"):
        import_object("diffusers:UNet2DModel", "model")
    with refused(PluginError, "nowhere_to_be_found") as caught:
        import_object("nowhere_to_be_found:Net", "model")
    assert "pip install" not in str(caught.value)
