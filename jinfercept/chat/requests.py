"""Makes requests from the arguments of `LLM.generate`. All arguments are checked before any request starts."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, Self

from jinfercept.calls import Tool
from jinfercept.chat.call_markup import AsyncCalls, ContextMarkup
from jinfercept.chat.detector import StopStringDetector
from jinfercept.chat.function_tools import ChatTool, chat_tools
from jinfercept.chat.grammar.constraint import ForbiddenText, WithoutText
from jinfercept.chat.grammar.grammar import Grammars
from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.errors import PromptLengthError, RequestError, shown
from jinfercept.hooks import Detector, Grammar
from jinfercept.request import Request
from jinfercept.sampling_params import SamplingParams
from jinfercept.values import plain


class IdArray(Protocol):
    """An array of NumPy, JAX or torch."""

    def tolist(self) -> Any: ...


Prompt = str | Mapping[str, Any] | Sequence[int] | IdArray
"""A text, token ids, or `{"prompt_token_ids": [...]}`; `"cache_salt"` and the text as `"prompt"` may stand beside these ids."""

_PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


def params_of_each(params: Any, number: int) -> list[SamplingParams]:
    """Return the parameters of each prompt. Raises `RequestError` for anything but `SamplingParams`."""
    all_params = one_each(params, SamplingParams, number, "sampling_params")
    for own in all_params:
        if not isinstance(own, SamplingParams):
            raise RequestError("sampling_params are SamplingParams", got=shown(own), fix="SamplingParams(max_tokens=…)")
    return all_params


def compiled_params(
    params: SamplingParams, tokenizer: Tokenizer | None, grammars: Grammars | None
) -> tuple[SamplingParams, Grammar | None]:
    """Convert bad words to token ids, and compile the grammar that the parameters ask for."""
    if params.stop and tokenizer is None:
        raise RequestError("stop strings need a tokenizer", got=params.stop, fix="use stop_token_ids")
    structured = params.structured_outputs
    if structured is not None and grammars is None:
        raise RequestError("structured outputs need a tokenizer", got="none", fix="leave them out, or pass a tokenizer")
    grammar = grammars.compile(structured) if grammars is not None and structured is not None else None
    return _with_bad_words(params, tokenizer) if params.bad_words else params, grammar


def check_chars(content: Any, most: int) -> None:
    """Raise `PromptLengthError` for more than `most` characters of text. Its work is bounded by `most`.

    `content` is a text, or lists and dicts of texts and other values. Any other value counts as one character.
    """
    count, stack = 0, [content]
    while stack and count <= most:
        value = stack.pop()
        count += len(value) or 1 if isinstance(value, str) else 1
        if type(value) is str:  # almost always
            continue
        if isinstance(value, dict) or isinstance(value, Mapping):  # noqa: SIM101 # the first is quick
            stack += value.keys()
            stack += value.values()
        elif isinstance(value, list | tuple):
            stack += value
    if count > most:
        raise PromptLengthError(
            "the prompt is too long for the context of the model",
            got=f"more than {most} characters",
            fix="send less text, or start the server with a larger --max-prompt-chars",
        )


def listed_prompts(prompts: Any) -> list[Any]:
    prompts = plain(prompts)
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise RequestError("a prompt must be a text or a list of token ids", got=shown(prompts), fix="give either")
    listed = plain(list(prompts))
    return [listed] if listed and all(isinstance(item, int) for item in listed) else listed


def text_detector(by_name: dict[str, Tool], tokenizer: Tokenizer | None) -> Detector:
    if tokenizer is None:
        raise RequestError("finding calls by text needs a tokenizer", got=[*by_name], fix="pass a detector")
    if not any(tool.start for tool in by_name.values()):
        raise RequestError("a tool has no start text", got=[*by_name], fix="give start and stop, or a detector")
    return StopStringDetector([*by_name.values()])


def request_of(
    request_id: str,
    prompt: Any,
    params: SamplingParams,
    detector: Detector | None,
    tools: dict[str, Tool],
    tokenizer: Tokenizer | None,
    grammars: Grammars | None,
) -> Request:
    params, grammar = compiled_params(params, tokenizer, grammars)
    prompt = plain(prompt)
    if isinstance(prompt, list | tuple):
        prompt = {"prompt_token_ids": prompt}
    if not isinstance(prompt, str | Mapping):
        raise RequestError("a prompt is a text or a list of token ids", got=shown(prompt), fix="give either")
    parts = {"prompt": prompt} if isinstance(prompt, str) else dict(prompt)
    unknown = sorted(set(map(str, parts)) - _PROMPT_KEYS)
    if unknown:
        raise RequestError(
            "a prompt has unknown keys", got=", ".join(unknown), fix=f"the keys are {sorted(_PROMPT_KEYS)}"
        )
    text, token_ids = parts.get("prompt"), parts.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise RequestError("a prompt's text is a string", got=shown(text), fix="give text or prompt_token_ids")
    below = None
    if token_ids is None:
        if text is None:
            raise RequestError("a prompt is a text or has prompt_token_ids", got=shown(prompt), fix="give either")
        if tokenizer is None:
            raise RequestError("this model has no tokenizer", got=text[:80], fix="give prompt_token_ids")
        token_ids, below = array("i", tokenizer.encode(text, add_special_tokens=True)), tokenizer.ids_below
    salt = parts.get("cache_salt", "")
    if not isinstance(salt, str):
        raise RequestError("cache_salt is a text", got=shown(salt), fix="give a string")
    ids = _whole_numbers(token_ids)
    return Request(request_id, ids, params, tools, detector, salt, text, grammar, ids_below=below)


def _with_bad_words(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    if tokenizer is None:
        raise RequestError("bad words need a tokenizer", got=params.bad_words, fix="use bad_words_token_ids")
    words = [word.strip() for word in params.bad_words or ()]
    # a word has other tokens with a space before it
    encoded = [tuple(tokenizer.encode(text, plain=True)) for word in words for text in (word, f" {word}")]
    return replace(
        params, bad_words=(), bad_words_token_ids=tuple(dict.fromkeys([*(params.bad_words_token_ids or ()), *encoded]))
    )


def _whole_numbers(token_ids: Any) -> Sequence[int]:
    if isinstance(token_ids, array) and token_ids.typecode == "i":
        return token_ids
    token_ids = plain(token_ids)
    try:
        if isinstance(token_ids, list | tuple) and {*map(type, token_ids)} <= {int}:
            return tuple(token_ids)
        if isinstance(token_ids, str | bytes) or any(isinstance(token, bool) for token in token_ids):
            raise TypeError
        return tuple(token.__index__() for token in token_ids)
    except (TypeError, AttributeError):
        raise RequestError(
            "prompt_token_ids are whole numbers", got=shown(token_ids), fix="give a list of them"
        ) from None


def checked_tools(tools: Any) -> list[Tool | ChatTool]:
    if tools is None:
        return []
    if isinstance(tools, Tool) or not isinstance(tools, Iterable):
        raise RequestError("tools is a list", got=shown(tools), fix="tools=[Tool(…)]")
    listed: list[Tool | ChatTool] = []
    for tool in tools:
        if not isinstance(tool, Tool | ChatTool):
            raise RequestError("a tool must be a Tool", got=shown(tool), fix="Tool(function, start=…, stop=…)")
        if tool.name in {other.name for other in listed}:
            raise RequestError("two tools have one name", got=tool.name, fix="give one of them another name")
        listed.append(tool)
    return listed


def one_each(value: Any, kind: type | None, number: int, name: str) -> list[Any]:
    """Expand one value for all prompts, or check a list with one value for each."""
    single = kind is not None and isinstance(value, kind | str | Mapping)
    if value is None or single or not isinstance(value, Iterable):
        return [value] * number
    values = list(value)
    if len(values) != number:
        raise RequestError(
            f"{name} has one entry for each prompt", got=f"{len(values)} for {number}", fix="give one for all"
        )
    return values


class MarkedTools(NamedTuple):
    """The tools that a prompt's markup can call."""

    tools: Mapping[str, Tool]  # by name; their functions take a JSON object as text
    markup: ContextMarkup
    forbidden: ForbiddenText | None  # the beginning of an interrupt; None: it is a token

    @classmethod
    def of(
        cls,
        tools: Sequence[Tool | ChatTool],
        options: AsyncCalls,
        tokenizer: Tokenizer | None,
        grammars: Grammars | None,
    ) -> Self:
        """Collect the tools without a start text.

        Raises `RequestError` without a tokenizer, or if a function cannot be called by the names of its arguments.
        """
        if not isinstance(options, AsyncCalls):
            raise RequestError("async_calls must be an AsyncCalls", got=shown(options), fix="AsyncCalls(on_end=…)")
        if tokenizer is None or grammars is None:
            raise RequestError("asynchronous calls need a tokenizer", got="none", fix="pass one, or a detector")
        declared = chat_tools([tool for tool in tools if isinstance(tool, ChatTool) or tool.start is None])
        marked = {tool.name: tool.tool for tool in declared if tool.tool is not None}
        parameters = {tool.name: [*tool.parameters.get("properties", ())] for tool in declared}
        markup = ContextMarkup(options, marked, parameters, tokenizer)
        written = markup.interrupt_token_id is None
        forbidden = grammars.forbidden(options.delimiters.interrupt) if written else None
        if forbidden is not None:
            forbidden.mask(0)  # looks through the vocabulary, here and not in a step of the engine
        return cls(marked, markup, forbidden)

    def added_to(self, request: Request) -> Request:
        """Add the markup to a request, and forbid its model to write an interrupt."""
        if self.forbidden is not None:
            return replace(request, markup=self.markup, grammar=WithoutText(self.forbidden, request.grammar))
        params, token_id = request.params, self.markup.interrupt_token_id
        bad = (*(params.bad_words_token_ids or ()), (token_id,))
        return replace(request, markup=self.markup, params=replace(params, bad_words_token_ids=bad))
