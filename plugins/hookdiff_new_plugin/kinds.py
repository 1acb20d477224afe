"""The templates of packages, and the writing of a package from a template."""

import ast
import builtins
import tomllib
from pathlib import Path

from hookdiff.disk import new_folder, writing
from hookdiff_new_plugin.names import class_of

_TEMPLATES = Path(__file__).with_name("templates")
_PREFIX = "hookdiff-example-"
# The folder of each kind, with the files that only packages of this kind have; "plugin" comes first.
KINDS = {
    path.name.removeprefix(_PREFIX).replace("-", "_"): path
    for path in sorted(_TEMPLATES.glob(f"{_PREFIX}*"), key=lambda path: (path.name != f"{_PREFIX}plugin", path.name))
}


def classes_in(kind: str) -> set[str]:
    """Return the names, such as those of classes, that the template of `kind` imports or that are built into Python."""
    modules = [ast.parse(path.read_bytes()) for path in KINDS[kind].rglob("*.py")]
    imports = (node for module in modules for node in ast.walk(module) if isinstance(node, ast.ImportFrom))
    return {alias.name for node in imports for alias in node.names} | {*vars(builtins)}


def write(kind: str, name: str, folder: Path) -> None:
    """Write a package of `kind` with the plugin or part `name`, such as "grad_norm", to the new `folder`.

    Its files come from templates/shared and from the folder of the kind. The pieces of text of the kind replace marks
    such as "<rows>", and `name` replaces the name of the example.
    """
    example = f"example_{kind}"
    new_texts = {example: name, class_of(example): class_of(name), **_pieces(kind)}
    new_texts |= {"<name>": name, "<class>": class_of(name), "<project>": f"hookdiff-{name.replace('_', '-')}"}

    def filled(text: str) -> str:
        for old, new in new_texts.items():
            text = text.replace(old, new)
        return text

    with writing(folder), new_folder(folder) as package:
        for part in (_TEMPLATES / "shared", KINDS[kind]):
            for path in sorted(part.rglob("*")):
                if path.is_file() and path.suffix != ".pyc" and path.name != "pieces.toml":
                    place = package / filled(str(path.relative_to(part)))
                    place.parent.mkdir(parents=True, exist_ok=True)
                    text = filled(path.read_text("utf-8"))
                    place.write_text(text.rstrip() + "\n" if text else "", "utf-8")  # <tables>, the end, may be empty


def _pieces(kind: str) -> dict[str, str]:
    """Return the pieces of text by the marks that they replace, such as "<rows>"."""
    pieces: dict[str, str] = {}
    for folder in (_TEMPLATES, KINDS[kind]):
        pieces |= tomllib.loads((folder / "pieces.toml").read_text("utf-8"))
    entry = pieces["entry"]
    key = f'"{entry}"' if "." in entry else entry  # in pyproject.toml
    return {'"<entry>"': key, **{f"<{piece}>": text.strip() for piece, text in pieces.items()}}
