"""The packages to begin with, and the copy of one under other names."""

import ast
import builtins
from pathlib import Path

from hookdiff.disk import new_folder, writing
from hookdiff_new_plugin.names import class_of

_FOLDER = Path(__file__).with_name("templates")
_PREFIX = "hookdiff-example-"
# The kinds by their templates, which are whole packages; "plugin" comes first.
KINDS = {
    path.name.removeprefix(_PREFIX).replace("-", "_"): path
    for path in sorted(_FOLDER.glob(f"{_PREFIX}*"), key=lambda path: (path.name != f"{_PREFIX}plugin", path.name))
}


def classes_in(kind: str) -> set[str]:
    """Return the names of the classes, and of all else, that the template of `kind` imports or Python has."""
    modules = [ast.parse(path.read_bytes()) for path in KINDS[kind].rglob("*.py")]
    imports = (node for module in modules for node in ast.walk(module) if isinstance(node, ast.ImportFrom))
    return {alias.name for node in imports for alias in node.names} | {*vars(builtins)}


def write(kind: str, name: str, folder: Path) -> None:
    """Copy the template of `kind` to the new `folder`, with `name`, such as "grad_norm", in place of the example's."""
    template, example = KINDS[kind], f"example_{kind}"
    names = {example: name, example.replace("_", "-"): name.replace("_", "-"), class_of(example): class_of(name)}

    def renamed(text: str) -> str:
        for old, new in names.items():
            text = text.replace(old, new)
        return text

    with writing(folder), new_folder(folder) as made:
        for path in sorted(template.rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                place = made / renamed(str(path.relative_to(template)))
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(renamed(path.read_text("utf-8")), "utf-8")
