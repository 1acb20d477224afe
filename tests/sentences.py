"""Draws sentences of the docs and of public docstrings at random, for a reader to judge.

`python tests/sentences.py SEED [NUM]` prints NUM (60) sentences, each with its file and line. The reader, who wrote
none of them, counts those that have to be read twice, or need another file to be understood: at most one of 60.
"""

import ast
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
_SENTENCE = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`\"(])")
_NO_PROSE = re.compile(r"^\s*(\||#|<!--|!\[|\[\w+\]:|>>>|    )")  # tables, headings, markers, pictures, code


def paragraphs(lines: list[str], first: int) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of a text with the number of their line, without code and tables."""
    paragraph, start, is_code = list[str](), first, False
    for number, line in enumerate([*lines, ""], first):
        if line.lstrip().startswith("```"):
            is_code, line = not is_code, ""
        item = re.match(r"\s*([*-]|\d+\.) ", line)
        if not line.strip() or is_code or item or _NO_PROSE.match(line):
            if paragraph:
                yield start, " ".join(paragraph)
            paragraph = []
            line = line[item.end() :] if item else ""
        if line.strip() and not is_code:
            start = start if paragraph else number
            paragraph.append(line.strip())


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the docstrings of a module, its public classes and their public functions, with their lines."""

    def walk(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> Iterator[tuple[int, str]]:
        if text := ast.get_docstring(node):
            yield node.body[0].lineno, text
        for inner in [] if isinstance(node, ast.FunctionDef) else node.body:
            if isinstance(inner, ast.ClassDef | ast.FunctionDef) and not inner.name.startswith("_"):
                yield from walk(inner)

    yield from walk(ast.parse(path.read_text("utf-8")))


def sentences() -> Iterator[tuple[str, str]]:
    """Yield all sentences, each with its place."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "README.md"]
    texts = [(page, 1, page.read_text("utf-8")) for page in pages]
    for folder in ("hookdiff", "plugins"):
        texts += [(path, *found) for path in sorted((ROOT / folder).rglob("*.py")) for found in docstrings(path)]
    for path, first, text in texts:
        for line, paragraph in paragraphs(text.splitlines(), first):
            for sentence in _SENTENCE.split(paragraph):
                if len(sentence.split()) >= 4:
                    yield f"{path.relative_to(ROOT)}:{line}", sentence


def main() -> None:
    """Print the sample."""
    seed, num = sys.argv[1], int((*sys.argv, 60)[2])
    for place, sentence in random.Random(seed).sample(list(sentences()), num):
        print(f"{place}\n    {sentence}")


if __name__ == "__main__":
    main()
