"""How Sphinx makes the site of these pages: `make docs`. All pages also read as plain Markdown."""

import ast
import functools
import importlib
import importlib.metadata
import inspect
import json
import re
import shutil
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import hookdiff
from hookdiff.options import keys

DOCS = Path(__file__).parent
ROOT = DOCS.parent
CORE = Path(hookdiff.__file__).parent
TASKS = "how-to/README"
MODULES = DOCS / "modules"  # made here, and ignored by git: a page for each public module

project = "hookdiff"
release = importlib.metadata.version("hookdiff")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
html_theme = "furo"
html_title = "hookdiff"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_search_scorer = str(DOCS / "static" / "scorer.js")
html_copy_source = html_show_sourcelink = html_show_copyright = False
smartquotes = False  # `--out` in a sentence is an option
default_role = "code"  # docstrings write names as Markdown does
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
maximum_signature_line_length = 76
highlight_language = "text"  # of code blocks that name no language
# Annotations name types of torch and Python, and private types of hookdiff, which no page describes.
nitpick_ignore_regex = [("py:.*", r"(?!hookdiff\.\w+$).*")]

_LIST = re.compile(r"(?:^\* \[.+\n(?:  .+\n)*)+", re.MULTILINE)
_TREE = "\n```{{toctree}}\n:hidden:\n{}{}\n```\n"
_OUTSIDE = re.compile(r"\[([^]]+)\]\(((?:\.\./)+[^)#]+)[^)]*\)")


def faces() -> dict[str, dict[str, str]]:
    """Return the names of each public module, by its own name, and the module that defines each."""
    targets: dict[str, dict[str, str]] = {}
    for stub in (CORE / "__init__.pyi", *sorted(CORE.glob("*/__init__.pyi"))):
        module = ".".join(stub.parent.relative_to(CORE.parent).parts)
        lines: Any = ast.parse(stub.read_text("utf-8")).body
        targets[module] = {alias.name: f"{module}.{line.module}" for line in lines for alias in line.names}
    return targets


FACES = faces()
# Where each name is documented, by its path in the source: in `hookdiff`, if that has it, else in its room.
PUBLIC = {f"{origin}.{name}": f"{face}.{name}" for face in reversed(FACES) for name, origin in FACES[face].items()}


def write_modules() -> None:
    """Write the page of each public module, and the list of these pages."""
    shutil.rmtree(MODULES, ignore_errors=True)
    MODULES.mkdir()
    index = ["Modules", "=======", "", "Every public name of hookdiff, by its module:", ""]
    for face, origins in FACES.items():
        lines = [face, "=" * len(face), "", f".. automodule:: {face}"]
        for name, origin in sorted(origins.items(), key=lambda item: item[0].lower()):
            if PUBLIC[f"{origin}.{name}"] != f"{face}.{name}":
                lines += ["", f":py:obj:`{name} <hookdiff.{name}>` is described in ``hookdiff``."]
            else:
                lines += ["", *directive(face, name)]
        (MODULES / f"{face}.rst").write_text("\n".join(lines) + "\n", "utf-8")
        summary, *_ = (importlib.import_module(face).__doc__ or "").splitlines()
        index.append(f"* :doc:`{face}`: {summary}")
    index += ["", ".. toctree::", "   :hidden:", "", *(f"   {face}" for face in FACES)]
    (MODULES / "index.rst").write_text("\n".join(index) + "\n", "utf-8")


def directive(face: str, name: str) -> list[str]:
    """Return the lines by which autodoc describes a name; the arguments of a class stand there, and not as members."""
    target = getattr(importlib.import_module(face), name)
    if not inspect.isclass(target):
        return [f".. auto{'function' if inspect.isroutine(target) else 'data'}:: {face}.{name}"]
    if target is hookdiff.Hooks:
        return [f".. autoclass:: {face}.{name}", "", "   :doc:`/reference/hooks` has each of them."]
    arguments = ", ".join(key.name for key in keys(target))
    options = [
        "   :members:",
        "   :undoc-members:",
        "   :special-members: __call__",
        f"   :exclude-members: {arguments}",
    ]
    return [f".. autoclass:: {face}.{name}", *options]


