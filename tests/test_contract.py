"""Rules for all the sources: the calls of hooks, and the imports that each module may have."""

import ast
import functools
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import import_graph
import pytest

import hookdiff
from hookdiff.experiment.config import USUAL
from hookdiff.hookspecs import HOOK_NAMES, Hooks
from hookdiff.testing import toy_loop

CORE = Path(hookdiff.__file__).parent
ROOT = CORE.parent
if not (ROOT / "pyproject.toml").exists():
    pytest.skip("needs the sources", allow_module_level=True)

PUBLISHED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
ENTRIES = PUBLISHED["hookdiff.plugins"]
PACKAGES = sorted({re.split("[.:]", target)[0] for group in PUBLISHED.values() for target in group.values()})
SCRIPTS = {ROOT / "plugins" / "hookdiff_features" / "train_classifiers.py"}  # run by hand, never imported

MODULES = import_graph.files(ROOT)
CORE_FILES = sorted(CORE.rglob("*.py"))
PLUGIN_FILES = sorted(path for package in PACKAGES for path in (ROOT / "plugins" / package).rglob("*.py"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def fresh_python(code: str) -> set[str]:
    """Return the words that `code` prints in a new Python process."""
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(run.stdout.split())


def hook_calls(tree: ast.Module) -> Iterator[ast.Call]:
    """Yield the calls of `hook.NAME(...)` and `....hook.NAME(...)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if (isinstance(owner, ast.Name) and owner.id == "hook") or (
                isinstance(owner, ast.Attribute) and owner.attr == "hook"
            ):
                yield node


def imports(tree: ast.AST, at_run_time: bool = False) -> Iterator[tuple[str, str | None]]:
    """Yield each imported module and the name taken from it; `at_run_time` leaves out imports for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "an import says the whole name"
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif not (at_run_time and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield from imports(node, at_run_time)


def test_every_hook_is_called_as_its_spec_says() -> None:
    specs = {hook: list(inspect.signature(getattr(Hooks, hook)).parameters)[1:] for hook in HOOK_NAMES}
    called = set()
    for path in (*CORE_FILES, *PLUGIN_FILES):
        for call in hook_calls(parsed(path)):
            assert isinstance(call.func, ast.Attribute)
            hook, where = call.func.attr, f"{name(path)}:{call.lineno}"
            assert hook in specs, f"{where}: there is no hook {hook}"
            assert not call.args, f"{where}: hooks take keywords only"
            assert sorted(str(keyword.arg) for keyword in call.keywords) == sorted(specs[hook]), where
            called.add(hook)
    by_name = {"on_log", "on_images", "on_texts", "on_distributions", "on_event"}
    assert called | by_name == set(HOOK_NAMES)  # every hook is called; Log calls these by name


def test_the_core_knows_no_plugin() -> None:
    package = re.compile(rf"\b({'|'.join(PACKAGES)})\b")
    for path in CORE_FILES:
        found = package.search(path.read_text("utf-8"))
        assert found is None, f"{name(path)} names {found}"


# Names of plugins that the core also uses for something else, such as a logged value, with the files that use them.
OWN_USES = {
    "checkpoint": {"hookdiff/builtin/events.py"},  # kinds of events
    "compile": {"hookdiff/experiment/load.py"},  # a key of [sampling]
    "nan": {"hookdiff/builtin/events.py"},
    "loss": {"hookdiff/cli/summary.py", "hookdiff/diffusion/losses.py", "hookdiff/loop.py"},
    "lr": {
        "hookdiff/adamw.py",
        "hookdiff/experiment/optimizers.py",
        "hookdiff/models/optimizer_state.py",
    },  # the learning rate of a group of weights
    "memory": {"hookdiff/data/store.py"},
    "progress": {"hookdiff/builtin/events.py", "hookdiff/state.py"},
}


def test_the_core_looks_up_no_plugin_by_name() -> None:
    """But in the list of plugins that a config has unless it gives one."""
    for path in CORE_FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in ENTRIES:
                if name(path) == "hookdiff/experiment/config.py" and node.value in USUAL:
                    continue
                assert name(path) in OWN_USES.get(node.value, ()), f"{name(path)}:{node.lineno}: {node.value!r}"


def loop_class() -> ast.ClassDef:
    (loop,) = (node for node in parsed(CORE / "loop.py").body if isinstance(node, ast.ClassDef))
    return loop


def test_the_loop_and_its_step_are_short() -> None:
    assert len((CORE / "loop.py").read_text("utf-8").splitlines()) < 220
    (step,) = (node for node in loop_class().body if isinstance(node, ast.FunctionDef) and node.name == "run_step")
    assert step.end_lineno is not None
    assert step.end_lineno - step.lineno < 40


@functools.cache
def attributes_of_the_loop() -> set[str]:
    """Return the names of the attributes that `Loop.__init__` sets."""
    (init,) = (node for node in loop_class().body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    return {
        node.target.attr
        for node in init.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute)
    }


def assigned(tree: ast.Module) -> Iterator[ast.Attribute]:
    """Yield the attributes that are set or deleted on objects other than `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
                yield node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            owner, attribute, *_ = node.args
            if isinstance(attribute, ast.Constant):
                yield ast.Attribute(owner, attribute.value, lineno=node.lineno)


def is_a_loop(node: ast.expr) -> bool:
    return ast.unparse(node).rpartition(".")[2].strip("_") in ("loop", "saved")


@pytest.mark.parametrize("path", [*CORE_FILES, *PLUGIN_FILES], ids=name)
def test_only_the_loop_sets_its_attributes(path: Path) -> None:
    known = attributes_of_the_loop()
    assert {"net", "sampler", "config", "progress"} <= known
    for node in assigned(parsed(path)):
        assert not (node.attr in known and is_a_loop(node.value)), f"{name(path)}:{node.lineno}: {ast.unparse(node)}"


def test_attributes_of_a_loop_are_read_only() -> None:
    with toy_loop(steps=1) as loop:
        for attribute in (*attributes_of_the_loop(), "another"):
            with pytest.raises(AttributeError, match=f"Loop.{attribute}"):
                setattr(loop, attribute, None)


# Modules that plugins may import from, besides `hookdiff` itself: they have the names that few plugins need.
PUBLIC = {
    *("hookdiff.builtin", "hookdiff.data", "hookdiff.diffusion", "hookdiff.disk", "hookdiff.experiment"),
    *("hookdiff.models", "hookdiff.choices", "hookdiff.options", "hookdiff.cli.options", "hookdiff.findings"),
    *(
        "hookdiff.adamw",
        "hookdiff.adopted",
        "hookdiff.device_part",
        "hookdiff.evaluation",
        "hookdiff.gradients",
        "hookdiff.rehearsal",
    ),
    "hookdiff.structure",
    *(
        "hookdiff.data.arrays",
        "hookdiff.data.cache",
        "hookdiff.data.decode",
        "hookdiff.data.each",
        "hookdiff.data.formats",
        "hookdiff.data.items",
    ),
    *("hookdiff.data.labels", "hookdiff.data.source", "hookdiff.data.survey", "hookdiff.errors"),
    *("hookdiff.experiment.optimizers", "hookdiff.features", "hookdiff.fitting", "hookdiff.generation"),
    *("hookdiff.distribution", "hookdiff.events", "hookdiff.history", "hookdiff.machine", "hookdiff.mirroring"),
    *("hookdiff.pace", "hookdiff.pictures", "hookdiff.terminal"),
    *("hookdiff.hookspecs", "hookdiff.log", "hookdiff.models.init", "hookdiff.models.memory", "hookdiff.progress"),
    *("hookdiff.randomness", "hookdiff.ranks", "hookdiff.shards", "hookdiff.testing", "hookdiff.versions"),
    "hookdiff.weights",
}


@pytest.mark.parametrize("path", [path for path in PLUGIN_FILES if path not in SCRIPTS], ids=name)
def test_a_plugin_imports_only_public_names_and_its_own_package(path: Path) -> None:
    own = path.relative_to(ROOT / "plugins").parts[0]
    for module, taken in imports(parsed(path)):
        top = module.partition(".")[0]
        if module == "hookdiff":
            assert taken in hookdiff.__all__, f"{name(path)} takes {taken} from hookdiff"
        elif top == "hookdiff":
            assert module in PUBLIC, f"{name(path)} reaches into {module}"
        elif top.startswith("hookdiff"):
            assert top == own, f"{name(path)} imports {module}"


RANKS = {"hookdiff_ddp", "hookdiff_fsdp"}  # plugins with which several ranks train one model


@pytest.mark.parametrize("path", [*CORE_FILES, *PLUGIN_FILES], ids=name)
def test_torch_distributed_is_known_in_one_place(path: Path) -> None:
    if path == CORE / "ranks.py" or path.relative_to(ROOT).parts[1] in RANKS:
        return
    for node in ast.walk(parsed(path)):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [f"{node.module}.{one.name}" for one in node.names] if isinstance(node, ast.ImportFrom) else []
        names += [one.name for one in node.names] if isinstance(node, ast.Import) else []
        assert not any(one.startswith("torch.distributed") for one in names), f"{name(path)}:{node.lineno}"  # type: ignore[attr-defined]
        is_used = isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.distributed")
        assert not is_used, f"{name(path)}:{node.lineno}"


# The rooms of the core, lowest first: each room may import those before it. See docs/architecture.md.
ROOMS = [
    *("errors", "fitting", "readonly", "ranks", "shards", "pace", "terminal", "findings", "events"),
    *(
        "machine",
        "adamw",
        "distribution",
        "randomness",
        "options",
        "imports",
        "versions",
        "choices",
        "progress",
        "structure",
    ),
    *("dispatch", "disk", "pictures", "history", "data", "features", "objective", "sampling", "weights"),
    *("models", "diffusion"),
    *("adopted", "gradients", "log", "nonfinite", "state"),
    *("loop", "hookspecs", "defaults", "plugins"),
    *("device_part", "rehearsal", "generation", "sinks", "mirroring", "periodic", "evaluation", "testing"),
    *("builtin", "experiment", "cli", "__init__", "examples", "__main__"),
]
CIRCLE = {"loop", "hookspecs", "defaults", "plugins"}  # the other three import `Loop` for type checkers


def test_every_room_is_in_the_list() -> None:
    rooms = {path.relative_to(CORE).parts[0].removesuffix(".py") for path in CORE_FILES}
    assert rooms == set(ROOMS)


def test_the_docs_list_the_rooms_in_their_order() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)(/?)` \| .+ \|$", page, re.M)
    assert [room for room, _ in rows] == ROOMS
    assert all((CORE / room).is_dir() == bool(slash) for room, slash in rows)


@pytest.mark.parametrize("path", CORE_FILES, ids=name)
def test_a_room_imports_only_lower_rooms(path: Path) -> None:
    own = path.relative_to(CORE).parts[0].removesuffix(".py")
    at_run_time = {module for module, _ in imports(parsed(path), at_run_time=True)}
    for module in import_graph.imports(path, MODULES):
        other = import_graph.room(module)
        in_circle = {own, other} <= CIRCLE and (other != "loop" or module not in at_run_time)
        down = ROOMS.index(other) <= ROOMS.index(own)
        assert down or in_circle, f"{name(path)} imports {module}"


def test_there_is_only_one_circle_of_imports() -> None:
    found = [group for group in import_graph.circles(import_graph.file_graph(ROOT)) if len(group) > 1]
    assert found == [{f"hookdiff.{part}" for part in CIRCLE}]


def test_data_diffusion_and_models_are_imported_without_the_loop() -> None:
    modules = fresh_python("import sys, hookdiff.data, hookdiff.diffusion, hookdiff.models; print(*sys.modules)")
    assert {"hookdiff.data", "hookdiff.diffusion", "hookdiff.models"} <= modules
    assert not {"hookdiff.loop", "hookdiff.plugins", "hookdiff.experiment", *PACKAGES} & modules


def test_a_run_imports_only_the_packages_that_it_uses(tmp_path: Path) -> None:
    config = """
        [run]
        steps = 2
        batch_size = 4
        device = "cpu"
        plugins = ["clip"]
        [data]
        source = "digits"
        [model]
        use = "unet"
        channels = 8
        num_res_blocks = 1
        head_dim = 8
    """
    (tmp_path / "small.toml").write_text(config)
    code = f"""
import sys
from pathlib import Path
from hookdiff import build_loop, load_config
folder = Path({str(tmp_path)!r})
build_loop(load_config(folder / "small.toml"), folder / "run").run()
print(*sys.modules)
"""
    modules = fresh_python(code)
    assert (tmp_path / "run" / "config.toml").exists()
    assert {module.partition(".")[0] for module in modules if module.startswith("hookdiff_")} == {
        "hookdiff_clip",
        "hookdiff_muon",
        "hookdiff_networks",
    }
    asked_for = {"builtin.micro_batch", "models.memory"}
    assert not {f"hookdiff.{name}" for name in asked_for} & modules
    assert not {"torchvision", "aim", "safetensors.torch"} & modules


def test_every_module_has_a_docstring() -> None:
    for path in (*CORE_FILES, *PLUGIN_FILES):
        assert ast.get_docstring(parsed(path)), name(path)


def test_every_public_name_exists_and_has_a_docstring() -> None:
    for public in hookdiff.__all__:
        value = getattr(hookdiff, public)
        assert value.__doc__ or public in ("Reason", "Verdict", "hookimpl"), public
    assert len(hookdiff.__all__) <= 40


def test_public_names_are_imported_on_first_use() -> None:
    assert "torch" not in fresh_python("import sys, hookdiff, hookdiff.cli; hookdiff.UserError; print(*sys.modules)")


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Trainer"):
        hookdiff.Trainer  # noqa: B018
