"""The prompt of a chat that goes on behind tokens that are given: none of them is written or tokenised again."""

from array import array
from collections.abc import Sequence
from typing import final

from jinfercept.chat.messages import Message
from jinfercept.chat.template import ChatTemplate, Rendered
from jinfercept.chat.turn_tokens import Continued


@final
class GivenTokens:
    """Stands in for `TurnTokens` where the caller has the tokens of one conversation.

    Args:
        token_ids: prompt and answers so far, as the model had and wrote them.
        num_messages: leading messages of the conversation that these tokens are; the last one is a turn of the assistant.
    """

    def __init__(self, token_ids: Sequence[int], num_messages: int) -> None:
        self._token_ids, self._num_messages = token_ids, num_messages

    def prompt(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        text: Rendered,
        tenant: str,
        salt: str,
        num_new: int = 1,
    ) -> Continued:
        """The given tokens and those of the messages behind them. Arguments and errors as those of `TurnTokens.prompt` and
        `ChatTemplate.appended`."""
        del text, tenant, salt, num_new
        end, behind = template.appended(messages[self._num_messages - 1], messages[self._num_messages :])
        ids = array("i", self._token_ids)
        if end and not template.ends_turn(ids[-1]):
            ids.extend(template.encode(end))
        ids.extend(template.encode(behind))
        return Continued(ids, template.decode(ids), b"", False, ())

    def remember(self, tenant: str, prompt: Continued, token_ids: Sequence[int], messages: Sequence[Message]) -> None:
        """Does nothing: the caller has the tokens."""
