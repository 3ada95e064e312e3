"""Prints the map of the source: lines of every room, who imports whom, floors, lengths of functions, class names used twice.

    tools/rooms [DIRECTORY]     of a checkout; default: this one

A room is a package directly under `jinfercept/`; modules at its root count each as a room of their own. Floor 0 imports no
other room; every other room is one floor above the highest that it imports. Imports under `TYPE_CHECKING` do not count. Ends
with status 1 if rooms import each other in a circle. Needs Python 3.12 and nothing else.
"""

import ast
import sys
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = "jinfercept"


def main() -> int:
    """Print the map; 1 if there is a circle."""
    parser = ArgumentParser(prog="tools/rooms", description="Print the map of the source.")
    parser.add_argument("directory", nargs="?", type=Path, default=Path(__file__).parent.parent, help="of a checkout")
    options = parser.parse_args()
    root = options.directory
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in sorted((root / PACKAGE).rglob("*.py"))}
    rooms = defaultdict(list)
    for file in trees:
        rooms[room_of(file.relative_to(root).with_suffix("").parts)].append(file)
    graph = {room: imported(room, (trees[file] for file in files)) & rooms.keys() for room, files in rooms.items()}
    try:
        floors = floors_of(graph)
    except CycleError as error:
        print("circle:", " -> ".join(error.args[1]))
        return 1
    print(f"{'room':18} {'files':>5} {'lines':>6} {'floor':>5}  imports")
    lines = {room: sum(map(num_lines, files)) for room, files in rooms.items()}
    for room in sorted(rooms, key=lambda room: (-floors[room], room)):
        print(f"{room:18} {len(rooms[room]):5} {lines[room]:6} {floors[room]:5}  {' '.join(sorted(graph[room]))}")
    print(f"{'all':18} {len(trees):5} {sum(lines.values()):6} {max(floors.values()) + 1:5}  (floors; no circles)")
    for folder in ("studies", "benchmarks", "tests", "tools", "examples"):
        files = list((root / folder).rglob("*.py"))
        print(f"{folder + '/':18} {len(files):5} {sum(map(num_lines, files)):6}")
    lengths = sorted(length for tree in trees.values() for length in function_lengths(tree))
    p50, p90 = (lengths[len(lengths) * share // 100] for share in (50, 90))
    print(f"\nfunctions: {len(lengths)}, lines p50 {p50}, p90 {p90}, max {lengths[-1]}")
    print(f"files over 400 lines: {', '.join(long_files(trees, root)) or 'none'}")
    print("class names that occur more than once:")
    for name, files in class_names(trees).items():
        if len(files) > 1:
            print(f"  {name}: {', '.join(str(file.relative_to(root / PACKAGE)) for file in files)}")
    return 0


def room_of(parts: tuple[str, ...]) -> str:
    """The room of a module, by the parts of its path or of its dotted name."""
    return parts[1].removesuffix("__init__") or "(root)" if len(parts) > 1 else "(root)"


def imported(room: str, trees: Iterator[ast.Module]) -> set[str]:
    """The rooms that a room's modules import while they run."""
    rooms = set[str]()
    for tree in trees:
        checking = {id(node) for test in ast.walk(tree) if is_type_checking(test) for node in ast.walk(test)}
        for node in ast.walk(tree):
            if id(node) in checking:
                continue
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE:
                module = (node.module or "").split(".")
                names = [[*module, alias.name] for alias in node.names] if len(module) == 1 else [module]
                rooms.update(room_of(tuple(name)) for name in names if name[-1][0].islower() or len(name) > 2)
            elif isinstance(node, ast.Import):
                modules = (alias.name.split(".") for alias in node.names)
                rooms.update(room_of(tuple(module)) for module in modules if module[0] == PACKAGE)
    return rooms - {room}


def is_type_checking(node: ast.AST) -> bool:
    """Whether a node is `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def floors_of(graph: Mapping[str, set[str]]) -> dict[str, int]:
    """The floor of every room. Raises `CycleError` if there is a circle."""
    floors: dict[str, int] = {}
    for room in TopologicalSorter(graph).static_order():
        floors[room] = 1 + max((floors[below] for below in graph[room]), default=-1)
    return floors


def num_lines(file: Path) -> int:
    """Lines of a file."""
    return file.read_text(encoding="utf-8").count("\n")


def function_lengths(tree: ast.Module) -> Iterator[int]:
    """Lines of every function of a module, docstrings included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


def long_files(trees: Mapping[Path, ast.Module], root: Path) -> list[str]:
    """The files of more than 400 lines, with their lengths."""
    return [f"{file.relative_to(root)} ({num_lines(file)})" for file in trees if num_lines(file) > 400]


def class_names(trees: Mapping[Path, ast.Module]) -> dict[str, list[Path]]:
    """By class name the files that define a class of it."""
    files = defaultdict(list)
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                files[node.name].append(file)
    return dict(sorted(files.items()))


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # as behind `| head`
        sys.exit(main())
