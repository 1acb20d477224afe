"""The import graph of hookdiff: its rooms, the files beside them, the imports that run back up, and the circles.

A room is a folder of hookdiff/. In the graph of rooms each file beside the rooms is a node too, and so is the whole of
plugins/. Imports for type checkers and inside functions count. The face of a room imports its names lazily. So a name
that is taken from a face counts as an import of the module from which the face's stub (`__init__.pyi`) takes the name.
`python tests/import_graph.py [ROOT]` prints the rooms, the imports that run back up, and the circles.
"""

import ast
import functools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

Graph = dict[str, set[str]]  # the imports of each file or room


def files(root: Path) -> dict[str, Path]:
    """Return the files of the packages by the names of their modules; `__init__` has the name of its package."""
    found = {}
    for source in (root, root / "plugins"):
        for path in sorted(source.glob("hookdiff*/**/*.py")):
            parts = path.relative_to(source).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text("utf-8"))


@functools.cache
def lazy_names(stub: Path) -> dict[str, str]:
    """Return the module, relative to its face, of each name of a face; nothing for a package without a stub."""
    lines = parsed(stub).body if stub.exists() else []
    return {alias.name: line.module or "" for line in lines if isinstance(line, ast.ImportFrom) for alias in line.names}


def imports(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """Yield the modules of `known` that the file imports, or imports a name from."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            lazy = lazy_names(known[node.module].with_suffix(".pyi"))
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in known:
                    yield inner
                else:
                    yield f"{node.module}.{lazy[alias.name]}" if alias.name in lazy else node.module


@functools.cache
def file_graph(root: Path) -> Graph:
    """Return the modules that each module imports."""
    known = files(root)
    return {name: {other for other in imports(path, known) if other != name} for name, path in known.items()}


def room(module: str) -> str:
    """Return the room of a module."""
    top, *inner = module.split(".")
    return "plugins/" if top != "hookdiff" else inner[0] if inner else "__init__"


def rooms_and_files(root: Path) -> tuple[list[str], list[str]]:
    """Return the rooms of hookdiff/, and the files beside them, without `.py`."""
    inside = {path.relative_to(root / "hookdiff").parts for path in (root / "hookdiff").rglob("*.py")}
    rooms = {parts[0] for parts in inside if len(parts) > 1}
    return sorted(rooms), sorted(parts[0].removesuffix(".py") for parts in inside if len(parts) == 1)


def room_graph(graph: Graph) -> Graph:
    """Return the rooms that each room imports."""
    rooms: Graph = {}
    for module, others in graph.items():
        rooms.setdefault(room(module), set()).update(room(other) for other in others if room(other) != room(module))
    return rooms


def circles(graph: Graph) -> list[set[str]]:
    """Return the sets of nodes that reach one another (Tarjan 1972); each set comes after the sets that it imports."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            place = stack.index(node)
            found.append(set(stack[place:]))
            del stack[place:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def back_up(graph: Graph) -> set[tuple[str, str]]:
    """Return imports to remove so that no circle is left, found greedily (Eades et al. 1993)."""
    found = set()
    for group in circles(graph):
        inside = {node: graph[node] & group for node in group}
        while inside:
            # The lowest remaining room has the most imports by other rooms, less its own imports of them.
            lowest = max(sorted(inside), key=lambda n: sum(n in others for others in inside.values()) - len(inside[n]))
            found |= {(lowest, other) for other in inside.pop(lowest)}
            inside = {node: others - {lowest} for node, others in inside.items()}
    return found


def main(root: Path) -> None:
    """Print the rooms, the imports back up, and the circles of files."""
    modules = file_graph(root)
    graph, (rooms, beside) = room_graph(modules), rooms_and_files(root)
    up = back_up(graph)
    print(f"{len(rooms)} rooms, beside them {', '.join(beside)}; {len(up)} imports back up")
    for name, others in modules.items():
        for other in sorted(other for other in others if (room(name), room(other)) in up):
            print(f"back up: {name} imports {other}")
    for group in (group for group in circles(modules) if len(group) > 1):
        print(f"circle of {len(group)} files: {', '.join(sorted(group))}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent)
