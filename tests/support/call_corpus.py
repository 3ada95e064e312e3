"""Turns that call tools, and the pieces that a parser makes of them, joined so that no division of the text changes them.

Turns are those of a corpus, drawn of what their grammars allow, or written as the families write calls.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jsonschema import Draft202012Validator

from jinfercept.chat.function_tools import chat_tools
from jinfercept.chat.grammar.grammar import Grammars
from jinfercept.chat.parsers.formats import FORMATS
from jinfercept.chat.parsers.source import ToolSchemas
from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.chat.turn_grammars import compile_calls, tool_choice
from jinfercept.events import Arguments, CallEnded, CallStarted, Content, Piece, Reasoning
from tests.support.sample_tokenizers import byte_backend, ended

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


MARKS = sorted({tag for form in FORMATS.values() for tag in form.tags if not tag.endswith("=")})


CLOSING = {*"\"'}])", "}}"}


@cache
def vocabulary(marked: bool) -> tuple[Tokenizer, Grammars]:
    """Single bytes and some JSON; tags are special tokens, or text."""
    merges = [('"', ":"), ("{", '"'), ("Ġ", '"'), (",", 'Ġ"'), ("}", "}"), ("Ċ", "<"), ("e", ">")]
    tokenizer = ended(byte_backend(merges, ["<|im_end|>", *(MARKS if marked else ())]), "<|im_end|>")
    return tokenizer, Grammars(tokenizer, tokenizer.vocab_size)


def turn(
    name: str, template: str, tools: dict[str, Any], seed: int, *, marked: bool = True, parallel: bool = True
) -> str:
    """A turn drawn at random; after a while it closes what is open wherever it may."""
    tokenizer, grammars = vocabulary(marked)
    form = replace(FORMATS[name], tools=tools)
    declared = chat_tools([{"name": name, "parameters": schema} for name, schema in tools.items()])
    grammar = compile_calls(tool_choice("required", parallel, declared), form, template, tokenizer, grammars)
    assert grammar is not None
    rng, drawn = np.random.default_rng(seed), list[int]()
    constraint = grammar.constrain(tokenizer.eos_token_ids)
    while not drawn or drawn[-1] not in tokenizer.eos_token_ids:
        words = constraint.allowed()
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        assert allowed
        ends = [token for token in allowed if token in tokenizer.eos_token_ids and len(drawn) > 200 * rng.random()]
        texts = {token: tokenizer.token_text(token) for token in allowed if len(drawn) > 120}
        shorter = [token for token in texts if texts[token] in CLOSING]
        drawn.append(int(rng.choice(ends or shorter or allowed)))
        constraint.accept(drawn[-1])
        assert len(drawn) < 4000
    return tokenizer.decode(drawn[:-1], skip_special_tokens=False)


def calls(name: str, tools: dict[str, Any], text: str) -> list[tuple[str, Any]]:
    """What a turn calls, which must be all of it, with arguments that its tools take."""
    parser = replace(FORMATS[name], tools=tools).parser()
    pieces = parser.feed(text) + parser.finish()
    assert not [piece for piece in pieces if isinstance(piece, Content)], text
    turn_calls = [
        (piece.call.name, json.loads(piece.call.arguments, strict=False))
        for piece in pieces
        if isinstance(piece, CallEnded)
    ]
    assert turn_calls, text
    for tool, arguments in turn_calls:
        Draft202012Validator({"type": "object", **tools[tool]}).validate(arguments)
    return turn_calls


END = "\n</parameter>"
"""The text that ends a value."""


def xml_call(tool: str, values: Mapping[str, Any], dumped: Callable[[Any], str] = json.dumps, end: str = END) -> str:
    """A call.

    Args:
        tool: its name.
        values: the arguments.
        dumped: writes those that are no strings.
        end: the text that ends a value.
    """
    texts = {key: value if isinstance(value, str) else dumped(value) for key, value in values.items()}
    written = "".join(f"<parameter={key}>\n{text}{end}\n" for key, text in texts.items())
    return f"<tool_call>\n<function={tool}>\n{written}</function>\n</tool_call>"


Called = Sequence[tuple[str, Mapping[str, Any]]]
"""Names of tools and arguments."""


def _openai(calls: Called) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(values)}<|call|>"
        for name, values in calls
    )


def _listed(opening: str, closing: str) -> Callable[[Called], str]:
    def write(calls: Called) -> str:
        objects = [json.dumps({"name": name, "arguments": values}) for name, values in calls]
        return f"{opening}[{', '.join(objects)}]{closing}"

    return write


def _glm(calls: Called) -> str:
    def write(name: str, values: Mapping[str, Any]) -> str:
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
        written = (f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in texts.items())
        return f"<tool_call>{name}\n{''.join(written)}</tool_call>"

    return "\n".join(write(*call) for call in calls)


def _gemma(calls: Called) -> str:
    return "".join(f"<|tool_call>call:{name}{_gemma_value(values)}<tool_call|>" for name, values in calls)


def _gemma_value(value: Any) -> str:
    """As the family's template writes it, but what it cannot express: texts with its quotes, and keys with punctuation."""
    if isinstance(value, Mapping):
        keys = {key: key if re.fullmatch(r"[\w.-]+", key) else json.dumps(key) for key in value}
        return "{" + ",".join(f"{keys[key]}:{_gemma_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(_gemma_value, value))}]"
    if isinstance(value, str) and '<|"|>' not in value:
        return f'<|"|>{value}<|"|>'
    return json.dumps(value)


WRITTEN: Mapping[str, Callable[[Called], str]] = {
    "apriel": _listed("<tool_calls>", "</tool_calls>\n<|end|>"),
    "firefunction": _listed(" functools", "<|eot_id|>"),
    "gemma4": _gemma,
    "glm45": _glm,
    "granite": _listed("<|tool_call|>", "<|end_of_text|>"),
    "nemotron_json": _listed("<TOOLCALL>", "</TOOLCALL><SPECIAL_12>"),
    "openai": _openai,
    "qwen3_coder": lambda calls: "\n".join(xml_call(*call) for call in calls),
}
