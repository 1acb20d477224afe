"""Rules for all the sources: the calls of hooks, and the imports that each module may have."""

import ast
import functools
import importlib
import inspect
import re
import shutil
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import heart
import import_graph
import pytest
from faults import FAULTS

import hookdiff
from hookdiff import Hooks
from hookdiff.experiment.config import SOURCES
from hookdiff.experiment.optimizers import OPTIMIZERS
from hookdiff.loop.hookspecs import HOOK_NAMES
from hookdiff.testing.toy import toy_loop
from tests.conftest import write_small
from tests.forked import python

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
TEMPLATES = sorted((ROOT / "plugins" / "hookdiff_new_plugin" / "templates").rglob("*.py"))  # packages of their own
PLUGIN_FILES = sorted(
    {path for package in PACKAGES for path in (ROOT / "plugins" / package).rglob("*.py")} - {*TEMPLATES}
)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


parsed = import_graph.parsed


@functools.cache
def walk(tree: ast.AST) -> list[ast.AST]:
    return [*ast.walk(tree)]


FORGET = """
import sys
for name in [*sys.modules]:
    if name.startswith("hookdiff") or name.partition(".")[0] in ("tests", "torchvision", "aim", "safetensors"):
        del sys.modules[name]
"""


def printed(code: str, *words: str, fresh: bool = False) -> str:
    """Return what `code` prints in a process that has imported nothing of hookdiff, and torch unless it is `fresh`."""
    returned, out, err = python(FORGET + code, *words, fresh=fresh)
    assert returned == 0, err
    return out


def hook_calls(tree: ast.Module) -> Iterator[ast.Call]:
    """Yield the calls of `hook.NAME(...)` and `....hook.NAME(...)`."""
    for node in walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="hook") | ast.Attribute(attr="hook"))):
                yield node


def imports(tree: ast.AST) -> Iterator[tuple[str, str | None]]:
    """Yield each imported module and the name taken from it."""
    for node in walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "an import says the whole name"
            yield from ((node.module or "", alias.name) for alias in node.names)


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
    assert called | set(called_by_name(specs)) == set(HOOK_NAMES)  # every hook is called


def called_by_name(specs: dict[str, list[str]]) -> Iterator[str]:
    """Yield the hooks that Log calls, and the questions, whose arguments are checked."""
    for path in (*CORE_FILES, *PLUGIN_FILES):
        for node in walk(parsed(path)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute | ast.Name):
                continue
            words = [value.value for value in node.args if isinstance(value, ast.Constant)]
            if isinstance(node.func, ast.Attribute) and node.func.attr == "ask":
                (hook,) = words
                assert sorted(str(keyword.arg) for keyword in node.keywords) == sorted(specs[hook]), name(path)
                yield hook
            elif path == CORE / "log" / "log.py" and words and str(words[0]) in specs:
                yield str(words[0])


DECLARATIONS = {CORE / "loop" / "hookspecs.py", CORE / "testing" / "examples.py"}


def test_lists_of_hooks_are_made_from_their_declarations() -> None:
    for path in {*CORE_FILES, *PLUGIN_FILES} - DECLARATIONS:
        for node in walk(parsed(path)):
            if isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict):
                texts = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
                found = {word for text in texts if isinstance(text, str) for word in text.split() if word in HOOK_NAMES}
                assert len(found) < 3, f"{name(path)}:{node.lineno} lists {found}: hooks_of(PHASE)"


