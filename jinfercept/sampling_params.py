"""Sampling parameters of one request, checked."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, Self

from jinfercept.errors import ArgumentError, RequestError, shown
from jinfercept.structured_outputs import StructuredOutputsParams
from jinfercept.values.plain import plain
from jinfercept.values.vllm_names import NAMES, no_such

MAX_TEMPERATURE = 1e6
MAX_LOGPROBS = 20
"""Likeliest tokens that are reported beside the chosen one."""
MAX_OUTPUTS = 1024
"""Of one prompt: each is a request of its own."""
MAX_BIASED_TOKENS = 1024
MAX_BAD_SEQUENCES = 256
MAX_BAD_TOKENS = 8
"""Tokens of a bad sequence: as many as the device remembers of what it drew, and one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are drawn and when it ends. Names, defaults and ranges as in vLLM; by keyword only.

    Numbers and arrays of NumPy, JAX and torch are stored as Python's. `dataclasses.replace` makes changed ones.

    What is done to a row of logits, in this order: tokens that may not come get -inf (`structured_outputs`,
    `allowed_token_ids`, `bad_words`, and until `min_tokens` the ends); `logit_bias`; penalties; at `temperature` 0 the largest
    is taken, else all are divided by it; `min_p`, `top_k` and `top_p`, each among what the one before it left; a draw.
    If no token is left, bad words and `min_tokens` are ignored for that draw.

    "Output" is what the model generated. Tokens that tools returned count as prompt: the repetition penalty looks at prompt
    and output, the others at the output only.

    Attributes:
        temperature: 0 is greedy.
        max_tokens: tokens to generate; tokens returned by tools do not count. None: until the sequence is full.
        seed: fixes the draws; of any size and sign. The random numbers of an output depend on the seed, the prompt's tokens
            and the output's place among `n`: the same request has the same tokens alone, in any batch and after any pause,
            and any other one is independent of it. None: they depend on the engine's seed and the request's number instead.
        stop: strings that end the text.
        stop_token_ids: tokens that end the request, besides the model's end-of-text tokens.
        include_stop_str_in_output: the text has the stop string, or the text of the token, that ends it. `token_ids` have
            the token in any case.
        ignore_eos: continue after an end-of-text token.
        skip_special_tokens: leave special tokens out of the text.
        structured_outputs: the form of the generated text. An end-of-text or stop token comes only where it may end (or
            where a stop token is its own text); with `ignore_eos` it ends where nothing can follow. `max_tokens` and `stop`
            cut it.
        n: outputs for one prompt, each with random numbers of its own, the first with those of a request with `n` 1; at most
            1,024. They share the full pages of the prompt. Not for greedy requests.
        top_k: draw among so many of the likeliest (and what is as likely as the last of them); 0 or -1: all.
        top_p: draw among the fewest likeliest tokens that have this probability together (likewise); 1: all; 0: the likeliest.
        min_p: draw among tokens at least so likely, compared to the likeliest; 0: all.
        repetition_penalty: logits of tokens in prompt or output are divided by it where positive, multiplied where negative.
        presence_penalty: subtracted from the logits of tokens in the output; -2 to 2.
        frequency_penalty: subtracted as often as the token is in the output; -2 to 2.
        logit_bias: added to logits, by token id; -100 to 100, at most 1,024 tokens.
        allowed_token_ids: nothing else is drawn: no end-of-text token either, unless it is among them. Refused together
            with `structured_outputs` and with a `tool_choice` that asks for a call, which say that too.
        bad_words: texts that are not generated: their last token is forbidden where the ones before it were just generated.
            They are looked for as tokens, with and without a space before them, as in vLLM.
        bad_words_token_ids: the same as token ids; at most 256 together (single tokens aside), of at most 8 tokens.
        min_tokens: tokens to generate before an end-of-text or stop token may come, and before a stop string may end.
        logprobs: report the log probability of each generated token, and of so many likeliest in its place; at most 20. Of the
            model's own logits, before anything above.
        return_processed_logprobs: report the log probability of each generated token in the distribution that it was drawn
            from: after all of the above. It is 0 where the temperature is 0.
        return_kept_tokens: report in place of each generated token which tokens could be drawn: those that all of the above has
            left. A word of 32 bits for 32 tokens of the vocabulary travels to the host for each generated token.
        prompt_logprobs: the same as `logprobs` for the tokens of the prompt, which is then computed whole: no cached pages are
            used.
        return_routed_experts: report which experts have computed each token, of a model that has some; for engines that were
            started with `enable_return_routed_experts`. The prompt is computed whole, as for `prompt_logprobs`.
        forced_output_ids: tokens that are generated whatever the model says, from the first one on; it says what follows them.
            For tests and measurements: ends, calls and log probabilities are those of tokens that the model had chosen.
    """

    temperature: float = 1.0
    max_tokens: int | None = 16
    seed: int | None = None
    stop: tuple[str, ...] | list[str] | str | None = ()
    stop_token_ids: tuple[int, ...] | list[int] | None = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    n: int = 1
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    bad_words: tuple[str, ...] | list[str] | None = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] | list[list[int]] | None = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_processed_logprobs: bool = False
    return_kept_tokens: bool = False
    return_routed_experts: bool = False
    forced_output_ids: tuple[int, ...] | list[int] = ()

    def __new__(cls, *by_position: object, **parameters: object) -> Self:
        if by_position:
            raise ArgumentError(
                "sampling parameters are given by name", got=shown(by_position), fix="SamplingParams(temperature=0)"
            )
        names = [field.name for field in fields(cls)]
        for name in sorted(parameters.keys() - {*names}):
            raise no_such(ArgumentError, "there is no such sampling parameter", name, names, NAMES["renamed_sampling"])
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, plain(getattr(self, field.name)))
        self._check_ends()
        self._check_numbers()
        self._check_tokens()
        for name in (field.name for field in fields(self) if field.type == "bool" or field.type is bool):
            value = getattr(self, name)
            if type(value) is not bool:
                raise RequestError(f"{name} is True or False", got=shown(value), fix="give one of them")

    @property
    def reports_processed(self) -> bool:
        """Whether the distribution of each draw is reported."""
        return self.return_processed_logprobs or self.return_kept_tokens

    @property
    def reports_draws(self) -> bool:
        """Whether anything is reported of each draw."""
        return self.logprobs is not None or self.reports_processed

    def _check_ends(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        if not isinstance(stop, list | tuple) or any(not isinstance(text, str) or not text for text in stop):
            raise RequestError(
                "stop is one or several texts that are not empty", got=shown(self.stop), fix="leave it out"
            )
        if not _is_ids(ids):
            raise RequestError("stop_token_ids is a list of token ids", got=shown(ids), fix="give whole numbers")
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(ids))
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, None, "ask for a token")
        _whole("min_tokens", self.min_tokens, 0, self.max_tokens, "at most max_tokens")
        if self.seed is not None and type(self.seed) is not int:
            raise RequestError("seed is a whole number", got=shown(self.seed), fix="leave it out, or give one")

    def _check_numbers(self) -> None:
        if not is_number(self.temperature) or not 0 <= self.temperature <= MAX_TEMPERATURE:
            raise RequestError(
                f"temperature is a number from 0 to {MAX_TEMPERATURE:g}", got=shown(self.temperature), fix="0 is greedy"
            )
        if not is_number(self.top_p) or not 0 <= self.top_p <= 1:
            raise RequestError("top_p must be from 0 to 1", got=shown(self.top_p), fix="1 turns it off")
        if not is_number(self.min_p) or not 0 <= self.min_p <= 1:
            raise RequestError("min_p must be from 0 to 1", got=shown(self.min_p), fix="0 turns it off")
        if not is_number(self.repetition_penalty) or not 0 < self.repetition_penalty < math.inf:
            raise RequestError(
                "repetition_penalty is a number above 0", got=shown(self.repetition_penalty), fix="1 turns it off"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not is_number(value) or not -2 <= value <= 2:
                raise RequestError(f"{name} is a number from -2 to 2", got=shown(value), fix="0 turns it off")
        _whole("top_k", self.top_k, -1, None, "0 or -1 turn it off")
        _whole("n", self.n, 1, MAX_OUTPUTS, "give the prompt several times")
        if self.n > 1 and self.temperature == 0:
            raise RequestError("greedy outputs are identical", got=f"n={self.n}", fix="n=1, or a temperature above 0")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0, MAX_LOGPROBS, "0 reports the token alone; all (-1) are too many")

    def _check_tokens(self) -> None:
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputsParams):
            raise RequestError(
                "structured_outputs must be a StructuredOutputsParams",
                got=shown(self.structured_outputs),
                fix="StructuredOutputsParams(json=…)",
            )
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        allowed = self.allowed_token_ids
        if allowed is not None:
            if not _is_ids(allowed) or not allowed:
                raise RequestError(
                    "allowed_token_ids is a list of token ids", got=shown(allowed), fix="give at least one"
                )
            object.__setattr__(self, "allowed_token_ids", tuple(allowed))
        if not _is_ids(self.forced_output_ids):
            raise RequestError(
                "forced_output_ids is a list of token ids", got=shown(self.forced_output_ids), fix="leave it out"
            )
        object.__setattr__(self, "forced_output_ids", tuple(self.forced_output_ids))
        words = self.bad_words or ()
        if not isinstance(words, list | tuple) or any(not isinstance(word, str) or not word.strip() for word in words):
            raise RequestError("bad_words is a list of texts", got=shown(words), fix="none of them empty")
        object.__setattr__(self, "bad_words", tuple(words))
        bad = self.bad_words_token_ids or ()
        if not isinstance(bad, list | tuple) or any(not _is_ids(ids) or not ids for ids in bad):
            raise RequestError(
                "bad_words_token_ids is a list of lists of token ids", got=shown(bad), fix="none of them empty"
            )
        several = [ids for ids in bad if len(ids) > 1]
        if len(several) > MAX_BAD_SEQUENCES or max(map(len, several), default=0) > MAX_BAD_TOKENS:
            raise RequestError(
                f"at most {MAX_BAD_SEQUENCES} bad words have several tokens, at most {MAX_BAD_TOKENS} each",
                got=f"{len(several)}, up to {max(map(len, several))} tokens long",
                fix="forbid fewer, or the beginnings of the long ones",
            )
        object.__setattr__(self, "bad_words_token_ids", tuple(map(tuple, bad)))


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raises `RequestError` if the parameters name tokens that the model does not have, or leave none to draw."""
    allowed, bad = params.allowed_token_ids or (), params.bad_words_token_ids or ()
    named = chain(params.logit_bias or (), allowed, params.stop_token_ids or (), params.forced_output_ids, *bad)
    wrong = next((token for token in named if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise RequestError(
            f"token ids in sampling parameters must be from 0 to {vocab_size - 1}", got=wrong, fix="check the tokenizer"
        )
    single = {ids[0] for ids in bad if len(ids) == 1}
    if len(single) == vocab_size or (allowed and single.issuperset(allowed)):
        raise RequestError("bad words forbid all that is allowed", got="the same tokens", fix="forbid fewer tokens")


def _biases(logit_bias: Any) -> dict[int, float]:
    """Biases by token id; keys may be texts, as JSON has them."""
    try:
        biases = {int(token): float(bias) for token, bias in logit_bias.items()}
    except (AttributeError, TypeError, ValueError):
        biases = {0: math.nan}
    if not all(-100 <= bias <= 100 for bias in biases.values()):
        raise RequestError(
            "logit_bias must map token ids to numbers from -100 to 100", got=shown(logit_bias), fix="{token id: bias}"
        )
    if len(biases) > MAX_BIASED_TOKENS:
        raise RequestError(
            f"logit_bias may have at most {MAX_BIASED_TOKENS} tokens",
            got=len(biases),
            fix="use allowed_token_ids or bad_words",
        )
    return biases


def _whole(name: str, value: Any, least: int, most: int | None, fix: str) -> None:
    if type(value) is not int or value < least or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise RequestError(f"{name} is a whole number, {bounds}", got=shown(value), fix=fix)


def _is_ids(value: object) -> bool:
    return isinstance(value, list | tuple) and all(type(token) is int for token in value)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