def contents(page: str) -> dict[str, list[str]]:
    """Return the pages of each list of links on a page of contents, by the heading above the list."""
    text = (DOCS / f"{page}.md").read_text("utf-8")
    lists = {}
    for match in _LIST.finditer(text):
        *_, heading = re.findall(r"^#+ (.+)", text[: match.start()], re.MULTILINE)
        lists[heading] = re.findall(r"^\* \[.+?\]\((\S+?)\.md\)", match[0], re.MULTILINE)
    return lists


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Add the table of contents: that of the site to its front page, and that of the tasks to their page."""
    if page == "index":
        lists = contents("contents")
        (tasks,) = lists["How to"]
        lists["How to"] = [f"All tasks <{tasks}>"]  # the heading above it is its title
        lists["Reference"].append("modules/index")
        source[0] += _TREE.format("", "contents")
    elif page == "contents":
        head, mark, tail = source[0].partition("\n## Explanation\n")
        source[0] = f"{head}* {{doc}}`modules/index`: every public name, with its arguments\n{mark}{tail}"
        return
    else:
        lists = contents(page) if page == TASKS else {}
    source[0] += "".join(_TREE.format(f":caption: {heading}\n", "\n".join(pages)) for heading, pages in lists.items())


def group_tasks(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """Write the headings of the tasks into the navigation, where Sphinx has captions only for the front page."""
    for heading, (first, *_) in contents(TASKS).items():
        link = re.escape(context["pathto"](f"{Path(TASKS).parent}/{first}"))
        entry = rf'<li class="toctree-l2[^>]+><a class="[^>]+ href="{link}">'
        group = rf'<li class="group"><span class="caption-text">{heading}</span></li>\g<0>'
        context["furo_navigation_tree"] = re.sub(entry, group, context["furo_navigation_tree"])


def widen_texts(app: Sphinx, tree: nodes.document) -> None:
    """Mark the cells with long texts: on a phone they keep a width at which they can be read, and the table scrolls."""
    for cell in tree.findall(nodes.entry):
        cell["classes"] += ["long"] * (len(cell.astext()) > 40)


def write_excerpts(app: Sphinx, error: Exception | None) -> None:
    """Write the text of all pages for the search, which can read no other page where a browser opens them as files."""
    if not error:
        pages = {page: (Path(app.outdir) / f"{page}.html").read_text("utf-8") for page in sorted(app.env.found_docs)}
        articles = {page: re.search('<article role="main".*?</article>', text, re.S) for page, text in pages.items()}
        texts = {page: article[0] for page, article in articles.items() if article}
        (Path(app.outdir) / "_static" / "pages.js").write_text(f"const PAGES = {json.dumps(texts)};\n", "utf-8")


def add_excerpts(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """Load `static/excerpts.js` and `static/words.js` where the search is."""
    if page == "search":
        app.add_js_file("excerpts.js")
        app.add_js_file("words.js")


def name_outside(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace links to folders and to pages outside of docs/ by their paths; other files are copied into the site."""

    def named(match: re.Match[str]) -> str:
        target = (DOCS / page).parent.joinpath(match[2]).resolve()
        if target.is_relative_to(DOCS) or (target.is_file() and target.suffix != ".md"):
            return match[0]
        path = target.relative_to(ROOT).as_posix()
        return match[1] if path in match[1] else f"{match[1]} (`{path}`)"

    source[0] = _OUTSIDE.sub(named, source[0])


@functools.cache
def comments(target: Any) -> dict[str, str]:
    """Return the comments on the fields of a class, or on the constants of a module, by name."""
    texts, above = {}, ""
    for line in inspect.getsource(target).splitlines():
        field = re.match(r"(?: {4})?(\w+)(?:: | = )[^#]*(?:  # (?!type: )(.+))?$", line)
        if field and (text := field[2] or above.strip()):
            texts[field[1]] = text
        above = f"{above} {line.strip()[2:]}" if re.match(" *# ", line) else ""
    return texts


