"""Rules for each plugin of this distribution; a new plugin is tested as soon as it has an entry point."""

from pathlib import Path
from typing import Any

import attrs
import pytest

from hookdiff.loop.hookspecs import declaration_of
from hookdiff.options.imports import installed
from hookdiff.testing import COMPANIONS, assert_any_order, assert_keeps_contract, assert_removable, assert_resumes
from tests.conftest import wide
from tests.first_party import COSTLY, KINDS, LOOP, OPTIONS, net

SHORT: dict[str, Any] = {**LOOP, "steps": 8}  # two epochs
CHANGES: dict[str, Any] = {
    "amp": "training",
    "clip": "training",
    "lora": "model",
    "lr": "training",
    "spectral": "model",
}


@pytest.mark.parametrize("name", [*sorted(KINDS.keys() - COSTLY), *wide(*sorted(COSTLY))])
class TestEveryPlugin:
    def make(self, name: str) -> Any:
        """Return a function that makes the plugin; skip the test if a package that the plugin needs is missing."""
        for module in declaration_of(KINDS[name]).needs:
            pytest.importorskip(module, reason=f"{name} needs the extra package {module}")
        return lambda: KINDS[name](**OPTIONS.get(name, {}))

    def test_a_resumed_run_equals_an_uninterrupted_one(self, name: str) -> None:
        # At the first update, at the end of an epoch, and in the middle of one.
        assert_resumes(self.make(name), at=(1, 4, 6), model=net(), **SHORT)

    @pytest.mark.wide
    def test_its_place_in_the_list_makes_no_difference(self, name: str) -> None:
        # Two plugins that change gradients are the same in both orders only up to rounding.
        others = {other: make for other, make in COMPANIONS.items() if (name, other) != ("clip", "limit")}
        assert_any_order(self.make(name), others=others, model=net(), **SHORT)

    def test_it_can_be_left_out_and_added(self, name: str) -> None:
        assert_removable(self.make(name), changes=CHANGES.get(name, "nothing"), model=net(), **SHORT)

    def test_it_keeps_the_contract(self, name: str) -> None:
        assert_keeps_contract(self.make(name), model=net(), **SHORT)


def test_each_is_an_attrs_class_with_a_docstring_that_compares_by_identity_and_needs_no_settings() -> None:
    for name, kind in KINDS.items():
        assert attrs.has(kind), name
        assert kind.__eq__ is object.__eq__, name
        assert len({kind(), kind()}) == 2
        assert kind.__doc__, name
        assert not kind.__doc__.startswith(f"{kind.__name__}(")  # a dataclass without a docstring gets such a text
        assert [each.name for each in attrs.fields(kind) if each.init and each.default is attrs.NOTHING] == [], name


def test_each_package_has_the_name_of_its_plugin_and_its_types() -> None:
    for name in KINDS:
        (entry,) = installed()[name]
        package = entry.value.partition(":")[0]
        assert package == f"hookdiff_{name}"
        assert (Path(__import__(package).__file__ or "").parent / "py.typed").exists(), name
