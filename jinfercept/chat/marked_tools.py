"""Functions and declared tools that a prompt's request calls in context markup language."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Self

from jinfercept.calls import Tool
from jinfercept.chat.function_tools import ChatTool, chat_tools
from jinfercept.errors import RequestError, shown
from jinfercept.grammar.forbidden_text import ForbiddenText
from jinfercept.grammar.grammar import Grammars
from jinfercept.intercept.call_markup import AsyncCalls, ContextMarkup
from jinfercept.request import Request
from jinfercept.tokenizer.tokenizer import Tokenizer


class MarkedTools(NamedTuple):
    """The tools that a prompt's markup can call.

    Attributes:
        tools: by name; their functions take a JSON object as text.
        forbidden: the beginning of an interrupt, where that is text.
    """

    tools: Mapping[str, Tool]
    markup: ContextMarkup
    forbidden: ForbiddenText | None

    @classmethod
    def of(
        cls,
        tools: Sequence[Tool | ChatTool],
        options: AsyncCalls | None,
        tokenizer: Tokenizer | None,
        grammars: Grammars | None,
    ) -> Self | None:
        """The tools without a start text; None if neither the request nor one of them asks for markup.

        Args:
            tools: of the request; those with a start text are called by it.
            grammars: of the model; None without a tokenizer.

        Raises:
            RequestError: there is no tokenizer, or a function cannot be called by the names of its arguments.
        """
        if options is None:
            if not any(isinstance(tool, ChatTool) or tool.calls == "async" for tool in tools):
                return None
            options = AsyncCalls()
        if not isinstance(options, AsyncCalls):
            raise RequestError("async_calls are AsyncCalls", got=shown(options), fix="AsyncCalls(on_end=…)")
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
        """The request with the markup, in which the model cannot write an interrupt."""
        if self.forbidden is not None:
            return replace(request, markup=self.markup, grammar=self.forbidden.under(request.grammar))
        params, token_id = request.params, self.markup.interrupt_token_id
        bad = (*(params.bad_words_token_ids or ()), (token_id,))
        return replace(request, markup=self.markup, params=replace(params, bad_words_token_ids=bad))
