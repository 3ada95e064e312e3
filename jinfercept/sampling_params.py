"""Sampling parameters of one request, checked."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import chain
from typing import Annotated, Self

from pydantic import BaseModel, BeforeValidator, Field, InstanceOf, ValidationError

from jinfercept.config import MAX_BIAS
from jinfercept.errors import ArgumentError, RequestError, shown
from jinfercept.structured_outputs import StructuredOutputsParams
from jinfercept.values import plain
from jinfercept.vllm_names import NAMES, no_such

MAX_TEMPERATURE = 1e6
MAX_LOGPROBS = 20
"""Likeliest tokens that are reported beside the chosen one."""
MAX_OUTPUTS = 1024
"""Outputs of one prompt: each is a request of its own."""
MAX_BIASED_TOKENS = 1024
MAX_BAD_SEQUENCES = 256
MAX_BAD_TOKENS = 8
"""Tokens of a bad sequence: as many as the device remembers of its draws, and one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The draws of one request's tokens, and its end. Names, defaults and ranges as in vLLM; by keyword only.

    Numbers and arrays of NumPy, JAX and torch are stored as Python's. `dataclasses.replace` makes changed ones.

    A row of logits is changed in this order: tokens that may not come get -inf (`structured_outputs`, `allowed_token_ids`,
    `bad_words`, and until `min_tokens` the ends); `logit_bias`; penalties; at `temperature` 0 the largest is taken, else all
    are divided by it; `min_p`, `top_k` and `top_p`, each among the tokens that the one before it left; a draw. If no token is
    left, bad words and `min_tokens` are ignored for that draw.

    "Output" is the generated tokens. Tokens that tools returned count as prompt: the repetition penalty looks at prompt and
    output, the others at the output only.

    Attributes:
        temperature: 0 is greedy.
        max_tokens: tokens to generate; tokens returned by tools do not count. None: until the sequence is full.
        seed: fixes the draws; of any size and sign. The random numbers of an output depend on the seed, the prompt's tokens
            and the output's place among `n`. So a request has the same tokens alone, in any batch and after any pause, and
            another one is independent of it. None: they depend on the engine's seed and the request's number instead.
        stop: strings that end the text.
        stop_token_ids: tokens that end the request, besides the model's end-of-text tokens.
        include_stop_str_in_output: the text has the stop string, or the text of the token, that ends it. `token_ids` have the
            token in any case.
        ignore_eos: continue after an end-of-text token.
        skip_special_tokens: leave special tokens out of the text.
        structured_outputs: the form of the generated text. An end-of-text or stop token comes only where the text may end (or
            where a stop token is its own text); with `ignore_eos` it ends where nothing can follow. `max_tokens` and `stop`
            cut it.
        n: outputs for one prompt, at most 1,024, each with random numbers of its own, the first with those of a request with
            `n` 1. They share the full pages of the prompt. Not for greedy requests.
        top_k: draw among this many of the likeliest (and those as likely as the last of them); 0 or -1: all.
        top_p: draw among the fewest likeliest tokens that have this probability together (likewise); 1: all; 0: the
            likeliest.
        min_p: draw among tokens at least this likely, compared to the likeliest; 0: all.
        repetition_penalty: divides positive logits of tokens in prompt or output, multiplies negative ones; 0.01 to 100.
        presence_penalty: subtracted from the logits of tokens in the output; -2 to 2.
        frequency_penalty: subtracted for each time that the token is in the output; -2 to 2.
        logit_bias: added to logits, by token id; -100 to 100, at most 1,024 tokens.
        allowed_token_ids: nothing else is drawn: no end-of-text token either, unless it is among them. Refused together with
            `structured_outputs`, and with a `tool_choice` that asks for a call, which also restrict the tokens.
        bad_words: texts that are not generated: their last token is forbidden after the ones before it. They are looked for
            as tokens, with and without a space before them, as in vLLM.
        bad_words_token_ids: the same as token ids; at most 256 together (single tokens aside), of at most 8 tokens.
        min_tokens: tokens to generate before an end-of-text or stop token may come, and before a stop string may end.
        logprobs: report the log probability of each generated token, and of this many likeliest in its place; at most 20. By
            the model's own logits, before anything above.
        return_processed_logprobs: report the log probability of each generated token in the distribution that it was drawn
            from, after all of the above. It is 0 where the temperature is 0.
        return_kept_tokens: report for each generated token the tokens that could be drawn in its place, after all of the
            above. For each, a word of 32 bits travels to the host for 32 tokens of the vocabulary.
        prompt_logprobs: as `logprobs`, for the tokens of the prompt. It is then computed whole: no cached pages are used.
        return_routed_experts: report the experts that computed each token, if the model has some and the engine was started
            with `enable_return_routed_experts`. The prompt is computed whole, as for `prompt_logprobs`.
        forced_output_ids: the first generated tokens, whatever the model says; it says what follows them. For tests and
            measurements: ends, calls and log probabilities are as if the model had chosen them.
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
        given = {name: plain(getattr(self, name)) for name in _Checked.model_fields}
        try:
            checked = _Checked.model_validate(given)
        except ValidationError as error:
            name = str(error.errors()[0]["loc"][0])
            fix = f"give {_Checked.model_fields[name].description}"
            raise RequestError(f"{name} is wrong", got=shown(given[name]), fix=fix) from None
        for name in given:
            object.__setattr__(self, name, getattr(checked, name))
        self._check_together()

    @property
    def reports_processed(self) -> bool:
        return self.return_processed_logprobs or self.return_kept_tokens

    @property
    def reports_draws(self) -> bool:
        return self.logprobs is not None or self.reports_processed

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            what = f"min_tokens is a whole number, from 0 to {self.max_tokens}"
            raise RequestError(what, got=self.min_tokens, fix="at most max_tokens")
        if self.n > 1 and self.temperature == 0:
            raise RequestError("greedy outputs are identical", got=f"n={self.n}", fix="n=1, or a temperature above 0")
        several = [len(ids) for ids in self.bad_words_token_ids or () if len(ids) > 1]
        if len(several) > MAX_BAD_SEQUENCES or max(several, default=0) > MAX_BAD_TOKENS:
            raise RequestError(
                f"at most {MAX_BAD_SEQUENCES} bad words have several tokens, at most {MAX_BAD_TOKENS} each",
                got=f"{len(several)}, up to {max(several)} tokens long",
                fix="forbid fewer, or the beginnings of the long ones",
            )


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raise `RequestError` if the parameters name tokens that the model does not have, or leave none to draw."""
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


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_Text = Annotated[str, Field(min_length=1)]
_Word = Annotated[str, Field(pattern=r"\S")]
_Token = Annotated[int, Field(strict=True)]
_Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
_EMPTY = BeforeValidator(lambda given: () if given is None else given)


_REPORTED = f"a whole number from 0 (the token alone) to {MAX_LOGPROBS}, or None"
_FLAG: bool = Field(strict=True, description="True or False")


class _Checked(BaseModel):
    """The types and ranges of the parameters. Descriptions say what to give."""

    temperature: float = Field(
        ge=0, le=MAX_TEMPERATURE, strict=True, description=f"a number from 0 (greedy) to {MAX_TEMPERATURE:g}"
    )
    max_tokens: int | None = Field(ge=1, strict=True, description="a whole number, at least 1, or None")
    min_tokens: int = Field(ge=0, strict=True, description="a whole number from 0 to max_tokens")
    seed: int | None = Field(strict=True, description="a whole number, or None")
    stop: Annotated[
        tuple[_Text, ...], BeforeValidator(lambda given: (given,) if isinstance(given, str) else given or ())
    ] = Field(description="a text that is not empty, or a list of such texts")
    stop_token_ids: Annotated[tuple[_Token, ...], _EMPTY] = Field(description="a list of token ids")
    n: int = Field(ge=1, le=MAX_OUTPUTS, strict=True, description=f"a whole number from 1 to {MAX_OUTPUTS}")
    top_k: int = Field(ge=-1, strict=True, description="a whole number, at least 1, or 0 or -1 for all tokens")
    top_p: float = Field(ge=0, le=1, strict=True, description="a number from 0 to 1 (off)")
    min_p: float = Field(ge=0, le=1, strict=True, description="a number from 0 (off) to 1")
    repetition_penalty: float = Field(ge=0.01, le=100, strict=True, description="a number from 0.01 to 100; 1 is off")
    presence_penalty: float = Field(ge=-2, le=2, strict=True, description="a number from -2 to 2; 0 is off")
    frequency_penalty: float = Field(ge=-2, le=2, strict=True, description="a number from -2 to 2; 0 is off")
    logit_bias: dict[int, _Bias] | None = Field(
        max_length=MAX_BIASED_TOKENS,
        description=f"{{token id: a number from -{MAX_BIAS} to {MAX_BIAS}}}, at most {MAX_BIASED_TOKENS} tokens",
    )
    allowed_token_ids: tuple[_Token, ...] | None = Field(min_length=1, description="a list of at least one token id")
    bad_words: Annotated[tuple[_Word, ...], _EMPTY] = Field(description="a list of texts, none of them empty")
    bad_words_token_ids: Annotated[tuple[Annotated[tuple[_Token, ...], Field(min_length=1)], ...], _EMPTY] = Field(
        description="a list of lists of token ids, none of them empty"
    )
    logprobs: int | None = Field(ge=0, le=MAX_LOGPROBS, strict=True, description=_REPORTED)
    prompt_logprobs: int | None = Field(ge=0, le=MAX_LOGPROBS, strict=True, description=_REPORTED)
    structured_outputs: InstanceOf[StructuredOutputsParams] | None = Field(
        description="StructuredOutputsParams(json=…)"
    )
    forced_output_ids: tuple[_Token, ...] = Field(description="a list of token ids")
    ignore_eos: bool = _FLAG
    include_stop_str_in_output: bool = _FLAG
    skip_special_tokens: bool = _FLAG
    return_processed_logprobs: bool = _FLAG
    return_kept_tokens: bool = _FLAG
    return_routed_experts: bool = _FLAG
