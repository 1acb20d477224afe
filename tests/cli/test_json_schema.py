"""The schema of a config accepts and refuses what `load_config` does, but for what it cannot express."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tomli

from hookdiff import load_config
from hookdiff.cli.json_schema import config_schema
from hookdiff.cli.schema import FILE
from hookdiff.options.structure import hints_of
from tests.conftest import check_refused, mostly_wide, output
from tests.experiment.test_refusals import BASE, OWN, TABLES, Table, beside_limits, every_table, misspelt, of_wrong_type

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))
PLUGINS = sorted({table.place for table in TABLES if "plugins" in table.place})
PLACES = [*BASE, "diffusion", "optimizer", "sampling", *PLUGINS]


@pytest.fixture(scope="module")
def validator() -> Any:
    jsonschema.Draft7Validator.check_schema(schema := config_schema())
    return jsonschema.Draft7Validator(schema)


def cannot_be_expressed(value: Any) -> bool:
    """Return whether a refusal needs more than a type, a name or a limit: NaN, infinity, 65 bits, a zero byte."""
    if isinstance(value, list | dict):
        return any(map(cannot_be_expressed, value.values() if isinstance(value, dict) else value))
    if isinstance(value, str):
        return "\0" in value
    return isinstance(value, int | float) and (not math.isfinite(value) if isinstance(value, float) else value >= 2**63)


def wrong(table: Table, name: str) -> Iterator[Any]:
    """Yield the values that the table of bad configs has for a key, without those that a function refuses (`OWN`)."""
    values = [*of_wrong_type(hints_of(table.target)[name]), *beside_limits(table.target, name)[0]]
    yield from (value for value, *_ in values if not cannot_be_expressed(value))


FIRST = ("run", "data", "diffusion", "sampling", "plugins.lr", "plugins.ema", "plugins.clip")
tables = sorted(TABLES, key=lambda table: table.place not in FIRST)


@pytest.mark.parametrize("table", mostly_wide(sum(table.place in FIRST for table in TABLES), tables), ids=str)
def test_the_table_of_bad_configs_is_refused(table: Table, validator: Any) -> None:
    for name in table.names():
        bad = [{name: value} for value in wrong(table, name)] + [{misspelt(name): 1}]
        for given in bad:
            assert not validator.is_valid(table.config(table.with_needed(given))), given


@every_table
def test_what_is_just_right_is_accepted(table: Table, validator: Any) -> None:
    for name in table.names():
        for value in beside_limits(table.target, name)[1] + OWN.get(f"{table.place}.{name}", ([], []))[1]:
            found = validator.iter_errors(table.config(table.with_needed({name: value})))
            assert not [error.message for error in found if name in map(str, error.absolute_path)]


@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_table_is_refused(place: str, validator: Any) -> None:
    *outer, name = place.split(".")
    assert not validator.is_valid(Table(".".join(outer), object).config({name: 3}))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_accepted_whole_too(path: Path, validator: Any) -> None:
    validator.validate(tomli.loads(path.read_text("utf-8")))
    resolved = load_config(path).resolved()
    resolved["model"] = {"use": resolved["model"]["use"]}  # of the arguments some are the data's
    validator.validate(resolved)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"sampling": {"sampler": {"use": "ddim", "etta": 1}}}, ["'etta'"]),
        ({"sampling": {"sampler": "ddimm"}}, ["'ddimm'", "'ddim'"]),
        ({"model": {"use": "unett"}}, ["'unett'", "'unet'"]),
        ({"run": {"steps": 1, "plugins": ["emaa"]}}, ["'emaa'", "'ema'"]),
        ({"plugins": {"emaa": {}}}, ["'emaa'", "'ema'"]),
        ({"plugins": {"mine": {"x": 1}}, "run": {"steps": 1, "plugins": ["my:Mine"]}}, []),
        ({"model": {"use": "my:Net", "x": 1}}, []),
        ({"model": {"use": "pretrained", "path": "x", "of_its_class": 1}}, []),
        ({"sampling": {"sampler": {"use": "my:Sampler", "x": 1}}}, []),
    ],
)
def test_a_message_names_what_is_wrong_and_a_path_takes_any_options(
    changed: dict[str, Any], words: list[str], validator: Any
) -> None:
    messages = [error.message for error in validator.iter_errors(BASE | changed)]
    assert bool(messages) == bool(words)
    assert any(all(word in message for word in words) for message in messages) == bool(words)


@pytest.mark.wide
def test_the_schema_is_printed(hookdiff: Any, validator: Any) -> None:
    assert json.loads(output(hookdiff("schema"))) == validator.schema


def test_the_schema_is_written_beside_a_config_that_names_it(hookdiff: Any, validator: Any, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    shutil.copy(EXAMPLES[0], path)
    before = path.read_text()
    for _ in range(2):
        output(hookdiff("schema", "--into", path))
        assert path.read_text() == f"#:schema ./{FILE}\n{before}"
    assert json.loads((tmp_path / FILE).read_text()) == validator.schema
    check_refused(hookdiff("schema", "x.json", "--into", path), "--into")
