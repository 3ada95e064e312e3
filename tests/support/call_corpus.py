"""Turns that call tools, and the pieces that a parser makes of them, joined so that no division of the text changes them."""

import codecs
import json
from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

from jinfercept.chat.parsers.formats import FORMATS
from jinfercept.chat.parsers.source import ToolSchemas
from jinfercept.events import Arguments, CallEnded, CallStarted, Content, Piece, Reasoning

CORPUS = Path(__file__).parents[1] / "chat" / "parsers" / "corpus"


class Turn(NamedTuple):
    """One entry of the corpus; `pieces` are those that `joined` returns."""

    format: str
    name: str
    text: str
    pieces: list[tuple[str, ...]]
    tools: ToolSchemas | None


def corpus() -> list[Turn]:
    """All entries of all formats."""
    return [
        Turn(path.stem, entry["name"], entry["text"], [tuple(piece) for piece in entry["pieces"]], entry.get("tools"))
        for path in sorted(CORPUS.glob("*.jsonl"))
        for entry in map(json.loads, path.read_text(encoding="utf-8").splitlines())
    ]


def parsed(format: str, parts: Iterable[str], tools: ToolSchemas | None = None) -> list[tuple[str, ...]]:
    """The joined pieces of a turn that comes in these parts; without the ids that the parser makes."""
    return joined(pieces_of(format, parts, tools))


def pieces_of(format: str, parts: Iterable[str], tools: ToolSchemas | None = None) -> list[Piece]:
    """The pieces of a turn that comes in these parts, as the parser returned them."""
    ids = (f"made up {number}" for number in count())
    parser = replace(FORMATS[format], tools=tools).parser(lambda: next(ids))
    return [piece for part in parts for piece in parser.feed(part)] + parser.finish()


def joined(pieces: list[Piece]) -> list[tuple[str, ...]]:
    """Joined content and whole calls, in order, after a check that the pieces fit together."""
    parts: list[tuple[str, ...]] = []
    open_call: CallStarted | None = None
    arguments = ""
    num_calls = 0
    for piece in pieces:
        match piece:
            case Content(text):
                assert text
                assert open_call is None, "content within a call"
                if parts and parts[-1][0] == "content":
                    text = parts.pop()[1] + text
                parts.append(("content", text))
            case Reasoning(text):
                assert text
                assert open_call is None, "reasoning within a call"
                if parts and parts[-1][0] == "reasoning":
                    text = parts.pop()[1] + text
                parts.append(("reasoning", text))
            case CallStarted():
                assert open_call is None, "a call within a call"
                assert piece.index == num_calls
                assert piece.name
                open_call, arguments = piece, ""
            case Arguments(index, text):
                assert open_call is not None
                assert index == num_calls
                assert text
                arguments += text
            case CallEnded(index, call):
                assert open_call is not None
                assert index == num_calls
                assert (call.name, call.arguments, call.id) == (open_call.name, arguments, open_call.id)
                assert 0 <= call.span[0] < call.span[1]
                parts.append(("call", call.name, arguments, *(() if call.id.startswith("made up") else (call.id,))))
                open_call = None
                num_calls += 1
    if open_call is not None:
        parts.append(("cut", open_call.name, arguments))
    return parts


def decoded(parts: Iterable[bytes]) -> list[str]:
    """Bytes as an incremental detokenizer turns them into text."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return [*map(decoder.decode, parts), decoder.decode(b"", final=True)]