# By kind of hook, the additions to files of the core: a seam has a default too.
HOOK = """
    @{kind}("batch", like="on_batch_seen")
    def on_added(self, loop: Loop, batch: Batch) -> {returned}:
        \"\"\"{title}: for a test.\"\"\"
"""
EXAMPLE = """

class Added:
    \"\"\"Logs the size of a batch.\"\"\"

    @hookimpl
    def on_added(self, loop: Loop, batch: Batch) -> {returned}:
        loop.log.average({{"added": float(len(batch))}})
"""
DEFAULT = """
    @hookimpl(trylast=True)
    def on_added(self, batch: Batch) -> Batch:
        return batch
"""
ADDED = {
    "moment": {
        "loop/hookspecs.py": HOOK.format(kind="moment", title="Moment", returned="None"),
        "loop/loop.py": "        self.hook.on_added(loop=self, batch=batch)\n",
        "testing/examples.py": EXAMPLE.format(returned="None"),
    },
    "seam": {
        "loop/hookspecs.py": HOOK.format(kind="seam", title="Seam", returned="Batch"),
        "loop/loop.py": "        batch = self.hook.on_added(loop=self, batch=batch)\n",
        "loop/defaults.py": DEFAULT,
        "testing/examples.py": EXAMPLE.format(returned="Batch") + "        return PASS\n",
    },
}
PLACES = {  # the line before an addition; the example is the last
    "loop/hookspecs.py": "class Hooks(Protocol):",
    "loop/loop.py": "        self.hook.before_step(loop=self, batch=batch)",
    "loop/defaults.py": "class Defaults:",
    "testing/examples.py": "",
}
USES = """
import sys
from click.testing import CliRunner
from hookdiff import PluginError, hookimpl
from hookdiff.authors import rehearsing
from hookdiff.testing import toy_loop
from hookdiff.testing.examples import Added
from hookdiff.cli.hooks import command
from hookdiff.loop import HOOKS, hooks_of, implements
from hookdiff.loop.registry import Plugins

class Wrong:
    @hookimpl
    def on_batch_seen(self): ...

class Seen:
    @hookimpl
    def on_log(self, values):
        logged.update(values)

logged = {}
assert HOOKS["on_added"].kind == sys.argv[1]
assert "on_added" in hooks_of("batch")
assert implements(Added, *hooks_of("batch"))
toy_loop({"added": Added(), "seen": Seen()}, log_every=1, steps=2).run()
assert logged["added"] == 8
toy_loop(steps=2).run()
try:
    Plugins({"wrong": Wrong()})
except PluginError as error:
    assert "'on_added'" in str(error), error
shown = CliRunner().invoke(command, ["on_added"]).output
assert "for a test." in shown and "class Added:" in shown, shown
print("works", __import__("hookdiff").__file__)
"""


