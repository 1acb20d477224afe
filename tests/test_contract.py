"""What holds for the sources as a whole: who calls which hook, and who may know whom."""

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import hookdiff
from hookdiff.hookspecs import HOOK_NAMES, Hooks

CORE = Path(hookdiff.__file__).parent
ROOT = CORE.parent
if not (ROOT / "pyproject.toml").exists():
    pytest.skip("needs the sources", allow_module_level=True)

ENTRIES = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["hookdiff.plugins"]
PACKAGES = sorted({target.partition(":")[0] for target in ENTRIES.values()})
SCRIPTS = {ROOT / "plugins" / "hookdiff_fid" / "train_digits.py"}  # run by hand, never imported

CORE_FILES = sorted(CORE.rglob("*.py"))
PLUGIN_FILES = sorted(path for package in PACKAGES for path in (ROOT / "plugins" / package).rglob("*.py"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def fresh_python(code: str) -> set[str]:
    """The words that `code` prints in a process of its own."""
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(run.stdout.split())


def hook_calls(tree: ast.Module) -> Iterator[ast.Call]:
    """Calls of `hook.NAME(...)` and `....hook.NAME(...)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if (isinstance(owner, ast.Name) and owner.id == "hook") or (
                isinstance(owner, ast.Attribute) and owner.attr == "hook"
            ):
                yield node


def imports(tree: ast.AST, at_run_time: bool = False) -> Iterator[tuple[str, str | None]]:
    """Modules and what is taken from each; with `at_run_time` those that only type checkers see are left out."""
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
    assert called == set(HOOK_NAMES)  # no hook that never fires


def test_the_core_knows_no_plugin() -> None:
    package = re.compile(rf"\b({'|'.join(PACKAGES)})\b")
    for path in CORE_FILES:
        found = package.search(path.read_text("utf-8"))
        assert found is None, f"{name(path)} names {found}"


# Names that the core has a use of its own for, and where: a folder, a number that is told, a part of the state.
OWN_USES = {
    "gradients": {"hookdiff/cli/check.py"},
    "loss": {
        "hookdiff/cli/selftest.py",
        "hookdiff/cli/summary.py",
        "hookdiff/diffusion/objective.py",
        "hookdiff/loop.py",
        "hookdiff/selftest/gaussian.py",
    },
    "lr": {"hookdiff/optimizers.py", "hookdiff/selftest/witness.py", "hookdiff/state.py"},  # of a group of weights
    "memory": {"hookdiff/data/prepare.py", "hookdiff/data/store.py"},
    "progress": {"hookdiff/state.py"},
    "samples": {"hookdiff/cli/data.py", "hookdiff/cli/sample.py", "hookdiff/data/report.py"},
}


def test_the_core_looks_up_no_plugin_by_name() -> None:
    for path in CORE_FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in ENTRIES:
                assert name(path) in OWN_USES.get(node.value, ()), f"{name(path)}:{node.lineno}: {node.value!r}"


def test_the_loop_stays_small() -> None:
    assert len((CORE / "loop.py").read_text("utf-8").splitlines()) < 150


def test_a_step_fits_on_one_screen() -> None:
    (loop,) = (node for node in parsed(CORE / "loop.py").body if isinstance(node, ast.ClassDef))
    lengths = {node.name: node.end_lineno - node.lineno + 1 for node in loop.body if isinstance(node, ast.FunctionDef)}  # type: ignore[operator]
    assert lengths["run_step"] <= 40
    assert max(lengths.values()) <= 40


@pytest.mark.parametrize("path", [path for path in PLUGIN_FILES if path not in SCRIPTS], ids=name)
def test_a_plugin_knows_the_public_names_and_itself(path: Path) -> None:
    own = path.relative_to(ROOT / "plugins").parts[0]
    for module, taken in imports(parsed(path)):
        top = module.partition(".")[0]
        if top == "hookdiff":
            assert (module, taken) == ("hookdiff", taken), f"{name(path)} reaches into {module}"
            assert taken in hookdiff.__all__, f"{name(path)} takes {taken} from hookdiff"
        elif top.startswith("hookdiff"):
            assert top == own, f"{name(path)} imports {module}"


# What each part of the core may know of the rest of it.
MAY_IMPORT = {
    "models": {"hookdiff.errors", "hookdiff.weights"},
    "data": {"hookdiff.errors", "hookdiff.progress", "hookdiff.randomness"},
    "diffusion": {"hookdiff.data.batch", "hookdiff.errors", "hookdiff.objective"},
}


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_data_models_and_diffusion_do_not_know_the_loop(part: str) -> None:
    for path in sorted((CORE / part).rglob("*.py")):
        for module, _ in imports(parsed(path), at_run_time=True):
            if module.partition(".")[0].startswith("hookdiff") and not module.startswith(f"hookdiff.{part}"):
                assert module in MAY_IMPORT[part], f"{name(path)} imports {module}"


def test_they_are_imported_without_the_loop() -> None:
    modules = fresh_python("import sys, hookdiff.data, hookdiff.diffusion, hookdiff.models; print(*sys.modules)")
    assert {f"hookdiff.{part}" for part in MAY_IMPORT} <= modules
    assert not {"hookdiff.loop", "hookdiff.plugins", "hookdiff.experiment", *PACKAGES} & modules


def test_a_run_imports_nothing_that_it_was_not_asked_for(tmp_path: Path) -> None:
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
    assert {module.partition(".")[0] for module in modules if module.startswith("hookdiff_")} == {"hookdiff_clip"}
    asked_for = {"skip", "fit_micro_batch", "memory_estimate"}
    assert not {f"hookdiff.{name}" for name in asked_for} & modules
    assert not {"torchvision", "aim", "safetensors.torch"} & modules


# A lower layer never imports a higher one: cli -> experiment -> loop -> hookspecs.
LAYERS = ["hookspecs", "loop", "experiment", "cli"]


def test_dependencies_point_one_way() -> None:
    for level, layer in enumerate(LAYERS):
        higher = {f"hookdiff.{above}" for above in LAYERS[level + 1 :]}
        files = [CORE / f"{layer}.py"] if (CORE / f"{layer}.py").exists() else sorted((CORE / layer).rglob("*.py"))
        for path in files:
            for module, _ in imports(parsed(path), at_run_time=True):
                assert ".".join(module.split(".")[:2]) not in higher, f"{name(path)} imports {module}"


def test_every_module_says_what_it_is_for() -> None:
    for path in (*CORE_FILES, *PLUGIN_FILES):
        assert ast.get_docstring(parsed(path)), name(path)


def test_every_public_name_exists_and_says_what_it_is() -> None:
    for public in hookdiff.__all__:
        value = getattr(hookdiff, public)
        assert value.__doc__ or public in ("Reason", "Verdict", "hookimpl"), public
    assert set(hookdiff.__all__) == set(hookdiff._HOME)


def test_public_names_are_sorted_as_ruff_wants_them() -> None:
    def key(public: str) -> tuple[int, str]:
        return 0 if public.isupper() else 1 if public[0].isupper() else 2, public

    assert hookdiff.__all__ == sorted(hookdiff.__all__, key=key)


def test_type_checkers_and_python_see_the_same_public_names() -> None:
    (block,) = (node for node in parsed(CORE / "__init__.py").body if isinstance(node, ast.If))
    assert {taken: module for module, taken in imports(block)} == hookdiff._HOME


def test_public_names_are_imported_on_first_use() -> None:
    assert "torch" not in fresh_python("import sys, hookdiff, hookdiff.cli; hookdiff.UserError; print(*sys.modules)")
    for public in hookdiff.__all__:
        assert public not in vars(hookdiff), f"{public} was imported with the package"


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'hookdiff' has no attribute 'Trainer'"):
        hookdiff.Trainer  # noqa: B018
