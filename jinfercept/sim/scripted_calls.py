"""Requests whose calls in context markup language are scripted: the text of a script, its tokens, and the request.

The vocabulary has a token for each printable character, and the five delimiters. So the text's length is its number of tokens,
and the engine reads the markup as that of any model.
"""

from collections.abc import Iterator
from functools import cache

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jinfercept.engine.text_stream import TextStream
from jinfercept.intercept.call_markup import AsyncCalls, ContextMarkup
from jinfercept.parsers.cml import DELIMITERS
from jinfercept.request import Call, CallMode, Request, SamplingParams, Tool
from jinfercept.sim.call_scripts import DURATIONS, CallScript, ScriptedCall
from jinfercept.tokenizer.tokenizer import Tokenizer

PARAMETERS = ("seconds", "tokens")
"""Of every scripted tool."""


@cache
def scripted_tokenizer() -> Tokenizer:
    """A token for each printable ASCII character and for each delimiter."""
    characters = ["Ġ", *(chr(code) for code in range(33, 127))]
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(characters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore
    backend.decoder = decoders.ByteLevel()  # pyright: ignore
    backend.add_special_tokens(list(DELIMITERS))
    return Tokenizer(backend)


@cache
def scripted_markup(calls: CallMode) -> ContextMarkup:
    """The markup of scripted requests whose calls run in this way."""
    tools = {name: Tool(str, name=name) for name in DURATIONS}
    return ContextMarkup(AsyncCalls(calls), tools, dict.fromkeys(tools, PARAMETERS), scripted_tokenizer())


def text_of(script: CallScript) -> str:
    """What the model writes; of `script.generated` tokens in the scripted vocabulary.

    Every call has as many tokens as its script says, at least those that its text needs.
    """
    number, parts = 0, list[str]()
    for calls in script.rounds:
        for call in calls:
            number += 1
            parts += [_call_text(str(number), call), "." * call.prose]
        parts.append(f"{DELIMITERS.trap}{DELIMITERS.end}")
    return "".join([*parts, "." * script.answer])


def _call_text(call_id: str, call: ScriptedCall) -> str:
    code = f"{call.tool}({call.seconds!r},{call.returned})"
    spaces = call.decode - len(code) - len(call_id) - 3
    assert spaces >= 0, f"{call} has no room for its code"
    return f"{DELIMITERS.call}{call_id}{DELIMITERS.head}{code}{' ' * spaces}{DELIMITERS.end}"


def make_call_request(number: int, script: CallScript) -> Request:
    """A scripted request that generates what `text_of` says; no two share a page.

    Args:
        number: its id.
    """
    tokens = scripted_tokenizer().encode(text_of(script))
    assert len(tokens) == script.generated
    params = SamplingParams(temperature=0.0, max_tokens=len(tokens), forced_output_ids=tokens, ignore_eos=True)
    markup = scripted_markup(script.calls)
    return Request(str(number), (0,) * script.prompt, params, cache_salt=str(number), markup=markup)


def open_scripted_text(request: Request) -> TextStream:
    """The engine's `open_text` for scripted requests."""
    return TextStream(scripted_tokenizer(), (), False, False)


def forced_calls(request: Request, tokenizer: Tokenizer) -> Iterator[Call]:
    """The calls in what a request is forced to generate; their spans leave out what it reads."""
    assert request.markup is not None
    watch = request.markup.watch("", ())
    for index, token in enumerate(request.params.forced_output_ids):
        yield from (found for found in watch.feed(index, token, tokenizer.token_text(token)) if isinstance(found, Call))
