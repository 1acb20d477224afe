"""The versions that a run records, by distribution."""

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

from hookdiff.options.software import versions
from hookdiff_ema import EMA


def test_a_plugin_is_known_by_the_module_of_its_class(install: Callable[..., None]) -> None:
    """A script may give any name, and `module:Class` needs no entry point."""
    install("hd-entry", {"mine": "hd_entry:Mine"}, hd_entry="class Mine:\n    pass\n")
    install("hd-claims", {"ema": "hd_claims:EMA"}, hd_claims="class EMA:\n    pass\n")
    entry, claims = (importlib.import_module(name) for name in ("hd_entry", "hd_claims"))
    assert set(versions([entry.Mine()])) == {"python", "torch", "hookdiff", "hd-entry"}
    assert set(versions([claims.EMA(), EMA()])) == {"python", "torch", "hookdiff", "hd-claims"}
    assert set(versions([EMA()])) == {"python", "torch", "hookdiff"}


def test_a_plugin_of_an_installed_package_without_an_entry_point() -> None:
    recorded = versions([pytest.MonkeyPatch()])
    assert recorded["pytest"] == pytest.__version__


def test_a_local_package_is_not_one_that_another_distribution_has_of_its_name(
    install: Callable[..., None], tmp_path: Path
) -> None:
    class Local:
        pass

    install("hd-sloppy", group="other")
    (tmp_path / "site" / "hd_sloppy-1.0.dist-info" / "top_level.txt").write_text("tests\n")
    assert set(versions([Local()])) == {"python", "torch", "hookdiff"}


def test_a_plugin_of_a_script_has_no_version() -> None:
    class Local:
        __module__ = "__main__"

    assert set(versions([Local()])) == {"python", "torch", "hookdiff"}
