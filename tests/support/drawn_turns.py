"""Turns that have to call, drawn at random of what their grammars allow, and what they call."""

import json
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator

from jinfercept.chat.function_tools import chat_tools
from jinfercept.chat.grammar.grammar import Grammars
from jinfercept.chat.parsers.formats import FORMATS
from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.chat.turn_grammars import compile_calls, tool_choice
from jinfercept.events import CallEnded, Content
from tests.support.sample_tokenizers import byte_backend, ended

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