def add_arguments(app: Sphinx, what: str, name: str, target: Any, options: Any, lines: list[str]) -> None:
    """Describe the arguments of a class by the help and the comments of its fields, and link pages by their paths."""
    if what == "class" and "Args:" not in lines:
        said = comments(target)  # the help may be only a range, such as " (at least 1)"
        helps = {key.name: said.get(key.name, "") * (key.help[:2] in ("", " (")) + key.help for key in keys(target)}
        if any(helps.values()):
            lines += ["Args:", *(f"    {name}: {text}" for name, text in helps.items() if text), ""]
    lines[:] = [re.sub(r"\bdocs/([\w/-]+)\.md", r":doc:`/\1`", line) for line in lines]


def add_comment(app: Sphinx, what: str, name: str, target: Any, options: Any, lines: list[str]) -> None:
    """Describe a constant, or an attribute of a class, by its comment."""
    owner, _, last = name.rpartition(".")
    if what == "data":
        lines[:] = [comments(importlib.import_module(FACES[owner][last])).get(last, "")]
    elif what == "attribute":
        module, _, cls = owner.rpartition(".")
        if text := comments(getattr(importlib.import_module(module), cls)).get(last):
            lines[:] = [text]


def shorten(
    app: Sphinx, what: str, name: str, target: Any, options: Any, signature: str | None, returned: str | None
) -> Any:
    """Write defaults that are classes by name, other long defaults as "...", and no arguments of a protocol."""
    if getattr(target, "_is_protocol", False):
        return "", returned
    named = signature and re.sub(r"<class '[\w.]*?(\w+)'>", r"\1", signature)
    return named and re.sub(r"NOTHING|<function .+?>+", "...", named), returned


def set_dashes(app: Sphinx, tree: nodes.document) -> None:
    """Write a dash between an argument and its text: `smartquotes` is off."""
    for text in list(tree.findall(nodes.Text)):
        if text == " -- ":
            text.parent.replace(text, nodes.Text(" \N{EN DASH} "))


def link(app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, shown: nodes.TextElement) -> Any:
    """Resolve the type of an annotation from its path in the source to the page that documents it."""
    if node["refdomain"] != "py" or node["reftarget"] not in PUBLIC:
        return None
    domain = env.domains.python_domain
    return domain.resolve_xref(
        env, node["refdoc"], app.builder, node["reftype"], PUBLIC[node["reftarget"]], node, shown
    )


def find_source(app: Sphinx, module: str, name: str) -> str | None:
    """Return the module that defines `name`, for viewcode."""
    return FACES[module].get(name.partition(".")[0])


def mend_links(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """Correct the links from a source to the reference: viewcode takes all its names for names of one public module."""
    if page.startswith("_modules/"):
        link = r'id="(.+)">\n<a class="viewcode-back" href="(.+/modules/(.+)\.html)#.+"'
        context["body"] = re.sub(link, r'id="\1">\n<a class="viewcode-back" href="\2#\3.\1"', context["body"])


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    write_modules()
    app.connect("source-read", add_contents)
    app.connect("source-read", name_outside)
    app.connect("autodoc-process-docstring", add_arguments, priority=400)  # before napoleon, which reads "Args:"
    # After it, as it takes "n, int64: ..." for a type.
    app.connect("autodoc-process-docstring", add_comment, priority=600)
    app.connect("autodoc-process-signature", shorten)
    app.connect("doctree-read", set_dashes)
    app.connect("doctree-read", widen_texts)
    app.connect("missing-reference", link)
    app.connect("viewcode-follow-imported", find_source)
    app.connect("html-page-context", mend_links)
    app.connect("html-page-context", add_excerpts)
    app.connect("html-page-context", group_tasks, priority=900)  # after furo has made its navigation
    app.connect("build-finished", write_excerpts)
