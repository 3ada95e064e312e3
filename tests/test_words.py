"""Names that had several meanings are retired, and a class name means one thing in the whole package."""

import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "jinfercept"
RETIRED = {
    "ChosenTools": "MessagesToolChoice, ResponseToolChoice",
    "Counters": "SchedulerCounters",
    "Counts": "EngineCounts",
    "Endpoints": "CallDispatcher",
    "Observers": "RequestLog",
    "Page": "PageExtent",
    "PageStore": "ExtentStore",
    "RunTotals": "MeanRun",
    "Stored": "StoredWeight, PackedNumbers",
}


def test_a_class_name_means_one_thing_and_retired_names_do_not_come_back() -> None:
    names = Counter(
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, number in names.items() if number > 1} == set()
    assert RETIRED.keys() & names.keys() == set()
