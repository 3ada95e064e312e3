"""Mutants of a Mosaic kernel: its source with one wait or fence left out each."""

import ast
from collections.abc import Iterator

WAITS = ("barrier_wait", "wait_smem_to_gmem", "commit_smem", "wgmma_wait", "wgmma_accumulator_load")


def waits(source: str) -> list[str]:
    """The waits of a kernel in the order of its source, each named by its function and its code."""
    return [name for name, _ in _waits(ast.parse(source))]


def without_wait(source: str, number: int) -> str:
    """The source without one of its waits; an accumulator is loaded then at once."""
    tree = ast.parse(source)
    _, call = list(_waits(tree))[number]
    if _called(call) == "wgmma_accumulator_load":
        call.keywords = [ast.keyword("wait_n", ast.Constant(None))]
    else:
        call.func, call.args, call.keywords = ast.parse("lambda: None", mode="eval").body, [], []
    return ast.unparse(ast.fix_missing_locations(tree))


def _waits(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    for function in tree.body:
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and _called(node) in WAITS and "wait_n=None" not in ast.unparse(node):
                    yield f"{function.name}: {ast.unparse(node)}", node


def _called(call: ast.Call) -> str | None:
    return call.func.attr if isinstance(call.func, ast.Attribute) else None
