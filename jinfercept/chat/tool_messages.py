"""`ToolMessages`: the results of a turn's calls as tool messages, in tokens of the chat template."""

from collections.abc import Mapping
from dataclasses import replace
from typing import final

from jinfercept.calls import Call, Result
from jinfercept.chat.template import ChatTemplate
from jinfercept.intercept.rendering import CHARS_PER_TOKEN
from jinfercept.tokenizer.tokenizer import Tokenizer


@final
class ToolMessages:
    """A `Renderer`: writes the results of a turn's calls as the template's tool messages.

    Args:
        max_tokens: limit of each tool's results by its name; a longer result is cut within its message, with a note. It does
            not hold for placeholders.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, max_tokens: Mapping[str, int]) -> None:
        self._template, self._tokenizer, self._max_tokens = template, tokenizer, max_tokens

    def render(
        self, calls: tuple[Call, ...], results: tuple[Result, ...], room: int
    ) -> tuple[list[int], tuple[Result, ...]]:
        """See `hooks.Renderer`. Where there is too little room, all results are cut to the same length."""
        end, after = self._template.between(calls)
        tools = (None if result.status == "started" else call.name for call, result in zip(calls, results, strict=True))
        limits = [self._max_tokens.get(name, room) if name is not None else room for name in tools]
        share = max(limits)
        while True:
            cut = tuple(self._cut(result, min(limit, share)) for result, limit in zip(results, limits, strict=True))
            tokens = self._template.encode_results(end, after, [result.text for result in cut])
            if len(tokens) <= room or share <= 0:
                return tokens[:room], cut
            share = min(share, max(len(self._tokenizer.encode(result.text, plain=True)) for result in cut))
            share = max(0, share - -(-(len(tokens) - room) // len(cut)))

    def _cut(self, result: Result, limit: int) -> Result:
        text = self._tokenizer.decode(result.token_ids) if result.token_ids is not None else result.text
        if len(text) <= CHARS_PER_TOKEN * limit and len(self._tokenizer.encode(text, plain=True)) <= limit:
            return replace(result, text=text)
        note = f" ... (cut: longer than {limit} tokens)" if limit else ""
        body = self._tokenizer.encode(text[: CHARS_PER_TOKEN * limit], plain=True)
        room = max(0, limit - len(self._tokenizer.encode(note, plain=True)))
        status = "too_large" if result.status == "ok" else result.status
        return replace(result, text=self._tokenizer.decode(body[:room]) + note, status=status)