@pytest.mark.parametrize("kind", ADDED)
def test_a_hook_is_added_by_its_declaration_its_call_and_its_example(kind: str, tmp_path: Path) -> None:
    """A seam has a default, too. In a copy of the sources, all that knows the hooks then knows the new one."""
    copy = tmp_path / "hookdiff"
    shutil.copytree(CORE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for file, added in ADDED[kind].items():
        before, line, after = (copy / file).read_text("utf-8").partition(f"{PLACES[file]}\n" if PLACES[file] else "\0")
        if "class " in line:  # after its docstring
            docstring, _, after = after.partition("\n")
            line = f"{line}{docstring}\n"
        (copy / file).write_text(before + line + added + after, "utf-8")
    out = printed(f"sys.path.insert(0, {str(tmp_path)!r})\n{USES}", kind)
    assert out.split() == ["works", str(copy / "__init__.py")]


def test_the_core_knows_no_plugin() -> None:
    package = re.compile(rf"\b({'|'.join(PACKAGES)})\b")
    for path in CORE_FILES:
        found = package.search(path.read_text("utf-8"))
        assert found is None, f"{name(path)} names {found}"


# The table of default names, in which alone hookdiff/ may name plugins and parts of packages.
TABLE = CORE / "options" / "default_names.py"
PARTS = PUBLISHED["hookdiff.parts"]  # by kind and name, such as "model.unet"
LIBRARIES = {"diffusers", "safetensors"}  # which formats of exports are named after
OWN_PARTS = {*SOURCES, *OPTIMIZERS, *LIBRARIES}  # those that hookdiff/ itself registers or uses
PART_NAMES = {part.partition(".")[2] for part in PARTS} - OWN_PARTS


def any_of(names: Iterable[str]) -> str:
    return f"(?:{'|'.join(map(re.escape, sorted(names, key=len, reverse=True)))})(?![\\w-])"


NAMES = re.compile(
    rf"plugins\.{any_of(ENTRIES)}"
    rf"|--plugins[ =](?:\S+,)?(?:no:)?{any_of(ENTRIES)}"
    rf"|the plugins? ['\"`]?{any_of(ENTRIES)}"
    rf"|^{any_of(PART_NAMES)}$|(?P<quote>['\"`]){any_of(PART_NAMES)}(?P=quote)|\b{any_of(PARTS)}",
    re.IGNORECASE,
)
ALONE = re.compile(rf"^{any_of(ENTRIES)}$|(?P<quote>['\"`]){any_of(ENTRIES)}(?P=quote)")
# Names of plugins and parts that stand alone or in quotes, with the files that use them for something else.
OWN_USES = {
    "array": {"hookdiff/cli/json_schema.py"},  # a type of JSON
    "checkpoint": {"hookdiff/builtin/events.py"},  # kinds of events
    "unet": {"hookdiff/disk/hub.py"},  # a folder of a pipeline
    "compile": {"hookdiff/experiment/loaded_run.py"},  # a key of [sampling]
    "nan": {"hookdiff/builtin/events.py"},
    "loss": {
        "hookdiff/cli/summary.py",
        "hookdiff/experiment/notebook.py",
        "hookdiff/diffusion/losses.py",
        "hookdiff/loop/loop.py",
    },
    "lr": {  # the rate of a group of weights
        "hookdiff/experiment/optimizers.py",
        "hookdiff/models/adamw.py",
        "hookdiff/models/optimizer_state.py",
    },
    "memory": {  # a place to keep decoded pictures
        "hookdiff/encoding/encoder.py",
        "hookdiff/images/loader.py",
        "hookdiff/images/store.py",
    },
    "text": {  # the usual name of captions, and a field of what is logged
        "hookdiff/encoding/encoder.py",
        "hookdiff/images/folder.py",
        "hookdiff/log/log.py",
        "hookdiff/run_dir/events_jsonl.py",
    },
    "progress": {"hookdiff/builtin/events.py", "hookdiff/loop/restoring.py", "hookdiff/loop/state.py"},
}


def strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the strings of a module that are no docstrings, with their lines: an f-string whole, and its pieces."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    blocks = [node for node in walk(tree) if isinstance(node, documented) and ast.get_docstring(node, clean=False)]
    docstrings = {block.body[0].value for block in blocks if isinstance(block.body[0], ast.Expr)}
    for node in walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(str(piece.value) for piece in node.values if isinstance(piece, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield node.lineno, node.value


@pytest.mark.parametrize(
    "text", ["[plugins.lr]", "--plugins a,no:ddp", "The plugin 'clip'", "dit", 'as "unet"', "source.array"]
)
def test_a_name_of_a_package_is_found_in_a_string(text: str) -> None:
    code = f"def f(x):\n    'the plugin lr'\n    return f{text + '{x}'!r}, {text!r}"
    found = [text for _, text in strings(ast.parse(code)) if NAMES.search(text)]
    assert found == [text, text, text]  # the f-string, its piece, and the plain string
    assert not any(map(NAMES.search, ["plugins.lr_mine", "--plugins NAME", "an array", "'digits'", "an lr", "unets"]))


def test_the_core_knows_no_plugin_by_string() -> None:
    for path in {*CORE_FILES} - {TABLE}:
        for line, text in strings(parsed(path)):
            found = NAMES.search(text)
            assert not found or name(path) in OWN_USES.get(text, ()), f"{name(path)}:{line}: {found}"
            for match in ALONE.finditer(text):
                assert name(path) in OWN_USES.get(match[0].strip("'\"`"), ()), f"{name(path)}:{line}: {match}"


def loop_class() -> ast.ClassDef:
    (loop,) = (node for node in parsed(CORE / "loop" / "loop.py").body if isinstance(node, ast.ClassDef))
    return loop


def test_the_loop_and_its_step_are_short() -> None:
    assert len((CORE / "loop" / "loop.py").read_text("utf-8").splitlines()) <= 300
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
    for node in walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
                yield node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            owner, attribute, *_ = node.args
            if isinstance(attribute, ast.Constant):
                yield ast.Attribute(owner, attribute.value, lineno=node.lineno)


def is_a_loop(node: ast.expr) -> bool:
    return ast.unparse(node).rpartition(".")[2].strip("_") in ("loop", "saved")


OTHERS = {"model", "net", "optimizers", "objective", "sampler"}  # attributes of a Loop that are made by others


def is_of_a_loop(node: ast.expr, known: set[str]) -> bool:
    """Return whether `node` is an attribute of a loop, as `loop.step`, or of what it holds, as `loop.progress.step`."""
    if not isinstance(node, ast.Attribute):
        return False
    return (node.attr in known and is_a_loop(node.value)) or is_of_a_loop(node.value, known - OTHERS)


def test_a_write_to_what_a_loop_holds_is_found() -> None:
    writes = ["loop.net = 1", "self._loop.progress.step += 1", "setattr(loop.log, 'x', 1)", "del loop.feed.a.b"]
    fine = ["loop.net.training = True", "loop.mine = 1", "mine.progress.step = 1", "x = loop.progress.step"]
    for found, lines in ((True, writes), (False, fine)):
        for line in lines:
            nodes = list(assigned(ast.parse(line)))
            assert any(is_of_a_loop(node, attributes_of_the_loop()) for node in nodes) == found, line


def test_only_the_loop_sets_its_attributes() -> None:
    known = attributes_of_the_loop()
    assert {"net", "sampler", "config", "progress"} <= known
    for path in (*CORE_FILES, *PLUGIN_FILES):
        for node in assigned(parsed(path)):
            assert not is_of_a_loop(node, known), f"{name(path)}:{node.lineno}: {ast.unparse(node)}"


def test_attributes_of_a_loop_are_read_only() -> None:
    with toy_loop(steps=1) as loop:
        for attribute in (*attributes_of_the_loop(), "another"):
            with pytest.raises(AttributeError, match=f"Loop.{attribute}"):
                setattr(loop, attribute, None)


# The modules of the core that are promised: `hookdiff` itself, and the faces of its rooms, which have a stub.
PUBLIC = {"hookdiff", *(f"hookdiff.{stub.parent.name}" for stub in CORE.glob("*/__init__.pyi"))}
PAGES = sorted(path for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
EXAMPLES = [*sorted((ROOT / "examples").rglob("*.py")), *TEMPLATES]


def test_no_two_public_names_are_equal() -> None:
    """But those of one object, which the face of its room and `hookdiff` itself may both have."""
    owners: dict[str, dict[int, str]] = {}
    for module in sorted(PUBLIC):
        face = importlib.import_module(module)
        for public in face.__all__:
            owners.setdefault(public, {})[id(getattr(face, public))] = module
    assert {public: [*found.values()] for public, found in owners.items() if len(found) > 1} == {}


def test_no_public_name_is_that_of_a_module_which_does_not_define_it() -> None:
    """Once that module is imported, the face would have it under the name."""
    for stub in CORE.glob("*/__init__.pyi"):
        modules = import_graph.lazy_names(stub)
        assert {public for public in modules if stub.with_name(f"{public}.py").exists()} == {
            public for public, home in modules.items() if public == home
        }, name(stub)


def test_no_two_modules_have_one_name() -> None:
    names = Counter(path.stem for path in CORE_FILES if path.stem != "__init__")
    assert [module for module, num in names.items() if num > 1] == []


def defined(tree: ast.Module) -> Iterator[str]:
    """Yield what a module defines for others: no private names, and no type variables, which are local by nature."""
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=defined) | ast.ClassDef(name=defined):
                yield defined
            case ast.Assign(value=ast.Call(func=ast.Name(id="TypeVar"))):
                pass
            case ast.Assign(targets=[ast.Name(id=defined)]) | ast.AnnAssign(target=ast.Name(id=defined)):
                yield defined


def test_no_two_names_of_the_core_are_equal() -> None:
    """But the logger, and the command that each module of a command has."""
    names = Counter(given for path in CORE_FILES for given in defined(parsed(path)) if not given.startswith("_"))
    assert {given for given, num in names.items() if num > 1} == {"logger", "command"}


def at_top(tree: ast.Module) -> Iterator[str]:
    """Yield what a module imports, for type checkers too, and its functions and classes."""
    for node in (*tree.body, *(child for block in tree.body if isinstance(block, ast.If) for child in block.body)):
        match node:
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from ((alias.asname or alias.name).partition(".")[0] for alias in aliases)
            case ast.FunctionDef(name=defined) | ast.ClassDef(name=defined):
                yield defined


def local_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the names that functions and comprehensions bind, with their lines, but not what functions import."""
    for scope in ast.walk(tree):
        inner = isinstance(scope, ast.FunctionDef | ast.Lambda | ast.comprehension)
        for node in ast.walk(scope) if inner else ():
            match node:
                case ast.arg(arg=bound) | ast.Name(id=bound, ctx=ast.Store()):
                    yield node.lineno, bound
                case ast.ExceptHandler(name=str(bound)) | ast.MatchAs(name=str(bound)) | ast.MatchStar(name=str(bound)):
                    yield node.lineno, bound
                case ast.FunctionDef(name=bound) if node is not scope:
                    yield node.lineno, bound


def test_no_local_name_shadows_an_import_or_a_function_of_its_module() -> None:
    assert len([*local_names(ast.parse("def f(a):\n  for b in c: d = [e for e in d]\n\nx = 1"))]) == 5
    for path in (*CORE_FILES, *PLUGIN_FILES):
        top = {*at_top(parsed(path))}
        assert [f"{name(path)}:{line}: {bound}" for line, bound in local_names(parsed(path)) if bound in top] == []


def check_public(where: str, module: str, taken: str | None) -> None:
    assert module in PUBLIC, f"{where} reaches into {module}"
    public = [None, *importlib.import_module(module).__all__]
    assert taken in public, f"{where} takes {taken} from {module}"


def test_a_plugin_imports_only_public_names_and_its_own_package() -> None:
    for path in {*PLUGIN_FILES, *EXAMPLES} - SCRIPTS:
        for module, taken in imports(parsed(path)):
            top = module.partition(".")[0]
            if top == "hookdiff":
                check_public(name(path), module, taken)
            elif top.startswith("hookdiff") and path in PLUGIN_FILES:
                assert top == path.relative_to(ROOT / "plugins").parts[0], f"{name(path)} imports {module}"


def test_the_docs_import_only_public_names() -> None:
    statement = re.compile(r"^from (hookdiff(?:\.[.\w]*)?) import (\([^)]*\)|[^\n]+)", re.M)
    for path in PAGES:
        for module, names in statement.findall(path.read_text("utf-8")):
            for taken in re.findall(r"(?<!as )\b(?!as\b)\w+", names.partition("#")[0]):
                check_public(name(path), module, taken)


def test_there_are_few_public_modules() -> None:
    assert len(PUBLIC) <= 18


RANKS = {"hookdiff_ddp", "hookdiff_fsdp"}  # plugins with which several ranks train one model
KNOWS_DISTRIBUTED = {CORE / "machine" / f"{name}.py" for name in ("ranks", "joining", "background_group", "failures")}


def test_torch_distributed_is_known_in_few_files() -> None:
    for path in {*CORE_FILES, *PLUGIN_FILES} - KNOWS_DISTRIBUTED:
        if path.relative_to(ROOT).parts[1] not in RANKS:
            imported = [f"{module}.{taken}" for module, taken in imports(parsed(path))]
            attributes = [node for node in walk(parsed(path)) if isinstance(node, ast.Attribute)]
            used = [f"torch.{node.attr}" for node in attributes if getattr(node.value, "id", "") == "torch"]
            assert [each for each in (*imported, *used) if each.startswith("torch.distributed")] == [], name(path)


# The rooms of the core, lowest first: each room may import those before it. See docs/explanation/architecture.md.
ROOMS = [
    *("errors", "machine", "disk", "options", "terminal", "log", "data", "images", "encoding", "features", "models"),
    *("diffusion", "loop", "run_dir", "authors", "builtin", "experiment", "testing", "cli", "__init__", "__main__"),
]
# The others of each circle import `Loop`, or `Feed` or `Reader`, for type checkers.
CIRCLES = [
    {
        f"hookdiff.data.{part}"
        for part in (
            *("feed", "feed_checks", "feed_state", "marks", "memory_reader", "picture_sizes", "reader", "shape_order"),
        )
    },
    {
        f"hookdiff.loop.{part}"
        for part in ("loop", "hookspecs", "defaults", "registry", "contract_checks", "state", "restoring")
    },
]


def test_there_are_few_rooms_and_no_import_runs_back_up() -> None:
    rooms, beside = import_graph.rooms_and_files(ROOT)
    assert set(ROOMS) == {*rooms, *beside}
    assert len(rooms) <= 18
    assert beside == ["__init__", "__main__", "errors"]
    assert import_graph.back_up(import_graph.room_graph(import_graph.file_graph(ROOT))) == set()


def test_the_heart_is_small_and_the_docs_begin_with_it() -> None:
    found = heart.heart(printed)
    assert heart.over(found) == []
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text("utf-8").partition("## Rooms")[0]
    files = {name.removeprefix("hookdiff.").replace(".", "/") + ".py" for name in found}
    folders = {f"{path.parent.relative_to(CORE)}.py" for path in CORE.glob("*/__init__.py")}
    listed = re.findall(r"`([\w/]+\.py)`", page.partition("1. ")[2])
    assert sorted(listed) == sorted(files - folders - {"hookdiff.py"})


def test_the_docs_list_the_rooms_in_their_order() -> None:
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)(/?)` \| .+ \|$", page.partition("## Packages")[0], re.M)
    assert [room for room, _ in rows] == ROOMS
    assert all((CORE / room).is_dir() == bool(slash) for room, slash in rows)


def test_the_places_in_the_docs_exist() -> None:
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text("utf-8")
    places = re.findall(r"`([\w.]+/[\w./]*)`", page.partition("## Where to add something")[2])
    assert len(places) > 20
    assert [place for place in places if not ((CORE / place).exists() or (ROOT / place).exists())] == []


def test_a_room_imports_only_lower_rooms() -> None:
    for module, others in import_graph.file_graph(ROOT).items():
        if (own := import_graph.room(module)) != "plugins/":
            rooms = {import_graph.room(other) for other in others}
            assert rooms <= {*ROOMS[: ROOMS.index(own) + 1]}, module


def test_the_circles_of_imports_are_known() -> None:
    assert [group for group in import_graph.circles(import_graph.file_graph(ROOT)) if len(group) > 1] == CIRCLES


def test_data_diffusion_and_models_are_imported_without_the_loop() -> None:
    code = "import hookdiff.data, hookdiff.diffusion, hookdiff.models; print(*sys.modules)"
    modules = {*printed(code).split()}
    assert {"hookdiff.data", "hookdiff.diffusion", "hookdiff.models"} <= modules
    assert not {"hookdiff.loop.loop", "hookdiff.experiment", *PACKAGES} & modules


def test_the_files_of_a_run_directory_are_known_without_torch_and_the_loop() -> None:
    names = ", ".join(one for one in MODULES if one.startswith("hookdiff.run_dir."))
    modules = {*printed(f"import {names}; print(*sys.modules)", fresh=True).split()}
    assert {"hookdiff.run_dir.metrics_jsonl", "hookdiff.disk.files"} <= modules
    assert not {"torch", "hookdiff.loop.loop", *PACKAGES} & modules


def test_a_run_imports_only_the_packages_that_it_uses(tmp_path: Path) -> None:
    write_small(tmp_path / "small.toml", run={"steps": 2, "plugins": ["clip"]})
    code = f"""
from pathlib import Path
from hookdiff import build_loop, load_config
folder = Path({str(tmp_path)!r})
build_loop(load_config(folder / "small.toml"), folder / "run").run()
print(*sys.modules)
"""
    modules = {*printed(code).split()}
    assert (tmp_path / "run" / "config.toml").exists()
    assert {module.partition(".")[0] for module in modules if module.startswith("hookdiff_")} == {
        "hookdiff_clip",
        "hookdiff_muon",
        "hookdiff_networks",
    }
    asked_for = {"builtin.micro_batch", "models.footprint"}
    assert not {f"hookdiff.{name}" for name in asked_for} & modules
    assert not {"torchvision", "aim", "safetensors.torch"} & modules


def test_every_public_name_exists_and_has_a_docstring() -> None:
    for public in hookdiff.__all__:
        value = getattr(hookdiff, public)
        assert value.__doc__ or public in ("Reason", "Verdict", "hookimpl"), public
    assert len(hookdiff.__all__) <= 45


def test_each_fault_can_be_planted() -> None:
    root = Path(__file__).parents[1]
    assert [one.name for one in FAULTS if (root / one.file).read_text("utf-8").count(one.old) != 1] == []


def public_docstrings() -> Iterator[tuple[str, str]]:
    """Yield the docstrings of public classes and functions, and of the public methods of these classes.

    What a package of plugins has at its top is public, too.
    """
    faces = {face: importlib.import_module(face) for face in sorted(PUBLIC)}
    found = {f"{face}.{name}": getattr(module, name) for face, module in faces.items() for name in module.__all__}
    for package in sorted(path.parent.name for path in (ROOT / "plugins").glob("hookdiff_*/__init__.py")):
        module = importlib.import_module(package)
        own = {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
        found |= {f"{package}.{k}": v for k, v in own.items() if getattr(v, "__module__", "").startswith(package)}
    for where, value in found.items():
        members = vars(value) if inspect.isclass(value) and value is not Hooks else {}
        methods = {f"{where}.{k}": v for k, v in members.items() if not k.startswith("_") or k == "__call__"}
        for key, one in {where: value, **methods}.items():
            one = getattr(one, "__func__", getattr(one, "fget", getattr(one, "func", one)))
            if inspect.isclass(one) or inspect.isfunction(one):
                yield key, inspect.getdoc(one) or ""


def test_public_docstrings_have_sections_for_arguments_and_errors() -> None:
    """Those that a builder of documentation reads: what a function does may still be to raise an error."""
    errors, arguments = r"\braises (an? )?[A-Z]|Raises", r"(?m)^[a-z_]+(, [a-z_]+)*: "
    prose = {name: re.split(r"(?m)^(?:Args|Returns|Yields|Raises):$", text)[0] for name, text in public_docstrings()}
    found = [name for name, text in prose.items() if re.search(errors, text) or re.search(arguments, text)]
    assert not found, found


def test_public_names_are_imported_on_first_use() -> None:
    code = "import hookdiff, hookdiff.cli; hookdiff.UserError; print(*sys.modules)"
    assert "torch" not in printed(code, fresh=True).split()


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Trainer"):
        hookdiff.Trainer  # noqa: B018
