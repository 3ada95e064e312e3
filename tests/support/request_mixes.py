"""Random mixes of requests that ask for what an engine can do, all of it decided by a seed."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

from jinfercept.calls import Call, Tool
from jinfercept.chat.call_markup import AsyncCalls
from jinfercept.chat.detector import ScriptedDetector, TokenDetector
from jinfercept.hooks import Detector
from jinfercept.sampling_params import SamplingParams
from jinfercept.structured_outputs import StructuredOutputsParams
from tests.support.async_streams import ascii_tokenizer
from tests.support.tiny_model import TOOL

TOKENIZER = ascii_tokenizer(True)
VOCAB = 128
WORDS = 95  # tokens that are text
MOST_PROMPT, MOST_TOKENS = 30, 28
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
FORMS: tuple[Mapping[str, Any], ...] = (
    {"choice": ["yes", "no, never", "abcabcabc"]},
    {"regex": r"([ab]c){4,9}(, [0-9]+)?"},
    {"json": SCHEMA},
)
ASYNC_SCRIPTS = (
    "[CALL]1[HEAD]f(2)[END]abc[TRAP][END]",
    "[CALL]1[HEAD]f(1)[END][CALL]2[HEAD]f(7)[END]ab",
    "a[CALL]x[HEAD]f(4)[END]bc",
)


class MixedRequest(NamedTuple):
    """A request of a mix.

    Attributes:
        kind: of `KINDS`.
        prompt: token ids.
        tools, detector, async_calls: as `LLM.make_requests` takes them.
        streamed: it has a stream of its own.
        read: events after which its client goes away; None: it stays.
        continued: another turn follows, on its retained context.
        tenant, priority: of the request.
    """

    kind: str
    prompt: list[int]
    params: SamplingParams
    tools: tuple[Tool, ...] = ()
    detector: Detector | None = None
    async_calls: AsyncCalls | None = None
    streamed: bool = False
    read: int | None = None
    continued: bool = False
    tenant: str = ""
    priority: int = 0


def token(text: str) -> int:
    """The token of a text that is one."""
    [token_id] = TOKENIZER.encode(text)
    return token_id


def draw_mix(rng: Random, number: int) -> list[MixedRequest]:
    """So many requests, of every kind in turn, in random order; their prompts share beginnings."""
    shared = [[rng.randrange(WORDS) for _ in range(MOST_PROMPT)] for _ in range(2)]
    kinds = [*KINDS]
    mix = [_draw(rng, kinds[place % len(kinds)], shared) for place in range(number)]
    rng.shuffle(mix)
    return mix


def _draw(rng: Random, kind: str, shared: list[list[int]]) -> MixedRequest:
    length = rng.randrange(2, MOST_PROMPT)
    common = rng.choice([0, rng.randrange(length)])
    prompt = rng.choice(shared)[:common] + [rng.randrange(WORDS) for _ in range(length - common)]
    drawn = MixedRequest(kind, prompt, _params(rng))
    return KINDS[kind](rng, drawn)._replace(
        streamed=rng.random() < 0.3,
        continued=rng.random() < 0.3,
        tenant=rng.choice(["", "", "a"]),
        priority=rng.choice([0, 0, -1]),
    )


def _params(rng: Random) -> SamplingParams:
    """Greedy, or drawn with a seed; some with penalties, some with reports."""
    options: dict[str, Any] = {"max_tokens": rng.randrange(4, MOST_TOKENS), "ignore_eos": rng.random() < 0.8}
    if rng.random() < 0.6:
        options |= {"temperature": rng.choice([0.3, 0.7, 1.2]), "seed": rng.choice([0, 7, -1, 2**32, 2**70])}
        options |= {"n": rng.choice([1, 1, 2, 3])}
        options |= rng.choice([{}, {}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.05}])
    else:
        options["temperature"] = 0.0
    options["logprobs"] = rng.choice([None, 2])
    return SamplingParams(**options)


def _plain(rng: Random, drawn: MixedRequest) -> MixedRequest:
    return drawn._replace(params=replace(drawn.params, max_tokens=40))


def _repetitive(rng: Random, drawn: MixedRequest) -> MixedRequest:
    """What n-grams find is what the model writes."""
    few = rng.sample(range(WORDS), rng.randrange(1, 4))
    form = StructuredOutputsParams(regex=f"({'|'.join(map(_escaped, few))}){{40}}")
    params = replace(drawn.params, max_tokens=MOST_TOKENS, structured_outputs=form)
    return drawn._replace(prompt=few * 4 + drawn.prompt[:4] + few * 3, params=params)


def _escaped(word: int) -> str:
    return "".join(f"\\x{ord(char):02x}" for char in TOKENIZER.decode([word]))


def _penalties(rng: Random, drawn: MixedRequest) -> MixedRequest:
    options: dict[str, Any] = rng.choice(
        [
            {"presence_penalty": 0.7, "frequency_penalty": 0.4},
            {"repetition_penalty": 1.3},
            {"logit_bias": {rng.randrange(WORDS): 2.5, rng.randrange(WORDS): -9.0}, "frequency_penalty": -0.2},
        ]
    )
    return drawn._replace(params=replace(drawn.params, **options))


def _ends(rng: Random, drawn: MixedRequest) -> MixedRequest:
    """Ends that come too early, stop strings, words that may not be written."""
    end = token("a")
    options: dict[str, Any] = {
        "max_tokens": MOST_TOKENS,
        "min_tokens": rng.randrange(1, 9),
        "stop_token_ids": [end],
        "stop": rng.choice([[], ["b"], ["ab", "b"]]),
        "logit_bias": {end: 2.0, token("b"): 4.0},
        "bad_words_token_ids": [[token("c")], [token("b"), token("d")]],
    }
    return drawn._replace(params=replace(drawn.params, **options))


def _allowed(rng: Random, drawn: MixedRequest) -> MixedRequest:
    return drawn._replace(
        params=replace(drawn.params, allowed_token_ids=rng.sample(range(WORDS), 6), repetition_penalty=1.1)
    )


def _scored(rng: Random, drawn: MixedRequest) -> MixedRequest:
    return drawn._replace(params=replace(drawn.params, prompt_logprobs=1, logprobs=1))


def _grammar(rng: Random, drawn: MixedRequest) -> MixedRequest:
    form = StructuredOutputsParams(**rng.choice(FORMS))
    return drawn._replace(params=replace(drawn.params, max_tokens=40, structured_outputs=form, ignore_eos=False))


def _scripted_calls(rng: Random, drawn: MixedRequest) -> MixedRequest:
    calls = {place: [_scripted(rng)] * rng.choice([1, 2]) for place in rng.sample(range(1, 12), rng.randrange(1, 4))}
    return drawn._replace(tools=(SLOW,), detector=ScriptedDetector(calls), params=replace(drawn.params, max_tokens=20))


def _scripted(rng: Random) -> Call:
    return Call("scripted", " ".join(str(rng.randrange(WORDS)) for _ in range(rng.choice([0, 1, 4, 9]))))


def _grammar_with_calls(rng: Random, drawn: MixedRequest) -> MixedRequest:
    return _scripted_calls(rng, _grammar(rng, drawn))


def _marked_calls(rng: Random, drawn: MixedRequest) -> MixedRequest:
    """Calls by stop strings."""
    bias = {token("a"): 2.5, token("b"): 2.5}
    return drawn._replace(tools=(MARKED,), params=replace(drawn.params, max_tokens=MOST_TOKENS, logit_bias=bias))


def _token_calls(rng: Random, drawn: MixedRequest) -> MixedRequest:
    bias = {token("a"): 1.5, token("b"): 2.5}
    detector = TokenDetector({token("b"): "marked"}, opening=token("a"))
    params = replace(drawn.params, max_tokens=MOST_TOKENS, logit_bias=bias)
    return drawn._replace(tools=(replace(MARKED, start=None, stop=None),), detector=detector, params=params)


def _async_calls(rng: Random, drawn: MixedRequest) -> MixedRequest:
    script = TOKENIZER.encode(rng.choice(ASYNC_SCRIPTS))
    params = replace(
        drawn.params, forced_output_ids=script, max_tokens=len(script) + rng.randrange(4, 12), ignore_eos=True
    )
    return drawn._replace(tools=(ASYNC,), async_calls=AsyncCalls(), params=params)


def _client_that_leaves(rng: Random, drawn: MixedRequest) -> MixedRequest:
    params = replace(drawn.params, max_tokens=40, ignore_eos=True)
    return _scripted_calls(rng, drawn)._replace(params=params, read=rng.randrange(12))


KINDS: Mapping[str, Callable[[Random, MixedRequest], MixedRequest]] = {
    "plain": _plain,
    "repetitive": _repetitive,
    "penalties": _penalties,
    "ends": _ends,
    "allowed": _allowed,
    "scored": _scored,
    "grammar": _grammar,
    "scripted calls": _scripted_calls,
    "grammar with calls": _grammar_with_calls,
    "calls by stop strings": _marked_calls,
    "calls by tokens": _token_calls,
    "asynchronous calls": _async_calls,
    "client that leaves": _client_that_leaves,
}


def _answer_scripted(argument: str) -> list[int]:
    time.sleep(len(argument) % 4 / 1000)
    return TOOL.function(argument)  # pyright: ignore[reportReturnType]


def _answer_marked(argument: str) -> str:
    time.sleep(len(argument) % 3 / 1000)
    return "xyz"[: len(argument) % 4]


def f(n: int) -> str:
    """Wait a few milliseconds."""
    time.sleep(n / 1000)
    return "r" * (n % 5)


SLOW = Tool(_answer_scripted, name="scripted")
MARKED = Tool(_answer_marked, name="marked", start="a", stop="b", result="({})")
ASYNC = Tool(f)
