"""Requests whose calls in context markup language are scripted: the text of a script, its tokens, and the request.

The vocabulary has a token for each printable character, and the five delimiters. So the text's length is its number of
tokens, and the engine reads the markup as that of any model.
"""

from functools import cache
from typing import NamedTuple

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jinfercept.calls import CallMode, Tool
from jinfercept.chat.call_markup import AsyncCalls, ContextMarkup
from jinfercept.chat.parsers.cml import DELIMITERS
from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.request import Request
from jinfercept.sampling_params import SamplingParams
from studies.calls.scripts import DURATIONS, CallScript, ScriptedCall

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
    return ContextMarkup(AsyncCalls(calls=calls), tools, dict.fromkeys(tools, PARAMETERS), scripted_tokenizer())


def text_of(script: CallScript, word: str = ".") -> str:
    """What the model writes; of `script.generated` tokens in the scripted vocabulary.

    Every call is filled with spaces to as many characters as its script has tokens.

    Args:
        script: rounds, whose calls have room for their code.
        word: a token of prose and of the answer.
    """
    number, parts = 0, list[str]()
    for calls in script.rounds:
        for call in calls:
            number += 1
            parts += [_call_text(str(number), call), word * call.prose]
        parts.append(f"{DELIMITERS.trap}{DELIMITERS.end}")
    return "".join([*parts, word * script.answer])


def _call_text(call_id: str, call: ScriptedCall) -> str:
    code = f"{call.tool}({call.seconds!r},{call.returned})"
    spaces = call.decode - len(code) - len(call_id) - 3
    assert spaces >= 0, f"{call} has no room for its code"
    return f"{DELIMITERS.call}{call_id}{DELIMITERS.head}{code}{' ' * spaces}{DELIMITERS.end}"


class CallArrival(NamedTuple):
    """A request and the second at which it arrives, counted from the start of the run."""

    at_s: float
    script: CallScript

    def request(self, number: int) -> Request:
        """The request of the script."""
        return make_call_request(number, self.script)


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
