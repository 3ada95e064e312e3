"""Ids of calls that models write again."""

from itertools import count

from jinfercept.events import CallEnded, CallStarted
from jinfercept.parsers.distinct_ids import DistinctIds
from jinfercept.parsers.formats import FORMATS

HERMES = """<tool_call>{"id": "c1", "name": "price", "arguments": {"item": "lamp"}}</tool_call>"""
KIMI = """<|tool_call_begin|>functions.price:0<|tool_call_argument_begin|>{"item": "lamp"}<|tool_call_end|>"""


def ids_of(format: str, text: str, used: set[str]) -> list[str]:
    """The ids of the calls of a turn, the same at their beginnings and at their ends."""
    made = (f"made {number}" for number in count())
    parser = DistinctIds(FORMATS[format].parser(), used, lambda: next(made))
    pieces = [*parser.feed(text), *parser.finish()]
    ids = [piece.call.id for piece in pieces if isinstance(piece, CallEnded)]
    assert ids == [piece.id for piece in pieces if isinstance(piece, CallStarted)]
    return ids


def test_an_id_that_an_earlier_call_has_is_replaced() -> None:
    used = set[str]()
    assert ids_of("hermes", f"{HERMES}\n{HERMES}\n{HERMES.replace('c1', 'c2')}", used) == ["c1", "made 0", "c2"]
    assert ids_of("hermes", HERMES, used - {"made 0"}) == ["made 0"]


def test_an_id_with_a_name_keeps_it_and_stays_as_it_is_while_no_other_call_has_it() -> None:
    section = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>".format
    used = set[str]()
    second = KIMI.replace(":0", ":1")
    assert ids_of("kimi_k2", section(KIMI + second), used) == ["functions.price:0", "functions.price:1"]
    assert ids_of("kimi_k2", section(KIMI + second), used) == ["functions.price:2", "functions.price:3"]
    assert ids_of("kimi_k2", section(KIMI), {"functions.price:0", "functions.price:2"}) == ["functions.price:3"]
